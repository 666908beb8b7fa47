"""A configuration as text: YAML lines in the order of the groups."""

import textwrap
from collections.abc import Iterable
from enum import Enum
from typing import Any

import yaml

from maxtext.common.types import Json
from maxtext.configs.types import GROUPS, MaxTextConfig

KEYS_IN_ORDER = [key for group in GROUPS for key in group.model_fields]


def plain(value: object) -> Any:
    """The value of an enum member; anything else unchanged."""
    return value.value if isinstance(value, Enum) else value


def compact(value: object) -> str:
    """A value as YAML on one line."""
    text = yaml.safe_dump(plain(value), default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n...\n").strip()


def yaml_line(key: str, value: object) -> str:
    """`key: value`; a list of lists has one line per inner list."""
    if isinstance(value, list) and any(isinstance(item, list) for item in value):
        return "\n".join([f"{key}:", *(f"  - {compact(item)}" for item in value)])
    return f"{key}: {compact(value)}"


def hf_attributes(config: MaxTextConfig) -> Json:
    """The attributes set under `architecture`, as plain data."""
    return config.architecture.model_dump(exclude_defaults=True, mode="json")


def yaml_text(config: MaxTextConfig, keys: Iterable[str]) -> str:
    """The given keys and the `architecture` section as a YAML file that `load` can read back."""
    lines = [yaml_line(key, getattr(config, key)) for key in keys]
    if hf_attributes(config):
        section = yaml.safe_dump(
            hf_attributes(config), default_flow_style=None, sort_keys=False, width=120
        )
        lines.append("architecture:\n" + textwrap.indent(section, "  ").rstrip())
    return "\n".join(lines) + "\n"
