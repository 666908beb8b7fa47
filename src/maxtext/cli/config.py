"""`maxtext config`: the resolved configuration with its sources, and what keys mean."""

import json
import sys
from enum import Enum
from typing import Any

import yaml

from maxtext.cli import words as cli_words
from maxtext.common.errors import ConfigError
from maxtext.configs import fields, ledger, load, sources
from maxtext.configs.load import base_values
from maxtext.configs.types import GROUPS, DerivedValues, MaxTextConfig, group_of


def run(words: list[str]) -> int:
    if words[:1] == ["explain"]:
        return explain(words[1:])
    if words[:1] == ["status"]:
        return status(words[1:])
    changed = cli_words.take_flag(words, "--changed")
    style = cli_words.take_option(words, "--format", ("yaml", "json"))
    path, settings = cli_words.split(words)
    config = load(path, settings)
    keys = changed_keys(config) if changed else list(fields.KEYS)
    if style == "json":
        print(json.dumps({key: plain(getattr(config, key)) for key in ordered(keys)}, indent=2))
    elif style == "yaml":
        print("\n".join(yaml_line(key, getattr(config, key)) for key in ordered(keys)))
    else:
        show(config, set(keys))
    return 0


def ordered(keys: list[str]) -> list[str]:
    return [key for group in GROUPS for key in group.model_fields if key in set(keys)]


def changed_keys(config: MaxTextConfig) -> list[str]:
    """The keys that differ from base.yml; computed ones follow from those."""
    base = base_values()
    computed = DerivedValues.model_fields
    return [key for key in fields.KEYS if key not in computed and getattr(config, key) != getattr(base, key)]


def plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def yaml_line(key: str, value: Any) -> str:
    """`key: value`; a list of lists takes a line for each."""
    if isinstance(value, list) and any(isinstance(item, list) for item in value):
        return "\n".join([f"{key}:", *(f"  - {compact(item)}" for item in value)])
    return f"{key}: {compact(value)}"


def show(config: MaxTextConfig, keys: set[str]) -> None:
    """One group after the other, each value with its source, aligned; in colour on a terminal."""
    colour = sys.stdout.isatty()
    bold, dim, end = ("\x1b[1m", "\x1b[2m", "\x1b[0m") if colour else ("", "", "")
    for group in GROUPS:
        chosen = [key for key in group.model_fields if key in keys]
        if not chosen:
            continue
        print(f"{bold}# {group.__name__}: {group.__doc__}{end}")
        for key in chosen:
            mark = "" if ledger.status(key).kind in ("acts", "computed") else ", does not act"
            first, *more = yaml_line(key, getattr(config, key)).splitlines()
            print(f"{first:<60}  {dim}# {config.source(key)}{mark}{end}")
            for line in more:
                print(line)
        print()


def explain(words: list[str]) -> int:
    if not words or "=" in words[0]:
        raise ConfigError("explain which key? e.g. maxtext config explain remat_policy")
    key = words[0]
    if key not in fields.KEYS:
        raise ConfigError(f"unknown key {key!r}{sources.suggest(key, fields.KEYS)}")
    path, settings = cli_words.split(words[1:])
    config = load(path, settings)
    default = base_values() if key not in DerivedValues.model_fields else None
    lines = {
        "group": group_of(key).__name__,
        "meaning": ledger.meaning(key),
        "type": fields.describe(key),
        "default": compact(getattr(default, key)) if default else "computed",
        "value": compact(getattr(config, key)),
        "source": str(config.source(key)),
        "status": str(ledger.status(key)),
    }
    print(key)
    for name, text in lines.items():
        print(f"  {name:8} {text}")
    return 0


def compact(value: Any) -> str:
    """A value on one line."""
    text = yaml.safe_dump(plain(value), default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n...\n").strip()


def status(words: list[str]) -> int:
    if words:
        raise ConfigError(f"maxtext config status takes no further words, got {words[0]!r}")
    kinds: dict[str, list[str]] = {"acts": [], "computed": [], "not_yet": [], "never": []}
    for key in ordered(list(fields.KEYS)):
        kinds[ledger.status(key).kind].append(key)
    count = {kind: len(keys) for kind, keys in kinds.items()}
    print(
        f"{len(fields.KEYS)} keys: {count['acts']} act, {count['computed']} are computed, "
        f"{count['not_yet']} do not act yet, {count['never']} do not act here"
    )
    titles = {"acts": "act", "computed": "are computed", "not_yet": "do not act yet", "never": "do not act here"}
    for kind, keys in kinds.items():
        by_reason: dict[str, list[str]] = {}
        for key in keys:
            by_reason.setdefault(ledger.status(key).reason, []).append(key)
        for reason, named in by_reason.items():
            print(f"\n# {len(named)} {titles[kind]}{': ' + reason if reason else ''}")
            for key in named:
                print(f"{key}")
    return 0
