"""Rules of the post-training keys: reinforcement learning, distillation, supervised fine-tuning and
preference optimization.
"""

import re
from collections.abc import Iterable

from maxtext.configs.eval_sampling import sampling_problem
from maxtext.configs.rules.rule import derived_rule, inert_unless, rule
from maxtext.configs.types import MaxTextConfig, Settings
from maxtext.configs.types.enums import DatasetType
from maxtext.configs.types.key import distills, samples_completions


@rule("off_policy_steps")
def batches_ahead_are_whole(settings: Settings) -> str | None:
    steps, iterations = settings.off_policy_steps, settings.num_iterations
    if settings.use_grpo and 0 < steps < iterations:
        return (
            f"off_policy_steps={steps} is less than the num_iterations={iterations} updates of a "
            "batch, so that none could be sampled ahead: raise it, or set 0"
        )
    return None


@rule("num_generations")
def groups_have_two_completions(settings: Settings) -> str | None:
    if settings.use_grpo and settings.num_generations < 2:
        return "num_generations=1 has nothing to compare a completion with: set at least 2"
    return None


@rule("dual_clip")
def dual_clip_is_above_the_upper_clip(settings: Settings) -> str | None:
    high = settings.epsilon_high
    bound = 1 + (settings.grpo_epsilon if high is None else high)
    if settings.dual_clip is not None and settings.dual_clip <= bound:
        return f"dual_clip={settings.dual_clip:g} is not above the clip {bound:g} of the ratio"
    return None


@rule("reward_functions_path")
def reward_functions_have_names(settings: Settings) -> str | None:
    if settings.reward_functions_path and not settings.reward_functions:
        return "reward_functions_path needs reward_functions, the names of functions in it"
    return None


@rule("stop_strings")
def stop_strings_are_texts(settings: Settings) -> str | None:
    if settings.stop_strings is not None and not all(settings.stop_strings):
        return "stop_strings has an empty text, which would end every completion: leave it out"
    return None


@rule("decode_sampling_strategy")
def completions_of_a_group_differ(settings: Settings) -> str | None:
    if settings.use_grpo and (
        settings.decode_sampling_strategy.value == "greedy"
        or settings.decode_sampling_temperature == 0
    ):
        return (
            "use_grpo compares completions that differ: set decode_sampling_strategy=weighted and "
            "a decode_sampling_temperature above 0"
        )
    return None


@rule("decode_sampling_strategy")
def truncation_belongs_to_the_strategy(settings: Settings) -> str | None:
    strategy, top_k = settings.decode_sampling_strategy.value, settings.decode_sampling_top_k
    top_p = settings.decode_sampling_nucleus_p
    samples = settings.use_grpo or settings.use_gkd
    if samples and top_k > 0 and strategy not in ("topk", "composite"):
        return (
            f"decode_sampling_top_k={top_k} does nothing with decode_sampling_strategy={strategy}: "
            "set topk or composite"
        )
    if samples and 0 < top_p < 1 and strategy not in ("nucleus", "composite"):
        return (
            f"decode_sampling_nucleus_p={top_p:g} does nothing with decode_sampling_strategy="
            f"{strategy}: set nucleus or composite"
        )
    return None


@rule("packing")
def prompts_are_not_packed(settings: Settings) -> str | None:
    if settings.use_grpo and settings.packing:
        return "a prompt is a row of its own: set packing=false with use_grpo"
    return None


@rule("max_prefill_predict_length")
def prompts_leave_room_for_a_completion(settings: Settings) -> str | None:
    length = settings.max_prefill_predict_length
    if settings.use_grpo and length >= settings.max_target_length:
        return (
            f"max_prefill_predict_length={length} leaves no token of max_target_length="
            f"{settings.max_target_length} for a completion: lower it"
        )
    return None


@rule("eval_interval")
def evaluation_has_problems(settings: Settings) -> str | None:
    if settings.use_grpo and settings.eval_interval > 0 and not settings.num_test_batches:
        return (
            f"eval_interval={settings.eval_interval} evaluates num_test_batches=0 batches: raise "
            "it, or leave eval_interval out"
        )
    return None


@rule("test_batch_start_index")
def evaluation_begins_before_it_ends(settings: Settings) -> str | None:
    first, batches = settings.test_batch_start_index, settings.num_test_batches
    if settings.use_grpo and batches > 0 and first >= batches * settings.batch_size:
        return (
            f"test_batch_start_index={first} is not below num_test_batches={batches} times "
            f"batch_size={settings.batch_size}, where evaluation ends: lower it"
        )
    return None


rule("eval_sampling_strategy")(sampling_problem)


@rule("train_micro_batch_size")
def microbatches_are_equal(settings: Settings) -> str | None:
    size = settings.train_micro_batch_size
    if settings.use_grpo and size > 0 and settings.batch_size % size:
        return f"train_micro_batch_size={size} does not divide batch_size={settings.batch_size}"
    return None


@rule("gradient_accumulation_steps")
def microbatches_have_one_size(settings: Settings) -> str | None:
    size, prompts = settings.train_micro_batch_size, settings.batch_size
    microbatches, steps = prompts // max(size, 1), settings.gradient_accumulation_steps
    rows = prompts * settings.num_generations
    if settings.use_grpo and rows % steps:
        return (
            f"gradient_accumulation_steps={steps} does not divide the {rows} completions of a "
            f"step, batch_size={prompts} times num_generations={settings.num_generations}"
        )
    if settings.use_grpo and size > 0 and not prompts % size and steps != microbatches:
        return (
            f"gradient_accumulation_steps={steps} contradicts train_micro_batch_size={size}, which "
            f"makes {microbatches} microbatches of batch_size={prompts}: set one of them"
        )
    return None


@rule("lora_dropout")
def sampler_and_trainer_compute_the_same(settings: Settings) -> str | None:
    rates = {"lora_dropout": settings.lora_dropout}
    if settings.enable_dropout:
        rates["dropout_rate"] = settings.dropout_rate
    key = next((key for key, rate in rates.items() if rate > 0), None)
    if settings.use_grpo and key is not None:
        return (
            f"{key}={rates[key]:g} would give sampled tokens other log-probabilities in training "
            "than in the sampler: set 0 with use_grpo"
        )
    return None


@rule("dataset_processor_path")
def rows_have_one_function(settings: Settings) -> str | None:
    if settings.dataset_processor_path and settings.formatting_func_path:
        return (
            "dataset_processor_path and formatting_func_path both turn records into rows: set one"
        )
    return None


@rule("dataset_type")
def prompts_are_records(settings: Settings) -> str | None:
    if settings.use_grpo and settings.dataset_type is DatasetType.SYNTHETIC:
        return "dataset_type=synthetic has no prompts for use_grpo: use grain, hf or tfds"
    return None


@derived_rule("context_parallel_load_balance")
def tokens_are_in_order(config: MaxTextConfig) -> str | None:
    if (
        config.use_grpo
        and config.context_parallel_size > 1
        and config.context_parallel_load_balance
    ):
        return "use_grpo scores tokens in their order: set context_parallel_load_balance=false"
    return None


@rule("capacity_factor")
def completions_do_not_depend_on_each_other(settings: Settings) -> str | None:
    if settings.use_grpo and settings.capacity_factor > 0:
        return (
            f"capacity_factor={settings.capacity_factor:g} lets experts drop tokens, so that a "
            "completion would depend on the others of its batch: set -1"
        )
    return None


def copies_weights(settings: Settings) -> bool:
    """Whether the sampler may have copies of the weights, on other devices or in another layout."""
    shares_all = settings.trainer_devices_fraction == settings.sampler_devices_fraction == 1
    sizes = (
        settings.rollout_data_parallelism,
        settings.rollout_tensor_parallelism,
        settings.rollout_expert_parallelism,
    )
    return not shares_all or sizes != (-1, -1, 1)


inert_unless(
    lambda s: s.use_grpo and copies_weights(s),
    "a sampler with devices of its own: trainer_devices_fraction and sampler_devices_fraction",
    "reshard_chunk_size",
)


@rule("num_trainer_slices")
def both_have_slices(settings: Settings) -> str | None:
    trainer, sampler = settings.num_trainer_slices, settings.num_samplers_slices
    if (trainer > 0) != (sampler > 0):
        return (
            f"num_trainer_slices={trainer} and num_samplers_slices={sampler}: set both, or neither"
        )
    return None


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


METHOD_KEYS = ("use_dpo", "use_sft", "use_grpo", "num_labels")


def method_of(settings: Settings) -> str | None:
    """The key that makes records rows of fine-tuning, or None."""
    return next((key for key in METHOD_KEYS if getattr(settings, key)), None)


@rule("num_labels")
def head_has_one_score(settings: Settings) -> str | None:
    if settings.num_labels > 1:
        return (
            f"num_labels={settings.num_labels} is a classifier, and only reward models, which have "
            "num_labels=1, are supported"
        )
    if settings.num_labels and (settings.teacher_overrides or settings.offline_data_dir):
        return "num_labels=1 is a reward model, which has no logits to distill: leave it out"
    return None


@rule("use_dpo")
def one_fine_tuning_method(settings: Settings) -> str | None:
    chosen = [key for key in METHOD_KEYS if getattr(settings, key)]
    return f"{' and '.join(chosen)} exclude each other: keep one" if len(chosen) > 1 else None


@rule("dpo_label_smoothing")
def flipped_labels_are_fewer_than_half(settings: Settings) -> str | None:
    if settings.dpo_loss_type == "robust" and settings.dpo_label_smoothing >= 0.5:
        return (
            f"dpo_label_smoothing={settings.dpo_label_smoothing} is the part of labels that are "
            "flipped, and dpo_loss_type=robust needs it below 0.5"
        )
    return None


@rule("dpo_loss_type")
def kl_is_of_a_batch(settings: Settings) -> str | None:
    microbatches = settings.gradient_accumulation_steps
    if settings.use_dpo and settings.dpo_loss_type == "kto" and microbatches > 1:
        return (
            "dpo_loss_type=kto estimates a KL divergence from all pairs of a batch, and "
            f"gradient_accumulation_steps={microbatches} computes only a part of them at a time: "
            "set gradient_accumulation_steps=1 or another dpo_loss_type"
        )
    return None


@rule("quantization")
def adapters_multiply_in_floats(settings: Settings) -> str | None:
    has_adapters = settings.lora_rank > 0 or settings.lora_restore_path
    if has_adapters and settings.quantization is not None and settings.quantization.value:
        return (
            f"quantization={settings.quantization.value} would do nothing: a model with adapters "
            "multiplies in dtype; lora_weight_qtype quantizes its base"
        )
    return None


@derived_rule("lora_rank")
def rank_is_low(config: MaxTextConfig) -> str | None:
    if config.lora_rank > config.emb_dim:
        return (
            f"lora_rank={config.lora_rank} is above emb_dim={config.emb_dim}, the rank of a full "
            "update: lower it"
        )
    return None


@rule("dataset_type")
def rows_are_records(settings: Settings) -> str | None:
    method, kind = method_of(settings), settings.dataset_type
    if method and kind in (DatasetType.C4MLPERF, DatasetType.OLMO_GRAIN):
        return (
            f"dataset_type={kind.value} has no conversations or pairs for {method}: use grain, hf "
            "or tfds"
        )
    return None


@rule("tokenize_train_data")
def rows_are_text(settings: Settings) -> str | None:
    method = method_of(settings)
    for key in ("tokenize_train_data", "tokenize_eval_data"):
        if method and not getattr(settings, key):
            return f"{method} tokenizes conversations and texts itself: leave {key}=true"
    return None


@rule("use_truncation")
def rows_are_not_split(settings: Settings) -> str | None:
    method = method_of(settings)
    if method and not settings.use_truncation:
        return (
            f"use_truncation=false splits documents, but {method} keeps rows whole: leave it true "
            "and raise max_target_length"
        )
    return None


@rule("packing")
def pairs_are_not_packed(settings: Settings) -> str | None:
    for key in ("use_dpo", "num_labels"):
        if getattr(settings, key) and settings.packing:
            return f"a preference pair is a row of its own: set packing=false with {key}"
    return None


@rule("grain_packing_type")
def conversations_are_not_split(settings: Settings) -> str | None:
    if settings.use_sft and settings.packing and settings.grain_packing_type == "concat_then_split":
        return (
            "grain_packing_type=concat_then_split splits conversations where rows end: use "
            "first_fit or best_fit with use_sft"
        )
    return None


@rule("max_prompt_length")
def prompts_leave_room_for_a_response(settings: Settings) -> str | None:
    length = settings.max_prompt_length
    if length is not None and length > settings.max_target_length:
        return (
            f"max_prompt_length={length} leaves no token of max_target_length="
            f"{settings.max_target_length} for a completion: lower it"
        )
    return None
