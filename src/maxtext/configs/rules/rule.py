"""How a rule is written and registered.

A rule reads a subject, such as a loaded configuration, and returns a message that says what to
change, or None. It is registered for the key that it complains about, so that callers get a
`Problem` and never have to read the message.

The checks that follow from the declarations of the keys (bounds, choices, needs) are registered
here.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from maxtext.configs import fields
from maxtext.configs.problems import Problem, ProblemKind
from maxtext.configs.types import MaxTextConfig, Settings, declaration
from maxtext.configs.types.key import Need

SubjectT = TypeVar("SubjectT")
CheckFunction = Callable[[SubjectT], str | None]
Requirement = str | Callable[[SubjectT], str]


@dataclass(frozen=True)
class Check(Generic[SubjectT]):
    """A check of settings that complains about a key: `check` returns what is wrong, or None."""

    key: str
    kind: ProblemKind
    check: CheckFunction[SubjectT]


@dataclass(frozen=True)
class Rules(Generic[SubjectT]):
    """The rules that read the same kind of subject; `settings` are the settings of a subject."""

    settings: Callable[[SubjectT], Settings]
    rules: list[Check[SubjectT]] = field(default_factory=list)
    requirements: dict[str, list[Requirement]] = field(default_factory=dict)  # of inert_unless

    def problems(self, subject: SubjectT) -> list[Problem]:
        """The problems that the rules find."""
        messages = ((rule, rule.check(subject)) for rule in self.rules)
        return [
            Problem(rule.key, rule.kind, message)
            for rule, message in messages
            if message is not None
        ]

    def needs(self, key: str, subject: SubjectT) -> list[str]:
        """The requirements of a key, in words."""
        return [
            requirement_text(requirement, subject) for requirement in self.requirements.get(key, ())
        ]

    def add(
        self, kind: ProblemKind, keys: Iterable[str], check: Callable[[str], CheckFunction]
    ) -> None:
        """A rule for each key; `check` makes its check."""
        self.rules.extend(Check(key, kind, check(key)) for key in keys)

    def rule(
        self, key: str, kind: ProblemKind = ProblemKind.CONFLICT
    ) -> Callable[[CheckFunction[SubjectT]], CheckFunction[SubjectT]]:
        """Register a check that complains about `key`."""

        def register(check: CheckFunction[SubjectT]) -> CheckFunction[SubjectT]:
            self.rules.append(Check(key, kind, check))
            return check

        return register

    def inert_unless(
        self,
        condition: Callable[[SubjectT], object],
        requirement: Requirement[SubjectT],
        *keys: str,
    ) -> None:
        """Refuse keys that a user sets away from their default while `condition` is false.

        `requirement` says in words what the condition asks for, or computes the words.
        """

        def inert_check(key: str) -> CheckFunction[SubjectT]:
            def check(subject: SubjectT) -> str | None:
                settings = self.settings(subject)
                source = settings.source(key)
                if not source.is_user or is_default(settings, key) or condition(subject):
                    return None
                value = getattr(settings, key)
                shown = getattr(value, "value", value)
                needed = requirement_text(requirement, subject)
                return f"{key}={shown} ({source}) would do nothing: it needs {needed}"

            return check

        self.add(ProblemKind.INERT, keys, inert_check)
        for key in keys:
            self.requirements.setdefault(key, []).append(requirement)


def requirement_text(requirement: Requirement[SubjectT], subject: SubjectT) -> str:
    return requirement if isinstance(requirement, str) else requirement(subject)


# Rules of one key, rules over several settings (which may rely on the ranges), and rules that also
# need derived values. `models/rule.py` has those that need the layers.
RANGES: Rules[Settings] = Rules(lambda settings: settings)
RULES: Rules[Settings] = Rules(lambda settings: settings)
DERIVED_RULES: Rules[MaxTextConfig] = Rules(lambda config: config)
rule = RULES.rule
derived_rule = DERIVED_RULES.rule
inert_unless = RULES.inert_unless


def in_range(
    low: float | None, high: float | None, *keys: str, special: Iterable[float] = ()
) -> None:
    """Each key must satisfy low <= value <= high, or be None or one of the special values."""

    def range_check(key: str) -> CheckFunction[Settings]:
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

    RANGES.add(ProblemKind.OUT_OF_RANGE, keys, range_check)


def one_of(key: str, *choices: str) -> None:
    """A text key takes one of the choices."""

    @RULES.rule(key, ProblemKind.UNKNOWN_CHOICE)
    def check(settings: Settings) -> str | None:
        value = getattr(settings, key)
        if value in choices:
            return None
        names = ", ".join(choice or "(empty)" for choice in choices)
        return f"{key}={value!r} is not known: use one of {names}"


def is_default(settings: Settings, key: str) -> bool:
    """Whether a key has its default value, whoever set it."""
    default = Settings.model_fields[key].get_default(call_default_factory=True)
    return getattr(settings, key) == default


def need_of(name: str | Need) -> Need:
    """The need of a declaration; a name is that of a key that must be set."""
    if isinstance(name, Need):
        return name
    requirement = f"{name}=true" if bool in fields.members(name) else name
    return Need(lambda settings: getattr(settings, name), requirement)


for _key in Settings.model_fields:
    _declared = declaration(_key)
    if _declared.bounds:
        in_range(_declared.low, _declared.high, _key, special=_declared.special)
    if _declared.choices:
        one_of(_key, *_declared.choices)
    for _name in _declared.needs:
        _need = need_of(_name)
        inert_unless(_need.condition, _need.requirement, _key)
