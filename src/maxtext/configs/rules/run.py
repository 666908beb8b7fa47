"""Rules of the run, training loop, optimizer, position embedding, diagnostics, checkpointing, data,
tokenizer, batch size and inference keys.
"""

import re

from maxtext.configs.rules.rule import derived_rule, inert_unless, rule
from maxtext.configs.sources import is_preset
from maxtext.configs.types import MaxTextConfig, Settings
from maxtext.configs.types.enums import DatasetType
from maxtext.configs.types.key import samples_completions


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


@rule("speculative_method")
def drafts_have_a_source(settings: Settings) -> str | None:
    method, path = settings.speculative_method, settings.speculative_model_path
    if method in ("draft", "eagle3") and not path:
        part = "model" if method == "draft" else "head"
        return f"speculative_method={method} needs a {part} that drafts: set speculative_model_path"
    if method and (settings.use_grpo or samples_completions(settings)):
        return (
            f"speculative_method={method} is for serving: completions for training are sampled in "
            "batches that are too large for it, so leave it out"
        )
    return None


@rule("prompt_lookup_min")
def lookup_lengths_are_ordered(settings: Settings) -> str | None:
    low, high = settings.prompt_lookup_min, settings.prompt_lookup_max
    if low > high:
        return f"prompt_lookup_min={low} must not be above prompt_lookup_max={high}"
    return None


@rule("rope_min_timescale")
def rope_timescales_are_ordered(settings: Settings) -> str | None:
    if settings.rope_min_timescale >= settings.rope_max_timescale:
        return (
            f"rope_min_timescale={settings.rope_min_timescale} must be below "
            f"rope_max_timescale={settings.rope_max_timescale}"
        )
    return None


@rule("load_parameters_path")
def one_checkpoint_to_load(settings: Settings) -> str | None:
    if settings.load_parameters_path and settings.load_full_state_path:
        return (
            "load_parameters_path and load_full_state_path are both set, but a run starts from "
            "one checkpoint: keep load_full_state_path to continue that run, or "
            "load_parameters_path to start a new run from its weights"
        )
    return None


@rule("elastic_enabled")
def elastic_runs_need_checkpoints(settings: Settings) -> str | None:
    if settings.elastic_enabled and not settings.enable_checkpointing:
        return (
            "elastic_enabled=true continues from the last checkpoint: it needs "
            "enable_checkpointing=true"
        )
    return None


@rule("checkpoint_storage_use_zarr3")
def zarr3_needs_ocdbt(settings: Settings) -> str | None:
    if settings.checkpoint_storage_use_zarr3 and not settings.checkpoint_storage_use_ocdbt:
        return (
            "checkpoint_storage_use_zarr3=true needs checkpoint_storage_use_ocdbt=true: set both "
            "or neither"
        )
    return None


@rule("local_checkpoint_period")
def local_checkpoints_need_a_folder_and_a_period(settings: Settings) -> str | None:
    if not (settings.enable_multi_tier_checkpointing or settings.enable_emergency_checkpoint):
        return None
    missing = [
        key
        for key in ("local_checkpoint_directory", "local_checkpoint_period")
        if not getattr(settings, key)
    ]
    if missing:
        return f"multi-tier checkpointing also needs {' and '.join(missing)}"
    if settings.local_checkpoint_period >= settings.checkpoint_period:
        return (
            f"local_checkpoint_period={settings.local_checkpoint_period} must be smaller than "
            f"checkpoint_period={settings.checkpoint_period}: local checkpoints are the frequent "
            "ones"
        )
    return None


@rule("enable_multi_tier_checkpointing")
def one_kind_of_local_checkpoint(settings: Settings) -> str | None:
    if settings.enable_multi_tier_checkpointing and settings.enable_emergency_checkpoint:
        return (
            "enable_multi_tier_checkpointing and enable_emergency_checkpoint exclude each other: "
            "keep one"
        )
    return None


@rule("checkpoint_todelete_subdir")
def one_folder_for_expired_checkpoints(settings: Settings) -> str | None:
    if settings.checkpoint_todelete_subdir and settings.checkpoint_todelete_full_path:
        return (
            "checkpoint_todelete_subdir and checkpoint_todelete_full_path exclude each other: "
            "keep one"
        )
    return None


@rule("enable_checkpointing")
def local_checkpoints_need_checkpointing(settings: Settings) -> str | None:
    local = settings.enable_multi_tier_checkpointing or settings.enable_emergency_checkpoint
    if not settings.enable_checkpointing and (local or settings.enable_autocheckpoint):
        return (
            "enable_checkpointing=false contradicts multi-tier or automatic checkpoints: set it "
            "to true"
        )
    return None


inert_unless(
    lambda s: s.packing or is_preset(s.source("grain_packing_type")),
    "packing=true",
    "grain_packing_type",
)


@rule("num_vocab_tiling")
def tiles_divide_the_vocabulary_batch(settings: Settings) -> str | None:
    if settings.num_vocab_tiling > 1 and settings.max_target_length % settings.num_vocab_tiling:
        return (
            f"num_vocab_tiling={settings.num_vocab_tiling} does not divide "
            f"max_target_length={settings.max_target_length}: use a divisor"
        )
    return None


@derived_rule("per_device_batch_size")
def a_step_has_at_least_one_sequence(config: MaxTextConfig) -> str | None:
    if config.global_batch_size_to_train_on < 1:
        return (
            f"per_device_batch_size={config.per_device_batch_size} on {config.num_target_devices} "
            "devices is less than one sequence per step: increase it"
        )
    return None


@derived_rule("per_device_batch_size")
def fractional_batches_fill_the_devices(config: MaxTextConfig) -> str | None:
    product = config.per_device_batch_size * config.num_target_devices
    if abs(product - round(product)) > 1e-6:
        return (
            f"per_device_batch_size={config.per_device_batch_size} on {config.num_target_devices} "
            f"devices makes {product:g} sequences: choose a value that makes a whole number"
        )
    return None


@rule("per_device_batch_size_start")
def rampup_grows_to_the_full_batch(settings: Settings) -> str | None:
    if not settings.enable_rampup_batch_size:
        return None
    start, step, full = (
        settings.per_device_batch_size_start,
        settings.per_device_batch_size_increment,
        settings.per_device_batch_size,
    )
    if (
        step <= 0
        or start >= full
        or abs((full - start) / step - round((full - start) / step)) > 1e-6
    ):
        return (
            f"batch ramp-up from {start} by {step} does not end at per_device_batch_size={full}: "
            "choose per_device_batch_size_start below it, and an increment that divides the "
            "difference"
        )
    return None


@rule("enable_rampup_batch_size")
def rampup_starts_from_whole_sequences(settings: Settings) -> str | None:
    if settings.enable_rampup_batch_size and (
        settings.expansion_factor_real_data > 0 or settings.per_device_batch_size_start < 1
    ):
        return (
            "enable_rampup_batch_size needs at least one sequence per device: leave "
            "expansion_factor_real_data -1 and set per_device_batch_size_start to 1 or more"
        )
    return None


@rule("packing")
def c4_mlperf_is_packed(settings: Settings) -> str | None:
    if settings.dataset_type is DatasetType.C4MLPERF and not settings.packing:
        return "dataset_type=c4_mlperf always packs documents: leave packing=true"
    return None


@derived_rule("expansion_factor_real_data")
def expansion_factor_divides_the_devices(config: MaxTextConfig) -> str | None:
    factor = config.expansion_factor_real_data
    if factor > 0 and (
        factor < 1 or factor != round(factor) or config.num_target_devices % round(factor)
    ):
        return (
            f"expansion_factor_real_data={factor:g} does not divide {config.num_target_devices} "
            "devices: choose a whole number that does, or -1"
        )
    return None


@rule("chat_template")
def one_chat_template(settings: Settings) -> str | None:
    if settings.chat_template and settings.chat_template_path:
        return "chat_template and chat_template_path both set the template: keep one"
    return None


@rule("olmo_path_remap_from")
def remapped_paths_come_in_pairs(settings: Settings) -> str | None:
    if bool(settings.olmo_path_remap_from) != bool(settings.olmo_path_remap_to):
        return "olmo_path_remap_from and olmo_path_remap_to go together: set both or neither"
    return None


@rule("max_prefill_predict_length")
def prompts_fit_in_the_sequence(settings: Settings) -> str | None:
    if (
        settings.source("use_chunked_prefill").is_user
        and settings.use_chunked_prefill
        and settings.max_prefill_predict_length > settings.max_target_length
    ):
        return (
            f"max_prefill_predict_length={settings.max_prefill_predict_length} is above "
            f"max_target_length={settings.max_target_length}: the prompt is part of the sequence"
        )
    return None


@rule("gpu_memory_utilization")
def generation_has_memory(settings: Settings) -> str | None:
    for key in ("gpu_memory_utilization", "kv_cache_memory_fraction"):
        if getattr(settings, key) == 0:
            return f"{key}=0 leaves no memory: set it above 0 and at most 1"
    return None


@rule("decode_sampling_strategy")
def sampling_strategy_has_its_parameter(settings: Settings) -> str | None:
    strategy = settings.decode_sampling_strategy.value
    if strategy == "nucleus" and settings.decode_sampling_nucleus_p <= 0:
        return "decode_sampling_strategy=nucleus needs decode_sampling_nucleus_p, e.g. 0.95"
    if strategy == "topk" and settings.decode_sampling_top_k < 1:
        return "decode_sampling_strategy=topk needs decode_sampling_top_k, e.g. 50"
    if strategy == "composite" and (
        settings.decode_sampling_nucleus_p <= 0 or settings.decode_sampling_top_k < 1
    ):
        return (
            "decode_sampling_strategy=composite needs decode_sampling_top_k and "
            "decode_sampling_nucleus_p"
        )
    return None


@rule("prefill_cache_axis_order")
def axis_orders_are_permutations(settings: Settings) -> str | None:
    for key in ("prefill_cache_axis_order", "ar_cache_axis_order", "compute_axis_order"):
        if sorted(getattr(settings, key).replace(" ", "").split(",")) != ["0", "1", "2", "3"]:
            return f"{key}={getattr(settings, key)!r} is not a permutation of the axes 0,1,2,3"
    return None


@rule("inference_microbenchmark_stages")
def benchmark_stages_are_known(settings: Settings) -> str | None:
    unknown = set(settings.inference_microbenchmark_stages.replace(" ", "").split(",")) - {
        "prefill",
        "generate",
    }
    if unknown:
        return (
            f"inference_microbenchmark_stages has unknown stages {', '.join(sorted(unknown))}: use "
            "prefill,generate"
        )
    return None
