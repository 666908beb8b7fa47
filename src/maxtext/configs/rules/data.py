"""Rules of the data, tokenizer and batch size keys."""

from maxtext.configs.rules.rule import derived_rule, inert_unless, rule
from maxtext.configs.sources import is_preset
from maxtext.configs.types import MaxTextConfig, Settings
from maxtext.configs.types.enums import DatasetType

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
