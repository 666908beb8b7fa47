"""Rules of the run, training loop, optimizer, position embedding and diagnostics keys."""

import re

from maxtext.configs.rules.rule import rule
from maxtext.configs.types import Settings


@rule("compile_topology_num_slices")
def topology_has_its_slices(settings: Settings) -> str | None:
    if settings.compile_topology and settings.compile_topology_num_slices == -1:
        return (
            f"compile_topology={settings.compile_topology} needs compile_topology_num_slices: how "
            "many slices, such as 1"
        )
    return None


@rule("compiled_trainstep_file")
def aot_compiles_one_program(settings: Settings) -> str | None:
    if settings.compiled_trainstep_file and settings.enable_rampup_batch_size:
        return (
            "compiled_trainstep_file holds one program, and enable_rampup_batch_size needs one "
            "per batch size: leave one out"
        )
    return None


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


@rule("profile_periodically_period")
def periodic_profiles_do_not_overlap(settings: Settings) -> str | None:
    if 0 < settings.profile_periodically_period < settings.profiler_steps:
        return (
            f"profile_periodically_period={settings.profile_periodically_period} is below "
            f"profiler_steps={settings.profiler_steps}: a profile would start before the previous "
            "one ends"
        )
    return None


@rule("trainable_position_size")
def learned_positions_cover_the_sequence(settings: Settings) -> str | None:
    if 0 < settings.trainable_position_size < settings.max_target_length:
        return (
            f"trainable_position_size={settings.trainable_position_size} is below "
            f"max_target_length={settings.max_target_length}: the last tokens would have no "
            "position embedding"
        )
    return None


@rule("rope_min_timescale")
def rope_timescales_are_ordered(settings: Settings) -> str | None:
    if settings.rope_min_timescale >= settings.rope_max_timescale:
        return (
            f"rope_min_timescale={settings.rope_min_timescale} must be below "
            f"rope_max_timescale={settings.rope_max_timescale}"
        )
    return None
