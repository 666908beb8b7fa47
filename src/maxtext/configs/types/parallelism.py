"""The device mesh, sharding rules, pipelining, and rematerialization."""

from typing import Any, Literal

from maxtext.configs.types.enums import CustomRule, RematLocation, ReorderStrategy, ShardMode
from maxtext.configs.types.group import Group


class HardwareAndMesh(Group):
    """Target hardware, the device mesh, and how layers and sequences use it."""

    hardware: Literal["tpu", "gpu", "gpu_multiprocess", "cpu"] = "tpu"
    num_slices: int = -1
    mesh_axes: list[str] = [
        "data",
        "stage",
        "fsdp",
        "fsdp_transpose",
        "sequence",
        "context",
        "context_autoregressive",
        "tensor",
        "tensor_transpose",
        "tensor_sequence",
        "expert",
        "autoregressive",
    ]
    shard_mode: ShardMode = ShardMode.AUTO
    inhomogeneous_layer_cycle_interval: int = 1
    scan_layers: bool = True
    param_scan_axis: int = 1
    context_parallel_load_balance: bool = True
    context_parallel_strategy: str = "all_gather"
    context_parallel_reorder_strategy: ReorderStrategy = ReorderStrategy.AUTO
    custom_mesh: str = ""
    custom_mesh_and_rule: CustomRule = CustomRule.DEFAULT
    allow_split_physical_axes: bool = False
    enable_nnx: bool = False
    optimize_mesh_for_tpu_v6e: bool = False
    shardy: bool = True
    pure_nnx_decoder: bool = False
    pure_nnx: bool = False
    remove_size_one_mesh_axis_from_type: bool = True


class LayoutAndSharding(Group):
    """Rules that map tensor axes onto mesh axes, and their checks."""

    logical_axis_rules: Any = []
    data_sharding: Any = []
    context_sharding: str = "context"
    input_data_sharding_logical_axes: list[str] = [
        "activation_embed_and_logits_batch",
        "activation_norm_length",
    ]
    sharding_tolerance: float = 0.02
    shard_optimizer_over_data: bool = False
    internal_compile: bool = False
    internal_compile_num_devices: int = -1
    compile_xla_flags: str = ""


class DcnParallelism(Group):
    """How each mesh axis spreads over the network between slices."""

    dcn_diloco_parallelism: int = 1
    dcn_data_parallelism: int = -1
    dcn_fsdp_parallelism: int = 1
    dcn_fsdp_transpose_parallelism: int = 1
    dcn_sequence_parallelism: int = 1
    dcn_context_parallelism: int = 1
    dcn_context_autoregressive_parallelism: int = 1
    dcn_tensor_parallelism: int = 1
    dcn_tensor_transpose_parallelism: int = 1
    dcn_tensor_sequence_parallelism: int = 1
    dcn_pipeline_parallelism: int = 1
    dcn_expert_parallelism: int = 1
    dcn_autoregressive_parallelism: int = 1


class IciParallelism(Group):
    """How each mesh axis spreads over the fast links inside a slice."""

    ici_diloco_parallelism: int = 1
    ici_data_parallelism: int = 1
    ici_fsdp_parallelism: int = -1
    ici_fsdp_transpose_parallelism: int = 1
    ici_sequence_parallelism: int = 1
    ici_context_parallelism: int = 1
    ici_context_autoregressive_parallelism: int = 1
    ici_tensor_parallelism: int = 1
    ici_tensor_transpose_parallelism: int = 1
    ici_tensor_sequence_parallelism: int = 1
    ici_autoregressive_parallelism: int = 1
    ici_pipeline_parallelism: int = 1
    ici_expert_parallelism: int = 1


class PipelineParallelism(Group):
    """How decoder layers become pipeline stages and how microbatches flow."""

    pipeline_fsdp_ag_per_repeat: bool = False
    num_layers_per_pipeline_stage: int = 1
    num_pipeline_repeats: int = -1
    pipeline_parallel_layers: int = -1
    num_pipeline_microbatches: int = -1
    pipeline_delay_activation_forwarding: bool = False
    pipeline_fsdp_ag_once: bool = False
    scan_pipeline_iterations: bool = True
    scan_pipeline_repeats: bool = True
    scan_layers_per_stage: bool = False
    set_remat_policy_on_pipeline_iterations: bool = True
    set_remat_policy_on_layers_per_stage: bool = False


class RematAndOffload(Group):
    """Which activations are saved, recomputed, or offloaded to host memory."""

    remat_policy: str = "full"
    remat_policy_for_vit: str = "minimal"
    decoder_layer_input: RematLocation = RematLocation.DEVICE
    context: RematLocation = RematLocation.REMAT
    mlpwi: RematLocation = RematLocation.REMAT
    mlpwi_0: RematLocation = RematLocation.REMAT
    mlpwi_1: RematLocation = RematLocation.REMAT
    mlpwo: RematLocation = RematLocation.REMAT
    moe_mlpwi_0: RematLocation = RematLocation.REMAT
    moe_mlpwi_1: RematLocation = RematLocation.REMAT
    moe_mlpwo: RematLocation = RematLocation.REMAT
    query_proj: RematLocation = RematLocation.REMAT
    key_proj: RematLocation = RematLocation.REMAT
    value_proj: RematLocation = RematLocation.REMAT
    query_wa_proj: RematLocation = RematLocation.REMAT
    kv_wa_proj: RematLocation = RematLocation.REMAT
    qkv_proj: RematLocation = RematLocation.REMAT
    out_proj: RematLocation = RematLocation.REMAT
    mla_q: RematLocation = RematLocation.REMAT
    mla_kv: RematLocation = RematLocation.REMAT
    attention_out: RematLocation = RematLocation.REMAT
    engram: RematLocation = RematLocation.REMAT
    optimizer_memory_host_offload: bool = False
    parameter_memory_host_offload: bool = False


class DilocoParams(Group):
    """Rarely synchronized replicas with an outer optimizer (DiLoCo)."""

    enable_diloco: bool = False
    diloco_sync_period: int = 36
    diloco_outer_lr: float = 0.3
    diloco_outer_momentum: float = 0.9
