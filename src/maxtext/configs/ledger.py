"""No silent knobs: which keys act, which do not and why (tables/ledger.yml), and the descriptions
in base.yml.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from maxtext.common.errors import ConfigError
from maxtext.configs.problems import Problem, ProblemKind
from maxtext.configs.provenance import USER_KINDS
from maxtext.configs.sources import BASE, HERE
from maxtext.configs.types import DerivedValues, Settings
from maxtext.configs.types.multimodal import (
    AudioEncoder,
    MultimodalGeneral,
    VisionProjector,
    VisionTower,
)
from maxtext.configs.yaml_loader import YamlLoader

# Keys that a text-only model never reads. A model's file may set them although
# use_multimodal=false.
MULTIMODAL_KEYS = {
    key
    for group in (MultimodalGeneral, VisionTower, VisionProjector, AudioEncoder)
    for key in group.model_fields
    if key != "use_multimodal"
}


@dataclass(frozen=True)
class Status:
    """`kind`: acts, computed, not_yet or never."""

    kind: str
    reason: str = ""

    def __str__(self) -> str:
        text = {
            "acts": "acts",
            "computed": "computed",
            "not_yet": "does not act yet",
            "never": "does not act here",
        }[self.kind]
        return f"{text}: {self.reason}" if self.reason else text


@cache
def table() -> dict[str, Any]:
    return yaml.load((HERE / "tables" / "ledger.yml").read_text(), YamlLoader)


@cache
def inert_keys() -> dict[str, Status]:
    """The keys that do not act."""
    return {
        key: Status(kind, section["reason"])
        for kind in ("not_yet", "never")
        for section in table()[kind]
        for key in section["keys"]
    }


def status(key: str) -> Status:
    if key in DerivedValues.model_fields:
        return Status("computed")
    return inert_keys().get(key, Status("acts"))


def problems(
    config: Settings,
    base: Settings,
    sources: tuple[str, ...] = USER_KINDS,
    excused: Collection[str] = (),
) -> list[Problem]:
    """A problem for each inert key that one of the sources sets."""
    return [
        Problem(
            key,
            ProblemKind.UNSUPPORTED,
            f"{key}={shown(getattr(config, key))} ({config.source(key)}) would be ignored: "
            f"it {status}",
        )
        for key, status in inert_keys().items()
        if key not in excused
        and config.source(key).kind in sources
        and getattr(config, key)
        not in (getattr(base, key), table()["accepted_values"].get(key, getattr(base, key)))
    ]


def unsupported_by_model(config: Settings, base: Settings) -> list[Problem]:
    """A problem for each inert key that the model's file sets: the model cannot run."""
    excused = () if config.use_multimodal else MULTIMODAL_KEYS
    return problems(config, base, sources=("model",), excused=excused)


def refuse_unsupported_model(config: Settings, base: Settings) -> None:
    """Raise ConfigError if the model's file sets keys that do not act in this version."""
    if unsupported := unsupported_by_model(config, base):
        raise ConfigError(
            f"model_name={config.model_name} needs more than this version has",
            *(problem.message for problem in unsupported),
        )


def shown(value: Any) -> str:
    return str(getattr(value, "value", value))


@cache
def meanings() -> dict[str, str]:
    """The comment of each key in base.yml: on its line, or in the lines above it."""
    comments: dict[str, str] = {}
    above: list[str] = []
    for line in BASE.read_text(encoding="utf-8").splitlines():
        if line.startswith("# ") and not line.startswith(("# ----", "# ====")):
            above.append(line[2:])
            continue
        entry = re.match(r"(\w+):(?:.*?\s#\s(.*))?", line)
        if entry:
            comments[entry[1]] = entry[2] or " ".join(above)
        above = []
    return comments


def meaning(key: str) -> str:
    return meanings()[key]
