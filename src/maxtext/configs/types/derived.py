"""Values that no key of the user states: computed ones, and attributes of a published checkpoint.

`maxtext.configs.derive` computes `DerivedValues`. `Architecture` has the attributes that no key
names; see configs/architecture.py.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from maxtext.common.types import Json
from maxtext.configs.types.key import Group, key

LayerKind = Literal["full", "sliding", "chunk", "linear"]


class Architecture(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    layer_kinds: tuple[LayerKind, ...] | None = None  # the attention mask of each layer
    moe_layers: tuple[bool, ...] | None = None  # which layers have experts
    rope_layers: tuple[bool, ...] | None = None  # which layers have rotary positions
    rope: dict[LayerKind | Literal["all"], Json] | None = (
        None  # the fields of a RopeSpec, by kind of layer
    )
    softmax_scale: float | None = None
    logit_scale: float = 1.0  # by which logits are multiplied
    normalise_chosen: bool | None = (
        None  # whether the weights of a token's experts are made to sum to one
    )
    shared_expert_dim: int | None = None  # where it is not shared_experts x moe_mlp_dim
    mtp_reads_normed: bool = False  # MTP layers read hidden states after norms (`multi_token.py`)
    temperature_scale: float = 0.1  # of temperature_tuning
    temperature_length: int = 8192


class DerivedValues(Group):
    """Values computed from other keys after loading; users never set them."""

    emb_dim: None | int = key(
        None, "Computed: decoder width, base_emb_dim after global_parameter_scale"
    )
    mlp_dim: None | int = key(
        None, "Computed: dense MLP width, base_mlp_dim after global_parameter_scale"
    )
    moe_mlp_dim: None | int = key(
        None, "Computed: width of one expert, base_moe_mlp_dim after global_parameter_scale"
    )
    num_decoder_layers: None | int = key(
        None,
        "Computed: decoder depth, base_num_decoder_layers after global_parameter_scale",
        limit=10_000,
    )
    num_kv_heads: None | int = key(
        None, "Computed: key/value heads, base_num_kv_heads after global_parameter_scale"
    )
    num_query_heads: None | int = key(
        None, "Computed: query heads, base_num_query_heads after global_parameter_scale"
    )
    num_diloco_replicas: None | int = key(
        None, "Computed: DiLoCo replicas, ici_diloco_parallelism x dcn_diloco_parallelism"
    )
    ici_parallelism: None | list[int] = key(
        None, "Computed: the ici_*_parallelism values in the order of mesh_axes, within a slice"
    )
    dcn_parallelism: None | list[int] = key(
        None, "Computed: the dcn_*_parallelism values in the order of mesh_axes, between slices"
    )
    using_pipeline_parallelism: None | bool = key(
        None, "Computed: true when ici_ or dcn_pipeline_parallelism is above 1"
    )
    context_parallel_size: None | int = key(
        None, "Computed: devices that share one sequence, ici_ x dcn_context_parallelism"
    )
    num_target_devices: None | int = key(
        None,
        "Computed: devices of the run, or of compile_topology x slices when compiling ahead "
        "of time",
    )
    global_batch_size_to_train_on: None | int = key(
        None,
        "Computed: sequences per step, per_device_batch_size x devices x "
        "gradient_accumulation_steps",
    )
    global_batch_size_to_eval_on: None | int = key(
        None, "Computed: sequences per evaluation step, eval_per_device_batch_size x devices"
    )
    global_batch_size_to_load: None | int = key(
        None, "Computed: sequences loaded per step over all microbatches, at least one per device"
    )
    global_batch_size_to_load_eval: None | int = key(
        None, "Computed: sequences loaded per evaluation step, at least one per device"
    )
    micro_batch_size_to_train_on: None | int = key(
        None, "Computed: sequences per forward and backward pass, per_device_batch_size x devices"
    )
    micro_batch_size_to_eval_on: None | int = key(
        None, "Computed: sequences per evaluation pass, eval_per_device_batch_size x devices"
    )
    checkpoint_dir: None | str = key(
        None, "Computed: where checkpoints go, base_output_directory/run_name/checkpoints"
    )
    convert_checkpoint_if_possible: bool = key(
        False,
        "Computed: whether the checkpoint to load is safetensors and is converted while loading",
    )
    metrics_dir: None | str = key(
        None, "Computed: where metric files go, base_output_directory/run_name/metrics"
    )
    tensorboard_dir: None | str = key(
        None, "Computed: where events and traces go, base_output_directory/run_name/tensorboard"
    )
    managed_mldiagnostics_dir: None | str = key(
        None,
        "Computed: ML Diagnostics output, base_output_directory/run_name/managed-mldiagnostics",
    )
    rampup_end_step: None | int = key(
        None,
        "Computed: first step at the full batch size, from global_rampup_samples and the "
        "ramp's batch sizes",
    )
    tensors_on_device: None | list[str] = key(
        None,
        "Computed: activations that remat_policy saves on the device; none: no "
        "rematerialization at all",
    )
    tensors_to_offload: None | list[str] = key(
        None, "Computed: activations that remat_policy moves to pinned host memory"
    )
    global_batch_size_to_load_start: None | int = key(
        None,
        "Computed: sequences loaded per step in the first ramp-up stage, from "
        "per_device_batch_size_start",
    )
    global_batch_size_to_load_increment: None | int = key(
        None,
        "Computed: sequences added at each stage of the ramp, from per_device_batch_size_increment",
    )
    rampup_samples_per_increment_to_load: None | float = key(
        None,
        "Computed: sequences that each ramp stage lasts, global_rampup_samples / number of "
        "increments",
    )
