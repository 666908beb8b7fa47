"""The value of a key together with where it was set."""

from dataclasses import dataclass
from typing import Any

# Kinds of source that a user writes. A model's file describes the model, a default nobody chose.
USER_KINDS = ("file", "environment", "command line", "python")


@dataclass(frozen=True)
class Source:
    """Where a value was set. `kind`: default, file, model, environment, command line, python,
    derived.
    """

    kind: str
    location: str = ""
    line: int | None = None

    @property
    def is_user(self) -> bool:
        """Whether a user set the value: in a file, the environment, on the command line or in
        Python.
        """
        return self.kind in USER_KINDS

    def __str__(self) -> str:
        location = f"{self.location}:{self.line}" if self.line else self.location
        if self.kind in ("file", "model"):
            return location
        return f"{self.kind} ({location})" if location else self.kind


@dataclass(frozen=True)
class Setting:
    value: Any
    source: Source


Layer = dict[str, Setting]
