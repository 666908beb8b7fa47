"""What every group of keys shares, and the registry of cross-checks.

A rule is a small named function that looks at a loaded configuration and returns a sentence when
something does not fit together, saying what to change, or None. It stands in the file of the group
that it concerns.
"""

from collections.abc import Callable, Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict


class Group(BaseModel):
    """A group of keys: frozen, with unknown keys refused."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
        protected_namespaces=(),
        # each group alone is rarely instantiated, and building 75 validators takes time
        defer_build=True,
    )


# Kinds of source that are a person's choice; a model's file states facts about the model.
CHOSEN = ("file", "environment", "command line", "python")

Rule = Callable[[Any], str | None]

# Ranges of single keys, rules over what was set, which may rely on the ranges, and rules that also
# need the derived values.
RANGES: list[Rule] = []
RULES: list[Rule] = []
DERIVED_RULES: list[Rule] = []


def rule(function: Rule) -> Rule:
    RULES.append(function)
    return function


def derived_rule(function: Rule) -> Rule:
    DERIVED_RULES.append(function)
    return function


def in_range(
    low: float | None, high: float | None, *keys: str, special: Iterable[float] = ()
) -> None:
    """Register one range a key: low <= value <= high, or one of the special values; None is always
    allowed.
    """

    def bounded(key: str) -> Rule:
        def check(c: Any) -> str | None:
            value = getattr(c, key)
            if value is None or value in special:
                return None
            if (low is None or value >= low) and (high is None or value <= high):
                return None
            bounds = f"at least {low}" if high is None else f"between {low} and {high}"
            extra = "".join(f", or {number}" for number in special)
            return f"{key}={value} is out of range: it must be {bounds}{extra}"

        check.__name__ = f"{key}_in_range"
        return check

    for key in keys:
        RANGES.append(bounded(key))


def acts_only(when: Callable[[Any], bool], need: str, *keys: str) -> None:
    """Register one rule a key: a person who sets it away from its default must also have what it
    `need`s.
    """

    def needed(key: str) -> Rule:
        def check(c: Any) -> str | None:
            default = type(c).model_fields[key].get_default(call_default_factory=True)
            chosen = c.source(key).kind in CHOSEN and getattr(c, key) != default
            if not chosen or when(c):
                return None
            value = getattr(getattr(c, key), "value", getattr(c, key))
            return f"{key}={value} ({c.source(key)}) would do nothing: it needs {need}"

        check.__name__ = f"{key}_has_what_it_needs"
        return check

    for key in keys:
        RULES.append(needed(key))


def one_of(key: str, *choices: str) -> None:
    """Register a rule: a text key takes one of the choices."""

    def check(c: Any) -> str | None:
        value = getattr(c, key)
        if value in choices:
            return None
        names = ", ".join(choice or "(empty)" for choice in choices)
        return f"{key}={value!r} is not known: use one of {names}"

    check.__name__ = f"{key}_is_known"
    RULES.append(check)
