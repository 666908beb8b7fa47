"""How a rule is written and registered.

A rule reads a loaded configuration and returns a message that says what to change, or None. It is
registered for the key that it complains about, so that callers get a `Problem` and never have to
read the message.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from maxtext.configs.problems import Problem, ProblemKind
from maxtext.configs.types import MaxTextConfig, Settings

ConfigT = TypeVar("ConfigT", bound=Settings)


@dataclass(frozen=True)
class Rule(Generic[ConfigT]):
    key: str
    kind: ProblemKind
    check: Callable[[ConfigT], str | None]

    def problem(self, config: ConfigT) -> Problem | None:
        message = self.check(config)
        return None if message is None else Problem(self.key, self.kind, message)


# Rules of one key, rules over several settings (which may rely on the ranges), and rules that also
# need derived values.
RANGES: list[Rule[Settings]] = []
RULES: list[Rule[Settings]] = []
DERIVED_RULES: list[Rule[MaxTextConfig]] = []


def problems(rules: Iterable[Rule[ConfigT]], config: ConfigT) -> list[Problem]:
    """The problems that the rules find in a configuration."""
    return [problem for rule in rules if (problem := rule.problem(config)) is not None]


SettingsCheck = Callable[[Settings], str | None]
ConfigCheck = Callable[[MaxTextConfig], str | None]


def rule(
    key: str, kind: ProblemKind = ProblemKind.CONFLICT
) -> Callable[[SettingsCheck], SettingsCheck]:
    """Register a check of the settings that complains about `key`."""

    def register(check: SettingsCheck) -> SettingsCheck:
        RULES.append(Rule(key, kind, check))
        return check

    return register


def derived_rule(
    key: str, kind: ProblemKind = ProblemKind.CONFLICT
) -> Callable[[ConfigCheck], ConfigCheck]:
    """Register a check that also needs the derived values."""

    def register(check: ConfigCheck) -> ConfigCheck:
        DERIVED_RULES.append(Rule(key, kind, check))
        return check

    return register


def in_range(
    low: float | None, high: float | None, *keys: str, special: Iterable[float] = ()
) -> None:
    """Each key must satisfy low <= value <= high, or be None or one of the special values."""

    def range_check(key: str) -> SettingsCheck:
        def check(settings: Settings) -> str | None:
            value = getattr(settings, key)
            if value is None or value in special:
                return None
            if (low is None or value >= low) and (high is None or value <= high):
                return None
            bounds = f"at least {low}" if high is None else f"between {low} and {high}"
            extra = "".join(f", or {number}" for number in special)
            return f"{key}={value} is out of range: it must be {bounds}{extra}"

        return check

    RANGES.extend(Rule(key, ProblemKind.OUT_OF_RANGE, range_check(key)) for key in keys)


def one_of(key: str, *choices: str) -> None:
    """A text key takes one of the choices."""

    def check(settings: Settings) -> str | None:
        value = getattr(settings, key)
        if value in choices:
            return None
        names = ", ".join(choice or "(empty)" for choice in choices)
        return f"{key}={value!r} is not known: use one of {names}"

    RULES.append(Rule(key, ProblemKind.UNKNOWN_CHOICE, check))


def is_default(settings: Settings, key: str) -> bool:
    """Whether a key has its default value, whoever set it."""
    default = Settings.model_fields[key].get_default(call_default_factory=True)
    return getattr(settings, key) == default


def inert_unless(condition: Callable[[Settings], object], requirement: str, *keys: str) -> None:
    """Refuse keys that a user sets away from their default while `condition` is false.

    `requirement` says in words what the condition asks for.
    """

    def inert_check(key: str) -> SettingsCheck:
        def check(settings: Settings) -> str | None:
            source = settings.source(key)
            if not source.is_user or is_default(settings, key) or condition(settings):
                return None
            value = getattr(settings, key)
            shown = getattr(value, "value", value)
            return f"{key}={shown} ({source}) would do nothing: it needs {requirement}"

        return check

    RULES.extend(Rule(key, ProblemKind.INERT, inert_check(key)) for key in keys)
