"""Rules of the checkpointing keys."""

from maxtext.configs.rules.rule import rule
from maxtext.configs.types import Settings


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
