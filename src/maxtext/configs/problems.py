"""Problems of a configuration as data: the key, the kind of problem, and the message."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from maxtext.common.errors import ConfigError


class ProblemKind(Enum):
    OUT_OF_RANGE = "out of range"
    UNKNOWN_CHOICE = "not one of the choices"
    CONFLICT = "does not go with another key"
    INERT = "has no effect in this configuration"
    UNSUPPORTED = "has no effect in this version"


@dataclass(frozen=True)
class Problem:
    """A complaint about the value of `key`. `message` names the value and says what to change."""

    key: str
    kind: ProblemKind
    message: str


def raise_if_any(problems: Iterable[Problem]) -> None:
    """Raise one ConfigError that lists every problem; do nothing if there is none."""
    messages = [problem.message for problem in problems]
    if messages:
        raise ConfigError(*messages)
