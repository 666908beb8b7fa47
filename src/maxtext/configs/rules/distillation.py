"""Rules of distillation."""

import re
from collections.abc import Iterable

from maxtext.configs.rules.rule import rule
from maxtext.configs.types import Settings
from maxtext.configs.types.needs import distills, samples_completions

SCHEDULED = ("alpha", "temperature", "beta")


@rule("teacher_overrides")
def distillation_is_the_only_method(settings: Settings) -> str | None:
    if not distills(settings):
        return None
    others = ("use_dpo", "use_grpo", "teacher_overrides", "offline_data_dir")
    chosen = [key for key in others if getattr(settings, key)]
    return f"{' and '.join(chosen)} exclude each other: keep one" if len(chosen) > 1 else None


@rule("learn_to_init_mode")
def learned_weights_have_no_adapters(settings: Settings) -> str | None:
    if settings.learn_to_init_mode and (settings.lora_rank or settings.lora_restore_path):
        return (
            "learn_to_init_mode=true trains attention weights themselves, and adapters freeze "
            "them: leave out lora_rank and lora_restore_path"
        )
    return None


@rule("use_gkd")
def prompts_are_known(settings: Settings) -> str | None:
    if not samples_completions(settings):
        return None
    if not (settings.use_sft and settings.sft_train_on_completion_only):
        return (
            "use_gkd=true samples completions of prompts, which the rows of use_sft=true and "
            "sft_train_on_completion_only=true have: set both, or gkd_lambda=0"
        )
    if settings.packing:
        return "use_gkd=true samples one completion for each row: set packing=false"
    if settings.capacity_factor > 0:
        return (
            f"capacity_factor={settings.capacity_factor:g} lets experts drop tokens, so that a "
            "sampled completion would depend on the others of its batch: set -1"
        )
    return None


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


@rule("distill_beta_end")
def beta_starts_above_zero(settings: Settings) -> str | None:
    end = settings.distill_beta_end
    if settings.distill_beta == 0 and end is not None and end > 0:
        return (
            f"distill_beta=0 turns features off, so distill_beta_end={end} is not reached: start "
            "from a small distill_beta"
        )
    return None


@rule("distill_layer_indices")
def layer_indices_are_numbers(settings: Settings) -> str | None:
    indices = settings.distill_layer_indices
    if indices is None or (indices and all(type(i) is int and i >= 0 for i in indices)):
        return None
    return f"distill_layer_indices={indices} must be a list of layer numbers from 0"


@rule("student_params_to_update")
def updated_parameters_are_patterns(settings: Settings) -> str | None:
    patterns = settings.student_params_to_update
    if patterns is None:
        return None
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        return f"student_params_to_update={patterns} must be a list of regular expressions"
    return pattern_problem("student_params_to_update", patterns)


@rule("distill_weights_copy_map")
def weight_maps_are_patterns(settings: Settings) -> str | None:
    for key in ("distill_weights_copy_map", "distill_student_weights_share_map"):
        paths = getattr(settings, key)
        if not all(isinstance(path, str) for path in paths.values()):
            return f"{key} must map patterns to the paths of parameters"
        if problem := pattern_problem(key, paths):
            return problem
    return None


def pattern_problem(key: str, patterns: Iterable[str]) -> str | None:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            return f"{key}: {pattern!r} is not a regular expression ({error})"
    return None
