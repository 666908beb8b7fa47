"""Mixture-of-experts layers: experts, routers, and the grouped matmul."""

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from maxtext.configs.types.group import Group


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
    """Choice and tile sizes of the grouped matmul over experts."""

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
