"""Rules of distillation."""

from maxtext.configs.rules.rule import in_range, inert_unless, rule
from maxtext.configs.types import Settings

SCHEDULED = ("alpha", "temperature", "beta")

in_range(0, 1, "distill_alpha", "distill_alpha_end")
in_range(0, None, "distill_beta", "distill_beta_end")


def distills(settings: Settings) -> bool:
    """Whether a teacher trains the model."""
    return bool(settings.teacher_overrides)


inert_unless(
    distills,
    "a teacher: set teacher_overrides",
    "student_overrides",
    "distill_alpha",
    "distill_alpha_end",
    "distill_alpha_schedule",
    "distill_temperature",
    "distill_temperature_end",
    "distill_temperature_schedule",
)


@rule("teacher_overrides")
def distillation_is_the_only_method(settings: Settings) -> str | None:
    if not distills(settings):
        return None
    other = next((key for key in ("use_dpo", "use_grpo") if getattr(settings, key)), None)
    return other and f"{other} and teacher_overrides exclude each other: keep one"


@rule("distill_temperature")
def temperature_is_positive(settings: Settings) -> str | None:
    if settings.distill_temperature <= 0 or (
        settings.distill_temperature_end is not None and settings.distill_temperature_end <= 0
    ):
        return "distill_temperature and distill_temperature_end must be above 0"
    return None


@rule("distill_alpha_schedule")
def schedules_have_ends(settings: Settings) -> str | None:
    for name in SCHEDULED:
        key = f"distill_{name}"
        schedule, end = getattr(settings, f"{key}_schedule"), getattr(settings, f"{key}_end")
        if schedule != "constant" and end is None:
            return f"{key}_schedule={schedule} has no end: set {key}_end"
        if schedule == "constant" and end is not None:
            return f"{key}_end={end} is not reached: set {key}_schedule=linear or cosine"
    return None
