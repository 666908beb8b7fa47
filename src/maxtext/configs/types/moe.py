"""Mixture-of-experts layers: experts, routers, and the grouped product."""

import math

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from maxtext.configs.types.blocks import EXPERTS, NARROW, block, custom_remat, dense_mlp, experts
from maxtext.configs.types.group import Group, acts_only, derived_rule, in_range, one_of, rule


class MoEGeneral(Group):
    """Number and size of experts, routing, dropping and expert parallelism."""

    num_experts: PositiveInt = 1
    num_experts_per_tok: PositiveInt = 1
    capacity_factor: float = -1.0
    ragged_buffer_factor: float = -1.0
    moe_expert_input_dim: int = -1
    base_moe_mlp_dim: int = -1
    padded_base_moe_mlp_dim: int | None = None
    load_balance_loss_weight: NonNegativeFloat = 0.0
    use_custom_sort_vjp: bool = True
    use_ring_of_experts: bool = False
    use_gather_mosaic_kernel: bool = False
    use_random_routing: bool = False
    interleave_moe_layer_step: int = 1
    moe_fsdp_use_two_stage_all_gather: bool = False
    shard_exp_on_fsdp: bool = False
    use_2d_fsdp_sharding: bool = False
    norm_topk_prob: bool = False
    float32_weight_sum: bool = True
    float32_gate_logits: bool = False
    prefuse_moe_weights: bool = False


class MoEKernels(Group):
    """Choice and tile sizes of the grouped matrix product over experts."""

    megablox: bool = True
    sparse_matmul: bool = True
    wi_tile_fwd_batch_seq: int = 512
    wi_tile_fwd_embed_dim: int = 1024
    wi_tile_fwd_mlp_dim: int = 1024
    wi_tile_dlhs_batch_seq: int = 512
    wi_tile_dlhs_embed_dim: int = 1024
    wi_tile_dlhs_mlp_dim: int = 1024
    wi_tile_drhs_batch_seq: int = 512
    wi_tile_drhs_embed_dim: int = 1024
    wi_tile_drhs_mlp_dim: int = 1024
    wo_tile_fwd_batch_seq: int = 512
    wo_tile_fwd_embed_dim: int = 1024
    wo_tile_fwd_mlp_dim: int = 1024
    wo_tile_dlhs_batch_seq: int = 512
    wo_tile_dlhs_embed_dim: int = 1024
    wo_tile_dlhs_mlp_dim: int = 1024
    wo_tile_drhs_batch_seq: int = 512
    wo_tile_drhs_embed_dim: int = 1024
    wo_tile_drhs_mlp_dim: int = 1024
    merge_gating_gmm: bool = False


class DeepSeekMoE(Group):
    """Shared experts, biased and group-limited routing as in DeepSeek models."""

    first_num_dense_layers: NonNegativeInt = 0
    shared_experts: NonNegativeInt = 0
    routed_scaling_factor: float = 1.0
    routed_score_func: str = ""
    routed_bias: bool = False
    routed_bias_update_rate: float = 0.0
    mlp_bias: bool = False
    n_routing_groups: int = -1
    topk_routing_group: int = -1
    use_batch_split_schedule: bool = False
    batch_split_factor: int = 1


one_of("routed_score_func", "", "softmax", "sigmoid")
in_range(1, None, "base_moe_mlp_dim", "moe_expert_input_dim", special=(-1,))
in_range(1, None, "interleave_moe_layer_step", "batch_split_factor")
in_range(1, None, "n_routing_groups", "topk_routing_group", special=(-1,))
in_range(0, None, "routed_bias_update_rate")
in_range(
    1, None, "wi_tile_fwd_batch_seq", "wi_tile_fwd_embed_dim", "wi_tile_fwd_mlp_dim", "wi_tile_dlhs_batch_seq",
    "wi_tile_dlhs_embed_dim", "wi_tile_dlhs_mlp_dim", "wi_tile_drhs_batch_seq", "wi_tile_drhs_embed_dim",
    "wi_tile_drhs_mlp_dim", "wo_tile_fwd_batch_seq", "wo_tile_fwd_embed_dim", "wo_tile_fwd_mlp_dim",
    "wo_tile_dlhs_batch_seq", "wo_tile_dlhs_embed_dim", "wo_tile_dlhs_mlp_dim", "wo_tile_drhs_batch_seq",
    "wo_tile_drhs_embed_dim", "wo_tile_drhs_mlp_dim",
)  # fmt: skip

NEEDS_EXPERTS = f"num_experts above 1 in one of the decoder_blocks {', '.join(EXPERTS)}"

acts_only(
    lambda c: block(c) in EXPERTS, f"one of the decoder_blocks {', '.join(EXPERTS)}", "num_experts"
)
acts_only(experts, NEEDS_EXPERTS, "num_experts_per_tok", "base_moe_mlp_dim", "capacity_factor", "ragged_buffer_factor",
          "load_balance_loss_weight", "use_random_routing", "norm_topk_prob", "float32_gate_logits",
          "routed_scaling_factor", "n_routing_groups", "topk_routing_group",
          "sparse_matmul", "megablox", "use_custom_sort_vjp", "use_ring_of_experts",
          "moe_fsdp_use_two_stage_all_gather", "shard_exp_on_fsdp")  # fmt: skip
acts_only(lambda c: experts(c) and (block(c) != "llama4" or not c.sparse_matmul),
          f"{NEEDS_EXPERTS}; llama4 weighs what experts read, and its sum is in float32",
          "float32_weight_sum")  # fmt: skip
acts_only(lambda c: experts(c) and (block(c) != "gemma4" or c.shared_experts == 1),
          f"{NEEDS_EXPERTS}; gemma4 has one shared MLP", "shared_experts")  # fmt: skip
acts_only(lambda c: block(c) == NARROW, f"decoder_block={NARROW}", "moe_expert_input_dim")
acts_only(lambda c: experts(c) and block(c) == "llama4", "decoder_block=llama4 and num_experts above 1",
          "interleave_moe_layer_step")  # fmt: skip
acts_only(lambda c: experts(c) and block(c) == "deepseek", "decoder_block=deepseek and num_experts above 1",
          "first_num_dense_layers", "routed_score_func", "routed_bias_update_rate")  # fmt: skip
acts_only(lambda c: experts(c) and block(c) in ("deepseek", "gpt_oss"),
          "decoder_block=deepseek or gpt_oss and num_experts above 1", "routed_bias")  # fmt: skip
acts_only(lambda c: dense_mlp(c) or block(c) == "gpt_oss",
          "an MLP beside or in place of experts (experts themselves have biases in gpt_oss)", "mlp_bias")  # fmt: skip
acts_only(lambda c: c.sparse_matmul, "sparse_matmul=true", "ragged_buffer_factor", "use_custom_sort_vjp",
          "megablox", "use_ring_of_experts", "moe_fsdp_use_two_stage_all_gather")  # fmt: skip
acts_only(
    lambda c: custom_remat(c) and experts(c),
    f"remat_policy=custom and {NEEDS_EXPERTS}",
    "moe_mlpwo",
)
acts_only(lambda c: custom_remat(c) and experts(c) and len(c.mlp_activations) == 2,
          f"remat_policy=custom, two activations and {NEEDS_EXPERTS}", "moe_mlpwi_0", "moe_mlpwi_1")  # fmt: skip


@rule
def tokens_choose_among_the_experts(c):
    if c.num_experts_per_tok > c.num_experts:
        return (
            f"num_experts_per_tok={c.num_experts_per_tok} is more than num_experts={c.num_experts}"
        )
    return None


@rule
def routing_groups_divide_the_experts(c):
    groups, kept = c.n_routing_groups, c.topk_routing_group
    if groups == -1 and kept == -1:
        return None
    if groups < 1 or not 1 <= kept <= groups:
        return f"topk_routing_group={kept} must lie in 1..n_routing_groups={groups}, or both be -1"
    if c.num_experts % groups:
        return f"n_routing_groups={groups} does not divide num_experts={c.num_experts}"
    if kept * c.num_experts // groups < c.num_experts_per_tok:
        return (
            f"topk_routing_group={kept} groups of {c.num_experts // groups} experts are fewer than "
            f"num_experts_per_tok={c.num_experts_per_tok}: keep more groups"
        )
    return None


@rule
def dense_layers_are_among_the_layers(c):
    if c.first_num_dense_layers > c.base_num_decoder_layers:
        return (
            f"first_num_dense_layers={c.first_num_dense_layers} is more than "
            f"base_num_decoder_layers={c.base_num_decoder_layers}"
        )
    return None


@rule
def loss_free_balancing_needs_a_bias(c):
    if c.routed_bias_update_rate > 0 and not c.routed_bias:
        return "routed_bias_update_rate updates the router's bias: set routed_bias=true"
    return None


@rule
def capacity_is_of_experts_that_drop(c):
    factor = c.capacity_factor
    if factor <= 0 and factor != -1:
        return f"capacity_factor={factor:g} leaves experts no room: it must be above 0, or -1 to drop nothing"
    if factor > 0 and c.sparse_matmul:
        return f"capacity_factor={factor:g} is of experts that drop tokens: set sparse_matmul=false"
    return None


@rule
def a_buffer_has_room(c):
    factor = c.ragged_buffer_factor
    if factor <= 0 and factor != -1:
        return f"ragged_buffer_factor={factor:g} leaves experts no room: it must be above 0, or -1 for all tokens"
    return None


@derived_rule
def a_buffer_that_holds_everything_is_no_bound(c):
    factor, sharing = c.ragged_buffer_factor, devices_that_share_experts(c)
    if factor >= sharing:
        return (
            f"ragged_buffer_factor={factor:g} would do nothing: with experts shared by {sharing} "
            f"device{'s' * (sharing > 1)}, from {sharing} on the buffer holds all tokens; leave it -1"
        )
    return None


@derived_rule
def a_ring_has_several_devices(c):
    if c.use_ring_of_experts and devices_that_share_experts(c) == 1:
        return (
            "use_ring_of_experts=true would do nothing: it needs devices that share the experts; set "
            f"ici_expert_parallelism above 1, to a divisor of num_experts={c.num_experts}"
        )
    return None


@derived_rule
def two_stages_have_two_axes(c):
    if c.moe_fsdp_use_two_stage_all_gather and not (
        parts(c, "fsdp") > 1 and parts(c, "fsdp_transpose") > 1
    ):
        return (
            "moe_fsdp_use_two_stage_all_gather=true would do nothing: it needs ici_fsdp_parallelism and "
            "ici_fsdp_transpose_parallelism above 1"
        )
    return None


@derived_rule
def fsdp_splits_the_experts(c):
    if not c.shard_exp_on_fsdp:
        return None
    splitting = axes_of(c, "exp_with_fsdp")
    if "fsdp" in splitting and parts(c, "fsdp") == 1:
        return "shard_exp_on_fsdp=true would do nothing: it needs ici_fsdp_parallelism above 1"
    if c.num_experts % parts(c, *splitting):
        return (
            f"shard_exp_on_fsdp=true splits experts over {parts(c, *splitting)} devices, which do not divide "
            f"num_experts={c.num_experts}: change ici_fsdp_parallelism"
        )
    idle = axes_of(c, "exp") - splitting
    if parts(c, *idle) > 1:
        return (
            f"shard_exp_on_fsdp=true leaves the mesh axis {sorted(idle)[0]!r} without experts: set its parallelism to "
            "1, or add it to the rule exp_with_fsdp in logical_axis_rules"
        )
    return None


def axes_of(c, name):
    """The mesh axes that may split the dimension of a name."""
    return {axis for rule_name, axes in c.logical_axis_rules if rule_name == name for axis in axes}


def parts(c, *axes):
    """The product of the sizes of mesh axes."""
    sizes = zip(c.mesh_axes, c.ici_parallelism, c.dcn_parallelism, strict=True)
    return math.prod(ici * dcn for axis, ici, dcn in sizes if axis in axes)


def devices_that_share_experts(c):
    """Each owns some of them, and tokens travel."""
    named = axes_of(c, "exp_with_fsdp" if c.shard_exp_on_fsdp else "exp")
    count = parts(c, *(named & axes_of(c, "activation_exp")))
    return 1 if c.num_experts % count else count


@rule
def one_way_to_bound_expert_buffers(c):
    if c.capacity_factor > 0 and c.ragged_buffer_factor > 0:
        return "capacity_factor and ragged_buffer_factor both bound what experts take: set one, leave the other -1"
    return None
