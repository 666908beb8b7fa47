"""The device mesh, sharding rules, pipelining, and what activations are kept."""

from typing import Any, Literal

from maxtext.configs.types import blocks
from maxtext.configs.types.enums import CustomRule, RematLocation, ReorderStrategy, ShardMode
from maxtext.configs.types.group import Group, acts_only, derived_rule, in_range, one_of, rule


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
    """Which activations are kept, recomputed, or parked in host memory."""

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


one_of("context_parallel_strategy", "all_gather", "ring", "ulysses")
one_of("context_sharding", "context", "expert")
one_of(
    "remat_policy", "", "none", "full", "minimal", "minimal_with_context", "minimal_flash", "minimal_offloaded",
    "save_dot_except_mlp", "save_dot_except_mlpwi", "save_dot_with_context_except_mlp", "save_out_proj",
    "save_qkv_proj", "qkv_proj_offloaded", "custom",
)  # fmt: skip
one_of("remat_policy_for_vit", "", "none", "full", "minimal")
in_range(0, 1, "sharding_tolerance")
in_range(1, None, "num_slices", special=(-1,))
in_range(
    1,
    None,
    "inhomogeneous_layer_cycle_interval",
    "num_layers_per_pipeline_stage",
    "diloco_sync_period",
)
in_range(0, None, "param_scan_axis")
in_range(0, None, "diloco_outer_lr", "diloco_outer_momentum")
in_range(1, None, "num_pipeline_repeats", "num_pipeline_microbatches", special=(-1,))
in_range(0, None, "pipeline_parallel_layers", special=(-1,))

acts_only(
    lambda c: c.remat_policy == "custom", "remat_policy=custom", "decoder_layer_input", "context", "mlpwi", "mlpwi_0",
    "mlpwi_1", "mlpwo", "query_proj", "key_proj", "value_proj", "qkv_proj", "out_proj", "attention_out",
)  # fmt: skip


acts_only(
    lambda c: c.shard_mode is ShardMode.EXPLICIT,
    "shard_mode=explicit",
    "remove_size_one_mesh_axis_from_type",
)


@rule
def explicit_sharding_has_its_limits(c):
    """What works on whole matrices or keeps state apart from its weight has no single layout that a
    type could say.
    """
    beyond = {
        "opt_type=muon": c.opt_type.value == "muon",
        "shard_optimizer_over_data": c.shard_optimizer_over_data,
        "optimizer_memory_host_offload": c.optimizer_memory_host_offload,
        "parameter_memory_host_offload": c.parameter_memory_host_offload,
        "mtp_num_layers": c.mtp_num_layers > 0,
    }
    found = [name for name, present in beyond.items() if present]
    if c.shard_mode is ShardMode.EXPLICIT and found:
        return f"shard_mode=explicit does not go with {found[0]}: set shard_mode=auto"
    return None


@rule
def mesh_axes_are_distinct(c):
    repeated = sorted({axis for axis in c.mesh_axes if c.mesh_axes.count(axis) > 1})
    return f"mesh_axes names {', '.join(repeated)} more than once" if repeated else None


@rule
def mesh_axes_are_known(c):
    known = [key[4:-12] for key in IciParallelism.model_fields]
    known[known.index("pipeline")] = "stage"
    unknown = [axis for axis in c.mesh_axes if axis not in known]
    if unknown:
        return f"mesh_axes has unknown axes {', '.join(map(repr, unknown))}: use {', '.join(known)}"
    return None


@rule
def axis_rules_are_pairs(c):
    for entry in c.logical_axis_rules:
        shaped = isinstance(entry, list | tuple) and len(entry) == 2 and isinstance(entry[0], str)
        if not shaped or not isinstance(entry[1], list | tuple | str | None):
            return f"logical_axis_rules: {entry!r} is not a pair [name, [mesh axes]]"
    return None


@rule
def optimizer_state_has_one_place(c):
    if c.optimizer_memory_host_offload and c.shard_optimizer_over_data:
        return "optimizer_memory_host_offload and shard_optimizer_over_data exclude each other: keep one"
    return None


@derived_rule
def offloaded_layers_lie_together(c):
    if c.parameter_memory_host_offload and c.scan_layers and c.param_scan_axis != 0:
        return (
            "parameter_memory_host_offload=true brings one layer at a time to the device, and param_scan_axis="
            f"{c.param_scan_axis} interleaves them: set param_scan_axis=0 or scan_layers=false"
        )
    return None


@rule
def one_way_to_gather_pipeline_weights(c):
    if c.pipeline_fsdp_ag_once and c.pipeline_fsdp_ag_per_repeat:
        return "pipeline_fsdp_ag_once and pipeline_fsdp_ag_per_repeat exclude each other: keep one"
    return None


@derived_rule
def diloco_has_replicas(c):
    if c.enable_diloco and c.num_diloco_replicas < 2:
        return "enable_diloco=true needs at least two replicas: set dcn_diloco_parallelism or ici_diloco_parallelism"
    return None


@derived_rule
def context_divides_the_sequence(c):
    chunks = c.context_parallel_size * (2 if c.context_parallel_load_balance else 1)
    if c.context_parallel_size > 1 and c.max_target_length % chunks:
        return (
            f"max_target_length={c.max_target_length} does not split into {chunks} chunks for "
            f"{c.context_parallel_size} context shards (twice as many with context_parallel_load_balance)"
        )
    return None


@derived_rule
def balanced_context_is_even(c):
    if balanced(c) and c.context_parallel_size % 2:
        return (
            f"context_parallel_load_balance needs an even number of context shards, not {c.context_parallel_size}: "
            "change the number or set it to false"
        )
    return None


def balanced(c):
    """Whether tokens come in an order that gives every context shard the same work."""
    return c.context_parallel_load_balance and c.context_parallel_size > 1


@derived_rule
def balanced_context_has_no_neighbours(c):
    needing = {
        "gated DeltaNet layers": "linear" in blocks.sees(c),
        "engram_layers": c.engram_layers,
        "mtp_num_layers": c.mtp_num_layers,
        "moba": c.moba,
        "capacity_factor": c.num_experts > 1 and c.capacity_factor > 0,
    }
    found = [name for name, present in needing.items() if present]
    if balanced(c) and found:
        return (
            f"context_parallel_load_balance=true changes the order of tokens, and {found[0]} need them in their own: "
            "set context_parallel_load_balance=false"
        )
    return None


@derived_rule
def reordering_needs_balance(c):
    if not balanced(c) and c.context_parallel_reorder_strategy is not ReorderStrategy.AUTO:
        return (
            f"context_parallel_reorder_strategy={c.context_parallel_reorder_strategy.value} would do nothing: it needs "
            "context_parallel_load_balance=true and more than one context shard"
        )
    return None


@derived_rule
def every_mesh_axis_splits_something(c):
    named = {
        axis
        for _, axes in c.logical_axis_rules
        for axis in ([axes] if isinstance(axes, str) else axes or ())
    }
    sizes = zip(c.mesh_axes, c.ici_parallelism, c.dcn_parallelism, strict=True)
    idle = [axis for axis, ici, dcn in sizes if ici * dcn > 1 and axis not in named]
    if idle:
        return (
            f"mesh axis {idle[0]} has more than one device, but no logical axis rule names it, so its devices all "
            "do the same: use another axis, or add it to logical_axis_rules"
        )
    return None


@derived_rule
def pipeline_divides_the_layers(c):
    if not c.using_pipeline_parallelism:
        return None
    stages = (
        c.ici_parallelism[c.mesh_axes.index("stage")]
        * c.dcn_parallelism[c.mesh_axes.index("stage")]
    )
    layers = (
        c.num_decoder_layers if c.pipeline_parallel_layers == -1 else c.pipeline_parallel_layers
    )
    block = stages * c.num_layers_per_pipeline_stage
    if layers % block or (c.num_pipeline_repeats > 0 and layers != block * c.num_pipeline_repeats):
        return (
            f"{layers} pipelined layers are not {stages} stages x num_layers_per_pipeline_stage="
            f"{c.num_layers_per_pipeline_stage} x num_pipeline_repeats={c.num_pipeline_repeats}"
        )
    microbatches = c.num_pipeline_microbatches
    if microbatches > 0 and microbatches % stages:
        return f"num_pipeline_microbatches={microbatches} is not a multiple of the {stages} pipeline stages"
    return None
