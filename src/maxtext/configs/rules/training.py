"""Rules of the training and optimizer keys."""

import re

from maxtext.configs.rules.rule import in_range, inert_unless, rule
from maxtext.configs.types import Settings

in_range(1, None, "steps", "log_period", "skip_step_scaling_factor")
in_range(1, None, "eval_interval", "eval_steps", "learning_rate_schedule_steps", special=(-1,))
in_range(0, 1, "learning_rate_final_fraction", "warmup_steps_fraction", "wsd_decay_steps_fraction")
in_range(0, 1, "adam_b1", "adam_b2", "muon_beta")
in_range(0, None, "adam_eps", "adam_eps_root", "adam_weight_decay", "muon_weight_decay")
in_range(0, None, "target_eval_loss", "data_shuffle_seed", "init_weights_seed")
in_range(0, 0.99, "dropout_rate")

in_range(1, None, "max_inflight_computations")
in_range(0, None, "eval_start_step")
inert_unless(
    lambda s: s.eval_interval > 0,
    "eval_interval",
    "eval_steps",
    "eval_start_step",
    "target_eval_loss",
    "custom_mesh_and_rule_for_eval",
    "logical_axis_rules_for_eval",
)


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
