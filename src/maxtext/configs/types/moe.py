"""Mixture-of-experts layers: experts, routers, and the grouped matmul."""

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from maxtext.configs.types import inert
from maxtext.configs.types.key import TRAINED_WEIGHTS, Group, key


class MoEGeneral(Group):
    """Number and size of experts, routing, dropping and expert parallelism."""

    num_experts: PositiveInt = key(
        1, "Experts per MoE layer; 1: an ordinary dense feed-forward block", limit=1_000_000
    )
    num_experts_per_tok: PositiveInt = key(1, "Experts each token is sent to (the router's top k)")
    capacity_factor: float = key(
        -1.0,
        "Capacity of an expert relative to an even load; tokens beyond it are dropped; needs "
        "sparse_matmul=false; -1: drop none",
    )
    ragged_buffer_factor: float = key(
        -1.0,
        "Size of a device's receive buffer for expert tokens, relative to the tokens that it "
        "sends; overflow of its last experts is dropped; -1: all fit",
        needs="sparse_matmul",
    )
    moe_expert_input_dim: int = key(
        -1,
        "Input and output width of experts in qwen3_custom_moe, equal to "
        "attention_output_dim; -1: the embedding width",
        low=1,
        special=(-1,),
    )
    base_moe_mlp_dim: int = key(
        -1,
        "Hidden width of one expert, before global_parameter_scale; -1: base_mlp_dim",
        low=1,
        special=(-1,),
    )
    padded_base_moe_mlp_dim: int | None = key(
        None,
        "Expert width zero-padded to this, for kernels that need aligned sizes; null: no padding",
        status=inert.EXPERT_SHARDING,
    )
    load_balance_loss_weight: NonNegativeFloat = key(
        0.0, "Weight of the auxiliary loss that pushes the router to use all experts evenly; 0: off"
    )
    use_custom_sort_vjp: bool = key(
        True,
        "Use a hand-written gradient for sorting tokens by expert, a gather instead of a slow"
        " scatter",
        needs="sparse_matmul",
    )
    use_ring_of_experts: bool = key(
        False,
        "Expert parallelism by gathering all tokens and reduce-scattering results; false: "
        "ragged all-to-all",
        needs="sparse_matmul",
    )
    use_gather_mosaic_kernel: bool = key(
        False,
        "Move tokens to and from expert order with a Mosaic TPU kernel instead of XLA's gather",
        status=inert.KERNELS,
    )
    use_random_routing: bool = key(
        False,
        "Route tokens to experts round-robin, to benchmark speed under an even load; not for "
        "training",
    )
    interleave_moe_layer_step: int = key(
        1, "Llama 4: every n-th layer has experts, the others are dense; 1: all", low=1
    )
    moe_fsdp_use_two_stage_all_gather: bool = key(
        False,
        "Gather expert weights over fsdp and fsdp_transpose in two steps instead of one collective",
        needs="sparse_matmul",
    )
    shard_exp_on_fsdp: bool = key(
        False,
        "Shard expert weights over fsdp along the expert axis, not the embedding axis; fsdp "
        "must divide num_experts",
    )
    use_2d_fsdp_sharding: bool = key(
        False,
        "Shard expert weights along two axes, one by fsdp and one by fsdp_transpose",
        status=inert.EXPERT_SHARDING,
    )
    norm_topk_prob: bool = key(
        False,
        "Rescale the weights of the chosen experts so that they sum to one per token; "
        "Mixtral, Gemma 4 and gpt-oss always do",
    )
    float32_weight_sum: bool = key(
        True, "Add up the weighted expert outputs in float32 instead of dtype"
    )
    float32_gate_logits: bool = key(
        False, "Compute the router's logits in float32 instead of dtype; DeepSeek always does"
    )
    prefuse_moe_weights: bool = key(
        False,
        "Store the experts' gate and up weights packed, as serving (attention=vllm_rpa) expects",
        status=inert.EXPERT_SHARDING,
    )


class MoEKernels(Group):
    """Choice and tile sizes of the grouped matmul over experts."""

    megablox: bool = key(
        True,
        "Use a kernel for the grouped matmul of experts if there is one (one Hopper GPU, "
        "bfloat16); false: jax.lax.ragged_dot, which other devices always use",
        needs="sparse_matmul",
    )
    sparse_matmul: bool = key(
        True,
        "Sort tokens by expert and use grouped matmuls; false: every expert computes every "
        "token, or see capacity_factor",
    )
    wi_tile_fwd_batch_seq: int = key(
        512,
        "Tile length along the token axis in the experts' gate/up grouped matmul, forward pass",
        low=1,
        status=inert.KERNELS,
    )
    wi_tile_fwd_embed_dim: int = key(
        1024,
        "Tile length along the embedding axis in the experts' gate/up grouped matmul, forward pass",
        low=1,
        status=inert.KERNELS,
    )
    wi_tile_fwd_mlp_dim: int = key(
        1024,
        "Tile length along the hidden (MLP) axis in the experts' gate/up grouped matmul, "
        "forward pass",
        low=1,
        status=inert.KERNELS,
    )
    wi_tile_dlhs_batch_seq: int = key(
        512,
        "Tile length along the token axis in the input gradient of the experts' gate/up "
        "grouped matmul",
        low=1,
        status=inert.KERNELS,
    )
    wi_tile_dlhs_embed_dim: int = key(
        1024,
        "Tile length along the embedding axis in the input gradient of the experts' gate/up "
        "grouped matmul",
        low=1,
        status=inert.KERNELS,
    )
    wi_tile_dlhs_mlp_dim: int = key(
        1024,
        "Tile length along the hidden (MLP) axis in the input gradient of the experts' "
        "gate/up grouped matmul",
        low=1,
        status=inert.KERNELS,
    )
    wi_tile_drhs_batch_seq: int = key(
        512,
        "Tile length along the token axis in the weight gradient of the experts' gate/up "
        "grouped matmul",
        low=1,
        status=inert.KERNELS,
    )
    wi_tile_drhs_embed_dim: int = key(
        1024,
        "Tile length along the embedding axis in the weight gradient of the experts' gate/up "
        "grouped matmul",
        low=1,
        status=inert.KERNELS,
    )
    wi_tile_drhs_mlp_dim: int = key(
        1024,
        "Tile length along the hidden (MLP) axis in the weight gradient of the experts' "
        "gate/up grouped matmul",
        low=1,
        status=inert.KERNELS,
    )
    wo_tile_fwd_batch_seq: int = key(
        512,
        "Tile length along the token axis in the experts' down grouped matmul, forward pass",
        low=1,
        status=inert.KERNELS,
    )
    wo_tile_fwd_embed_dim: int = key(
        1024,
        "Tile length along the embedding axis in the experts' down grouped matmul, forward pass",
        low=1,
        status=inert.KERNELS,
    )
    wo_tile_fwd_mlp_dim: int = key(
        1024,
        "Tile length along the hidden (MLP) axis in the experts' down grouped matmul, forward pass",
        low=1,
        status=inert.KERNELS,
    )
    wo_tile_dlhs_batch_seq: int = key(
        512,
        "Tile length along the token axis in the input gradient of the experts' down grouped "
        "matmul",
        low=1,
        status=inert.KERNELS,
    )
    wo_tile_dlhs_embed_dim: int = key(
        1024,
        "Tile length along the embedding axis in the input gradient of the experts' down "
        "grouped matmul",
        low=1,
        status=inert.KERNELS,
    )
    wo_tile_dlhs_mlp_dim: int = key(
        1024,
        "Tile length along the hidden (MLP) axis in the input gradient of the experts' down "
        "grouped matmul",
        low=1,
        status=inert.KERNELS,
    )
    wo_tile_drhs_batch_seq: int = key(
        512,
        "Tile length along the token axis in the weight gradient of the experts' down grouped"
        " matmul",
        low=1,
        status=inert.KERNELS,
    )
    wo_tile_drhs_embed_dim: int = key(
        1024,
        "Tile length along the embedding axis in the weight gradient of the experts' down "
        "grouped matmul",
        low=1,
        status=inert.KERNELS,
    )
    wo_tile_drhs_mlp_dim: int = key(
        1024,
        "Tile length along the hidden (MLP) axis in the weight gradient of the experts' down "
        "grouped matmul",
        low=1,
        status=inert.KERNELS,
    )
    merge_gating_gmm: bool = key(
        False,
        "Run the experts' gate and up projections as one grouped matmul on packed weights",
        status=inert.KERNELS,
    )


class DeepSeekMoE(Group):
    """Shared experts, biased and group-limited routing as in DeepSeek models."""

    first_num_dense_layers: NonNegativeInt = key(
        0,
        "DeepSeek: number of first layers with a dense MLP, before layers with experts (V3: "
        "3); 0: none",
    )
    shared_experts: NonNegativeInt = key(
        0,
        "Experts every token passes through besides the routed ones, built as one wider MLP; "
        "0: none",
    )
    routed_scaling_factor: float = key(
        1.0, "Factor on the routed experts' combined output (DeepSeek-V3: 2.5)"
    )
    routed_score_func: str = key(
        "",
        "DeepSeek: how router logits become scores, sigmoid (V3) or softmax (V2); empty: softmax",
        choices=("", "softmax", "sigmoid"),
    )
    routed_bias: bool = key(
        False,
        "DeepSeek: a per-expert bias that affects selection but not weights; gpt-oss: a "
        "learned bias of the router logits",
    )
    routed_bias_update_rate: float = key(
        0.0,
        "Step by which routed_bias moves toward an even expert load after each update; 0: fixed",
        low=0,
        needs=TRAINED_WEIGHTS,
    )
    mlp_bias: bool = key(False, "Add learned bias vectors to MLPs, and to the experts of gpt-oss")
    n_routing_groups: int = key(
        -1,
        "Groups the experts are split into for group-limited routing; -1: no groups",
        low=1,
        special=(-1,),
    )
    topk_routing_group: int = key(
        -1,
        "Number of best groups from which a token may choose experts; -1: no group limit; see"
        " n_routing_groups",
        low=1,
        special=(-1,),
    )
    use_batch_split_schedule: bool = key(
        False,
        "Split the batch into microbatches and interleave them, so that one computes while "
        "another communicates",
        status=inert.EXPERT_SHARDING,
    )
    batch_split_factor: int = key(
        1,
        "Microbatches per batch with use_batch_split_schedule; 1: no split",
        low=1,
        status=inert.EXPERT_SHARDING,
    )
