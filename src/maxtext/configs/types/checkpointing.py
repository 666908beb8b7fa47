"""Saving, restoring and surviving failures."""

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt

from maxtext.configs.types.group import Group


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


class InterimCheckpoints(Group):
    """Saves between those of checkpoint_period, by the clock."""

    checkpoint_period_minutes: NonNegativeFloat = 10.0


class OrbaxStorage(Group):
    """File layout of checkpoint arrays on disk."""

    checkpoint_storage_target_data_file_size_bytes: int = 2147483648
    checkpoint_storage_use_ocdbt: bool = True
    checkpoint_storage_use_zarr3: bool = True
    checkpoint_storage_concurrent_gb: int = 96


class EmergencyCheckpointing(Group):
    """Frequent saves to node-local storage for fast recovery."""

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
