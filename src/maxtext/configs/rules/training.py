"""Rules of the training and optimizer keys."""

import re

from maxtext.configs.rules.rule import rule
from maxtext.configs.types import Settings


@rule("eval_start_step")
def evaluation_begins_before_the_end(settings: Settings) -> str | None:
    if settings.eval_interval > 0 and settings.eval_start_step > settings.steps:
        return (
            f"eval_start_step={settings.eval_start_step} is after the last of steps="
            f"{settings.steps}: nothing would be evaluated; lower it"
        )
    return None


@rule("warmup_steps_fraction")
def warmup_and_decay_fit_in_the_schedule(settings: Settings) -> str | None:
    if (
        settings.lr_schedule_type.value == "wsd"
        and settings.warmup_steps_fraction + settings.wsd_decay_steps_fraction > 1
    ):
        return (
            "warmup_steps_fraction + wsd_decay_steps_fraction is above 1: the two phases "
            "would overlap"
        )
    return None


@rule("mu_dtype")
def mu_dtype_is_a_float(settings: Settings) -> str | None:
    if settings.mu_dtype not in ("", "float32", "bfloat16", "float16"):
        return (
            f"mu_dtype={settings.mu_dtype!r} is not known: use float32, bfloat16, float16, or "
            "empty for the dtype of the weights"
        )
    return None


@rule("adamw_mask")
def patterns_are_regular_expressions(settings: Settings) -> str | None:
    for key in ("adamw_mask", "trainable_parameters_mask"):
        for pattern in getattr(settings, key):
            try:
                re.compile(pattern)
            except re.error as error:
                return f"{key}: {pattern!r} is not a regular expression ({error})"
    return None
