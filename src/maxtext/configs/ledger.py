"""No silent knobs: a key that does not act, as its declaration says, may not be set."""

from collections.abc import Collection
from functools import cache

from maxtext.common.errors import ConfigError
from maxtext.configs.problems import Problem, ProblemKind
from maxtext.configs.provenance import USER_KINDS
from maxtext.configs.types import DerivedValues, Settings, declaration
from maxtext.configs.types.key import ACTS, Status
from maxtext.configs.types.multimodal import (
    AudioEncoder,
    MultimodalGeneral,
    VisionProjector,
    VisionTower,
)

# Keys that a text-only model never reads. A model's file may set them although
# use_multimodal=false.
MULTIMODAL_KEYS = {
    key
    for group in (MultimodalGeneral, VisionTower, VisionProjector, AudioEncoder)
    for key in group.model_fields
    if key != "use_multimodal"
}


@cache
def inert_keys() -> dict[str, Status]:
    """The keys that do not act."""
    statuses = {key: declaration(key).status for key in Settings.model_fields}
    return {key: status for key, status in statuses.items() if status != ACTS}


def status(key: str) -> Status:
    return Status("computed") if key in DerivedValues.model_fields else declaration(key).status


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
        and getattr(config, key) not in accepted_values(key, base)
    ]


def accepted_values(key: str, base: Settings) -> tuple[object, ...]:
    """The values of a key that does not act that are no error."""
    default, accepted = getattr(base, key), declaration(key).accepts
    return (default,) if accepted is None else (default, accepted)


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


def shown(value: object) -> str:
    return str(getattr(value, "value", value))
