"""Mixture-of-experts layers: experts, routers, and the grouped product."""

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from maxtext.configs.types.group import Group, in_range, one_of, rule


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
in_range(0, None, "capacity_factor", "ragged_buffer_factor", special=(-1.0,))
in_range(1, None, "interleave_moe_layer_step", "batch_split_factor")
in_range(0, None, "routed_bias_update_rate")
in_range(
    1, None, "wi_tile_fwd_batch_seq", "wi_tile_fwd_embed_dim", "wi_tile_fwd_mlp_dim", "wi_tile_dlhs_batch_seq",
    "wi_tile_dlhs_embed_dim", "wi_tile_dlhs_mlp_dim", "wi_tile_drhs_batch_seq", "wi_tile_drhs_embed_dim",
    "wi_tile_drhs_mlp_dim", "wo_tile_fwd_batch_seq", "wo_tile_fwd_embed_dim", "wo_tile_fwd_mlp_dim",
    "wo_tile_dlhs_batch_seq", "wo_tile_dlhs_embed_dim", "wo_tile_dlhs_mlp_dim", "wo_tile_drhs_batch_seq",
    "wo_tile_drhs_embed_dim", "wo_tile_drhs_mlp_dim",
)  # fmt: skip


@rule
def tokens_choose_among_the_experts(c):
    if c.num_experts_per_tok > c.num_experts:
        return f"num_experts_per_tok={c.num_experts_per_tok} is more than num_experts={c.num_experts}"
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
def one_way_to_bound_expert_buffers(c):
    if c.capacity_factor > 0 and c.ragged_buffer_factor > 0:
        return "capacity_factor and ragged_buffer_factor both bound what experts take: set one, leave the other -1"
    return None
