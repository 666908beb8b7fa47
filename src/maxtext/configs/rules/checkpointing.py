"""Rules of the checkpointing keys."""

from maxtext.configs.rules.rule import in_range, inert_unless, rule
from maxtext.configs.types import Settings

in_range(1, None, "checkpoint_period", "max_num_checkpoints_to_keep")
in_range(
    1, None, "checkpoint_storage_target_data_file_size_bytes", "checkpoint_storage_concurrent_gb"
)
inert_unless(
    lambda s: s.load_parameters_path or s.load_full_state_path,
    "a checkpoint to read: set load_parameters_path or load_full_state_path",
    "source_checkpoint_layout",
)
inert_unless(lambda s: s.load_parameters_path, "load_parameters_path", "checkpoint_conversion_fn")
inert_unless(
    lambda s: s.max_num_checkpoints_to_keep,
    "max_num_checkpoints_to_keep: without it nothing is deleted",
    "checkpoint_todelete_subdir",
    "checkpoint_todelete_full_path",
)
inert_unless(
    lambda s: s.checkpoint_storage_use_zarr3,
    "checkpoint_storage_use_zarr3=true",
    "checkpoint_storage_target_data_file_size_bytes",
)
inert_unless(
    lambda s: s.enable_emergency_checkpoint or s.enable_multi_tier_checkpointing,
    "enable_emergency_checkpoint=true or enable_multi_tier_checkpointing=true",
    "local_checkpoint_directory",
    "local_checkpoint_period",
)
in_range(0, None, "elastic_timeout_seconds", "elastic_max_retries")
in_range(1, None, "elastic_min_slice_count", special=(-1,))
inert_unless(
    lambda s: s.elastic_enabled,
    "elastic_enabled=true",
    "elastic_timeout_seconds",
    "elastic_max_retries",
    "elastic_min_slice_count",
)


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
