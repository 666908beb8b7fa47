"""Saving, restoring and surviving failures."""

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt

from maxtext.configs.types import inert
from maxtext.configs.types.key import (
    CHECKPOINT_TO_READ,
    EXPIRING_CHECKPOINTS,
    INT64_MAX,
    LOCAL_CHECKPOINTS,
    QUANTIZED_WEIGHTS,
    Group,
    key,
)


class Checkpointing(Group):
    """The checkpoint that a run starts from, and when checkpoints are saved."""

    load_parameters_path: str = key(
        "",
        "Checkpoint to load weights from if this run has no checkpoint yet; excludes "
        "load_full_state_path",
        is_path=True,
    )
    lora_input_adapters_path: str = key(
        "",
        "PEFT adapter for text generation: a folder, org/name of the Hugging Face Hub, or a "
        "folder of adapters, which are named after their folders; empty: no adapters",
        is_path=True,
    )
    load_full_state_path: str = key(
        "",
        "Checkpoint to load weights, optimizer state and step from; excludes "
        "load_parameters_path; empty: none",
        is_path=True,
    )
    enable_checkpointing: bool = key(
        True, "Save and restore checkpoints; false: the run cannot be resumed"
    )
    load_checkpoint_only_once: bool = key(
        False,
        "Read weights once and clone the reference model into the policy instead of restoring"
        " twice",
        status=inert.READ_ONCE,
        accepts=True,
    )
    async_checkpointing: bool = key(
        True, "Write checkpoints in the background; false: the training loop waits for the write"
    )
    checkpoint_period: int = key(10000, "Steps between two saved checkpoints", low=1)
    max_num_checkpoints_to_keep: int | None = key(
        None, "Delete the oldest checkpoints beyond this count; null: keep every one", low=1
    )
    enable_single_replica_ckpt_restoring: bool = key(
        False,
        "Let one data-parallel replica read the checkpoint and broadcast it to the others, "
        "sparing storage reads",
        status=inert.OWN_SHARDS,
    )
    checkpoint_todelete_subdir: str | None = key(
        None,
        "Sub-folder into which expired checkpoints are moved instead of deleted; null: delete"
        " in place",
        is_path=True,
        needs=EXPIRING_CHECKPOINTS,
    )
    checkpoint_todelete_full_path: str | None = key(
        None,
        "Full path (often on GCS) to which expired checkpoints are moved, for a later "
        "clean-up; null: delete in place",
        is_path=True,
        needs=EXPIRING_CHECKPOINTS,
    )
    force_unroll: bool = key(
        False,
        "Write one entry per layer instead of a stacked scan when making a weights-only checkpoint",
        status=inert.OWN_SHARDS,
        accepts=True,
    )
    checkpoint_is_quantized: bool = key(
        False,
        "The checkpoint to load already holds quantized weights; set quantization to the same kind",
    )
    save_quantized_params_path: str = key(
        "",
        "Where to store the weights after quantizing them for inference; empty: they are not "
        "stored",
        is_path=True,
        needs=QUANTIZED_WEIGHTS,
    )
    enable_orbax_v1: bool = key(
        False,
        "Use the Orbax v1 checkpoint API for restoring, needed for "
        "source_checkpoint_layout=safetensors",
        status=inert.OWN_SHARDS,
    )
    checkpoint_conversion_fn: None | str = key(
        None,
        "Dotted path of a Python function that maps another checkpoint layout to the native "
        "parameter tree; null: none",
        needs="load_parameters_path",
    )
    source_checkpoint_layout: Literal["orbax", "safetensors"] = key(
        "orbax",
        "File format of the checkpoint being loaded: orbax or safetensors",
        needs=CHECKPOINT_TO_READ,
    )
    save_checkpoint_on_completion: bool = key(
        True,
        "Save when the run ends (last step or signal), even between two multiples of "
        "checkpoint_period",
    )
    enable_continuous_checkpointing: bool = key(
        False,
        "Start the next save as soon as the previous one is written, instead of every "
        "checkpoint_period steps",
    )
    colocated_python_checkpointing: bool = key(
        False,
        "Pathways only: run checkpoint reads and writes on the TPU hosts instead of the controller",
        status=inert.PATHWAYS,
    )
    enable_autocheckpoint: bool = key(
        False,
        "Save when SIGINT, SIGTERM or SIGHUP ends the run even if "
        "save_checkpoint_on_completion is false",
    )


class InterimCheckpoints(Group):
    """Saves by time, between those of checkpoint_period."""

    checkpoint_period_minutes: NonNegativeFloat = key(
        10.0,
        "Also save when this number of minutes has passed since the last save; the next save "
        "replaces such a checkpoint, unless its step is a multiple of checkpoint_period; 0: "
        "save by steps alone",
    )


class OrbaxStorage(Group):
    """File layout of checkpoint arrays on disk."""

    checkpoint_storage_target_data_file_size_bytes: int = key(
        2147483648,
        "Desired size of one checkpoint data file in bytes (default 2 GiB); smaller means "
        "more, parallel files",
        low=1,
        limit=INT64_MAX,
        needs="checkpoint_storage_use_zarr3",
    )
    checkpoint_storage_use_ocdbt: bool = key(
        True, "Pack many arrays into one OCDBT key-value store, so large trees need far fewer files"
    )
    checkpoint_storage_use_zarr3: bool = key(
        True,
        "Store arrays in Zarr version 3, which needs checkpoint_storage_use_ocdbt; false: "
        "version 2",
    )
    checkpoint_storage_concurrent_gb: int = key(
        96, "Host memory in GB that checkpoint reads and writes may use at the same time", low=1
    )


class EmergencyCheckpointing(Group):
    """Frequent saves to node-local storage for fast recovery."""

    enable_multi_tier_checkpointing: bool = key(
        False,
        "Save often to node-local storage and seldom to persistent storage; restore takes the"
        " newest complete tier",
    )
    local_checkpoint_directory: str = key(
        "",
        "Node-local folder (RAM disk or SSD) for the frequent saves; empty: no local tier",
        is_path=True,
        needs=LOCAL_CHECKPOINTS,
    )
    local_checkpoint_period: NonNegativeInt = key(
        0,
        "Steps between saves to local_checkpoint_directory; 0: no local saves",
        needs=LOCAL_CHECKPOINTS,
    )
    multi_tier_checkpointing_backup_interval_minutes: NonNegativeInt = key(
        0,
        "Minutes between copies of the local tier to persistent storage; 0: no timed copies",
        status=inert.GOOGLE_CLOUD,
    )
    mtc_data_parallelism: int = key(
        0,
        "How many identical model copies multi-tier saving can count on as backups; 0: num_slices",
        status=inert.GOOGLE_CLOUD,
    )
    enable_emergency_checkpoint: bool = key(
        False,
        "Orbax emergency saves every local_checkpoint_period; older form of "
        "enable_multi_tier_checkpointing",
    )
    use_replicator_service: bool = key(
        False,
        "Hand local checkpoints to the GKE replicator service, which copies them between "
        "nodes and to GCS",
        status=inert.GOOGLE_CLOUD,
    )
    replicator_backup_interval_minutes: NonNegativeInt = key(
        0,
        "Minutes between the GKE replicator's copies to GCS; 0: none; needs use_replicator_service",
        status=inert.GOOGLE_CLOUD,
    )


class ElasticTraining(Group):
    """Surviving the loss of slices without restarting the job."""

    elastic_enabled: bool = key(
        False,
        "Maxtext launch: after losing a process, continue with the others and the same global"
        " batch",
    )
    elastic_timeout_seconds: int = key(
        300,
        "Seconds that the other processes have to stop after a loss, before they are killed",
        low=0,
        needs="elastic_enabled",
    )
    elastic_max_retries: int = key(
        10,
        "Losses to recover from before the run gives up; needs elastic_enabled",
        low=0,
        needs="elastic_enabled",
    )
    elastic_min_slice_count: int = key(
        -1,
        "Minimum number of processes (each a slice) to continue with; -1 = restart all",
        low=1,
        special=(-1,),
        needs="elastic_enabled",
    )
