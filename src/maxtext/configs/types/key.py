"""The declaration of a key: its default, meaning, bounds, what it needs, and whether it acts.

base.yml, the checks of bounds and needs, the ledger and `maxtext config explain` follow from it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field
from pydantic.fields import FieldInfo

INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1


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


ACTS = Status("acts")


@dataclass(frozen=True)
class Need:
    """A key does nothing while `condition` is false; `requirement` says in words what it asks."""

    condition: Callable[[Any], object]
    requirement: str


@dataclass(frozen=True)
class Declaration:
    meaning: str
    low: float | None = None  # None: no bound
    high: float | None = None
    special: tuple[float, ...] = ()  # values outside of the bounds
    limit: int = INT32_MAX  # largest magnitude of its whole numbers
    choices: tuple[str, ...] = ()  # of a text
    is_path: bool = False  # of this machine
    # A key that must be set, or what else is required, in the order of the checks
    needs: tuple[str | Need, ...] = ()
    status: Status = ACTS
    accepts: Any = None  # of a key that does not act: a value that describes what happens anyway
    base: Any = None  # its value in base.yml, if that is not the default of its type

    @property
    def bounds(self) -> str:
        """Such as "at least 1, or -1"; empty: none."""
        if self.low is None and self.high is None:
            return ""
        text = f"at least {self.low}" if self.high is None else f"{self.low} to {self.high}"
        return text + "".join(f", or {number}" for number in self.special)


def key(
    default: Any,
    meaning: str,
    *,
    low: float | None = None,
    high: float | None = None,
    special: Iterable[float] = (),
    limit: int = INT32_MAX,
    choices: Iterable[str] = (),
    is_path: bool = False,
    needs: str | Need | Iterable[str | Need] = (),
    status: Status = ACTS,
    accepts: Any = None,
    base: Any = None,
) -> Any:
    """A field of a group, as `Declaration` describes it. The default `list` or `dict` is empty."""
    declaration = Declaration(
        meaning=meaning,
        low=low,
        high=high,
        special=tuple(special),
        limit=limit,
        choices=tuple(choices),
        is_path=is_path,
        needs=(needs,) if isinstance(needs, str | Need) else tuple(needs),
        status=status,
        accepts=accepts,
        base=base,
    )
    extra: dict[str, Any] = {"declaration": declaration}
    if default is list or default is dict:
        return Field(default_factory=default, json_schema_extra=extra)
    return Field(default=default, json_schema_extra=extra)


def declaration_of(field: FieldInfo) -> Declaration:
    extra: Any = field.json_schema_extra
    assert isinstance(extra, Mapping), "every key is declared by `key`"
    return extra["declaration"]
