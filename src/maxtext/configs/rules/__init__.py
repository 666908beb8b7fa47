"""Cross-checks of a configuration: one module for each module of key groups in `types`."""

from maxtext.configs.problems import Problem
from maxtext.configs.rules import model, parallelism, rl, run
from maxtext.configs.rules.rule import DERIVED_RULES, RANGES, RULES
from maxtext.configs.types import MaxTextConfig, Settings


def check_ranges(settings: Settings) -> list[Problem]:
    """Keys outside of their range."""
    return RANGES.problems(settings)


def check_settings(settings: Settings) -> list[Problem]:
    """Settings that do not fit together. Assumes that the ranges hold."""
    return RULES.problems(settings)


def check_derived(config: MaxTextConfig) -> list[Problem]:
    """Settings that do not fit the derived values."""
    return DERIVED_RULES.problems(config)
