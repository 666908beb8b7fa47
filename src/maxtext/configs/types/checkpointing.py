"""Saving, restoring and surviving failures."""

from typing import Literal

from pydantic import NonNegativeInt

from maxtext.configs.types.group import Group, acts_only, in_range, rule


class Checkpointing(Group):
    """What to load at start, what to save, and how often."""

    load_parameters_path: str = ""
    lora_input_adapters_path: str = ""
    load_full_state_path: str = ""
    enable_checkpointing: bool = True
    load_checkpoint_only_once: bool = False
    async_checkpointing: bool = True
    checkpoint_period: int = 10000
    max_num_checkpoints_to_keep: int | None = None
    enable_single_replica_ckpt_restoring: bool = False
    checkpoint_todelete_subdir: str | None = None
    checkpoint_todelete_full_path: str | None = None
    force_unroll: bool = False
    checkpoint_is_quantized: bool = False
    save_quantized_params_path: str = ""
    enable_orbax_v1: bool = False
    checkpoint_conversion_fn: None | str = None
    source_checkpoint_layout: Literal["orbax", "safetensors"] = "orbax"
    save_checkpoint_on_completion: bool = True
    enable_continuous_checkpointing: bool = False
    colocated_python_checkpointing: bool = False
    enable_autocheckpoint: bool = False


class OrbaxStorage(Group):
    """How checkpoint arrays are laid out in files on disk."""

    checkpoint_storage_target_data_file_size_bytes: int = 2147483648
    checkpoint_storage_use_ocdbt: bool = True
    checkpoint_storage_use_zarr3: bool = True
    checkpoint_storage_concurrent_gb: int = 96


class EmergencyCheckpointing(Group):
    """Frequent saves to node-local storage for quick recovery after failures."""

    enable_multi_tier_checkpointing: bool = False
    local_checkpoint_directory: str = ""
    local_checkpoint_period: NonNegativeInt = 0
    multi_tier_checkpointing_backup_interval_minutes: NonNegativeInt = 0
    mtc_data_parallelism: int = 0
    enable_emergency_checkpoint: bool = False
    use_replicator_service: bool = False
    replicator_backup_interval_minutes: NonNegativeInt = 0


class ElasticTraining(Group):
    """Surviving the loss of slices without restarting the job."""

    elastic_enabled: bool = False
    elastic_timeout_seconds: int = 300
    elastic_max_retries: int = 10
    elastic_min_slice_count: int = -1


in_range(1, None, "checkpoint_period", "max_num_checkpoints_to_keep")
in_range(
    1, None, "checkpoint_storage_target_data_file_size_bytes", "checkpoint_storage_concurrent_gb"
)
acts_only(
    lambda c: c.load_parameters_path or c.load_full_state_path,
    "a checkpoint to read: set load_parameters_path or load_full_state_path",
    "source_checkpoint_layout",
)
acts_only(lambda c: c.load_parameters_path, "load_parameters_path", "checkpoint_conversion_fn")
acts_only(
    lambda c: c.max_num_checkpoints_to_keep,
    "max_num_checkpoints_to_keep, for without it nothing is deleted",
    "checkpoint_todelete_subdir",
    "checkpoint_todelete_full_path",
)
acts_only(
    lambda c: c.checkpoint_storage_use_zarr3,
    "checkpoint_storage_use_zarr3=true",
    "checkpoint_storage_target_data_file_size_bytes",
)
acts_only(
    lambda c: c.enable_emergency_checkpoint or c.enable_multi_tier_checkpointing,
    "enable_emergency_checkpoint=true or enable_multi_tier_checkpointing=true",
    "local_checkpoint_directory",
    "local_checkpoint_period",
)
in_range(0, None, "elastic_timeout_seconds", "elastic_max_retries")
in_range(1, None, "elastic_min_slice_count", special=(-1,))
acts_only(
    lambda c: c.elastic_enabled, "elastic_enabled=true", "elastic_timeout_seconds", "elastic_max_retries",
    "elastic_min_slice_count",
)  # fmt: skip


@rule
def one_checkpoint_to_load(c):
    if c.load_parameters_path and c.load_full_state_path:
        return (
            "load_parameters_path and load_full_state_path are both set, and a run starts from one checkpoint: "
            "keep load_full_state_path to continue that run, or load_parameters_path to start anew from its weights"
        )
    return None


@rule
def elastic_runs_need_checkpoints(c):
    if c.elastic_enabled and not c.enable_checkpointing:
        return "elastic_enabled=true continues from the last checkpoint: it needs enable_checkpointing=true"
    return None


@rule
def zarr3_needs_ocdbt(c):
    if c.checkpoint_storage_use_zarr3 and not c.checkpoint_storage_use_ocdbt:
        return "checkpoint_storage_use_zarr3=true needs checkpoint_storage_use_ocdbt=true: set both or neither"
    return None


@rule
def local_checkpoints_need_a_place_and_a_period(c):
    if not (c.enable_multi_tier_checkpointing or c.enable_emergency_checkpoint):
        return None
    missing = [
        key
        for key in ("local_checkpoint_directory", "local_checkpoint_period")
        if not getattr(c, key)
    ]
    if missing:
        return f"multi-tier checkpointing also needs {' and '.join(missing)}"
    if c.local_checkpoint_period >= c.checkpoint_period:
        return (
            f"local_checkpoint_period={c.local_checkpoint_period} must be smaller than "
            f"checkpoint_period={c.checkpoint_period}: local checkpoints are the frequent ones"
        )
    return None


@rule
def one_kind_of_local_checkpoint(c):
    if c.enable_multi_tier_checkpointing and c.enable_emergency_checkpoint:
        return "enable_multi_tier_checkpointing and enable_emergency_checkpoint exclude each other: keep one"
    return None


@rule
def one_place_for_expired_checkpoints(c):
    if c.checkpoint_todelete_subdir and c.checkpoint_todelete_full_path:
        return "checkpoint_todelete_subdir and checkpoint_todelete_full_path exclude each other: keep one"
    return None


@rule
def local_checkpoints_need_checkpointing(c):
    local = c.enable_multi_tier_checkpointing or c.enable_emergency_checkpoint
    if not c.enable_checkpointing and (local or c.enable_autocheckpoint):
        return "enable_checkpointing=false contradicts multi-tier or automatic checkpoints: set it to true"
    return None
