"""Rules of the reinforcement learning keys."""

from maxtext.configs.eval_sampling import sampling_problem
from maxtext.configs.rules.rule import derived_rule, inert_unless, rule
from maxtext.configs.types import MaxTextConfig, Settings
from maxtext.configs.types.enums import DatasetType


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
