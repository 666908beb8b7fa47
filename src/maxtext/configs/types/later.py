"""Keys of later releases of MaxText, beyond the published list."""

from typing import Any

from maxtext.configs.types import inert
from maxtext.configs.types.enums import CustomRule, RematLocation
from maxtext.configs.types.key import EVALUATION, LOSS_OF_EVALUATION, Group, key


class RunControl(Group):
    """The first save and evaluation, the sharding of evaluation, and steps in flight."""

    save_checkpoint_on_start: bool = key(
        False, "Also save the state before the first step, as step 0"
    )
    max_inflight_computations: int = key(
        2,
        "Training steps that are dispatched to the devices before the host reads the metrics "
        "of the first",
        low=1,
    )
    eval_start_step: int = key(
        0,
        "Training steps before the first evaluation; from then on, one every eval_interval steps",
        low=0,
        needs=EVALUATION,
    )
    custom_mesh_and_rule_for_eval: CustomRule = key(
        CustomRule.DEFAULT,
        "Layout of configs/layouts whose rules apply in evaluation, on the mesh of training: see "
        "custom_mesh_and_rule; empty: the rules of training",
        needs=(LOSS_OF_EVALUATION, EVALUATION),
    )
    logical_axis_rules_for_eval: Any = key(
        list,
        "Rules of logical axes for evaluation; they replace rules of the same name in "
        "logical_axis_rules",
        needs=(LOSS_OF_EVALUATION, EVALUATION),
    )


class WeightsAndBiases(Group):
    """Metrics in Weights & Biases."""

    enable_wandb: bool = key(
        False,
        "Send metrics to Weights & Biases; so do WANDB_PROJECT and WANDB_MODE in the environment",
    )
    wandb_project_name: str = key(
        "maxtext",
        "Project with enable_wandb; WANDB_PROJECT replaces this default",
        needs="enable_wandb",
    )
    wandb_run_name: str = key(
        "", "Name of the run with enable_wandb; empty: run_name", needs="enable_wandb"
    )


class LaterReleases(Group):
    """Keys of MaxText that do not act here, with their defaults."""

    moe_dispatch_no_expert_sharding: bool = key(
        False,
        "In dense MoE, leave the expert axis out of the axes that split the batch of "
        "dispatched tokens",
        status=inert.EXPERT_SHARDING,
    )
    ici_context_usp_ulysses_parallelism: int = key(
        1,
        "Devices inside a slice that exchange heads for sequence in context_parallel_strategy=usp",
        status=inert.CONTEXT_PARALLELISM,
    )
    dcn_context_usp_ulysses_parallelism: int = key(
        1,
        "Slices that exchange heads for sequence in context_parallel_strategy=usp",
        status=inert.CONTEXT_PARALLELISM,
    )
    ulysses_context_sharding: str = key(
        "context_usp_ulysses",
        "Mesh axis of the head exchange in context_parallel_strategy=usp",
        status=inert.CONTEXT_PARALLELISM,
    )
    use_gmm_v2: bool = key(
        False,
        "Use version 2 of the Tokamax grouped matmul; needs use_tokamax_gmm",
        status=inert.KERNELS,
    )
    use_ragged_sort: bool = key(
        False,
        "Sort tokens by expert in a TPU kernel that handles ragged groups",
        status=inert.KERNELS,
    )
    ragged_gather_fallback: bool = key(
        False,
        "Gather ragged rows in JAX instead of on the SparseCore of a TPU",
        status=inert.KERNELS,
    )
    ragged_gather_reduce_fallback: bool = key(
        False,
        "Gather and sum ragged rows in JAX instead of on the SparseCore of a TPU",
        status=inert.KERNELS,
    )
    ragged_gather_cost_estimate_flops: int = key(
        -1, "FLOPs reported to XLA for the ragged gather kernel; -1: computed", status=inert.KERNELS
    )
    ragged_gather_reduce_cost_estimate_flops: int = key(
        -1,
        "FLOPs reported to XLA for the ragged gather-and-sum kernel; -1: computed",
        status=inert.KERNELS,
    )
    ragged_gather_cost_estimate_bytes_accessed: int = key(
        -1, "Bytes reported to XLA for the ragged gather kernel; -1: computed", status=inert.KERNELS
    )
    ragged_gather_reduce_cost_estimate_bytes_accessed: int = key(
        -1,
        "Bytes reported to XLA for the ragged gather-and-sum kernel; -1: computed",
        status=inert.KERNELS,
    )
    sa_bwd_dkv_megacore: bool = key(
        False,
        "Split the Splash backward kernel of keys and values by head over both cores of a TPU chip",
        status=inert.KERNELS,
    )
    ring_scan_unroll: int = key(
        1, "Hops of ring attention that are unrolled; 0: all", status=inert.KERNELS
    )
    sa_fuse_reciprocal: bool = key(
        True, "Divide by the softmax sum inside the Tokamax Splash kernel", status=inert.KERNELS
    )
    sa_use_base2_exp: bool = key(
        True, "Compute the Tokamax Splash softmax with powers of 2", status=inert.KERNELS
    )
    local_sa_block_q: int | None = key(
        None, "sa_block_q of sliding-window layers; null: the same", status=inert.KERNELS
    )
    local_sa_block_kv: int | None = key(
        None, "sa_block_kv of sliding-window layers; null: the same", status=inert.KERNELS
    )
    local_sa_block_kv_compute: int | None = key(
        None, "sa_block_kv_compute of sliding-window layers; null: the same", status=inert.KERNELS
    )
    local_sa_block_q_dkv: int | None = key(
        None, "sa_block_q_dkv of sliding-window layers; null: the same", status=inert.KERNELS
    )
    local_sa_block_kv_dkv: int | None = key(
        None, "sa_block_kv_dkv of sliding-window layers; null: the same", status=inert.KERNELS
    )
    local_sa_block_kv_dkv_compute: int | None = key(
        None,
        "sa_block_kv_dkv_compute of sliding-window layers; null: the same",
        status=inert.KERNELS,
    )
    local_sa_block_q_dq: int | None = key(
        None, "sa_block_q_dq of sliding-window layers; null: the same", status=inert.KERNELS
    )
    local_sa_block_kv_dq: int | None = key(
        None, "sa_block_kv_dq of sliding-window layers; null: the same", status=inert.KERNELS
    )
    local_sa_use_fused_bwd_kernel: bool | None = key(
        None,
        "sa_use_fused_bwd_kernel of sliding-window layers; null: the same",
        status=inert.KERNELS,
    )
    local_sa_q_layout: str | None = key(
        None, "sa_q_layout of sliding-window layers; null: the same", status=inert.KERNELS
    )
    local_sa_k_layout: str | None = key(
        None, "sa_k_layout of sliding-window layers; null: the same", status=inert.KERNELS
    )
    local_sa_v_layout: str | None = key(
        None, "sa_v_layout of sliding-window layers; null: the same", status=inert.KERNELS
    )
    local_use_splash_scheduler: bool | None = key(
        None, "use_splash_scheduler of sliding-window layers; null: the same", status=inert.KERNELS
    )
    local_sa_fuse_reciprocal: bool | None = key(
        None, "sa_fuse_reciprocal of sliding-window layers; null: the same", status=inert.KERNELS
    )
    local_sa_use_base2_exp: bool | None = key(
        None, "sa_use_base2_exp of sliding-window layers; null: the same", status=inert.KERNELS
    )
    experimental_sa_quant_q_fp8: bool = key(
        False,
        "Round the queries of Splash attention to float8_e4m3fn, without scales",
        status=inert.KERNELS,
    )
    experimental_sa_quant_k_fp8: bool = key(
        False,
        "Round the keys of Splash attention to float8_e4m3fn, without scales",
        status=inert.KERNELS,
    )
    video_max_grid_t: int | None = key(
        None,
        "Largest number of frames of patches that a video is padded to; null: no padding",
        status=inert.MULTIMODAL,
    )
    video_max_grid_h: int | None = key(
        None,
        "Largest number of rows of patches that a video is padded to; null: no padding",
        status=inert.MULTIMODAL,
    )
    video_max_grid_w: int | None = key(
        None,
        "Largest number of columns of patches that a video is padded to; null: no padding",
        status=inert.MULTIMODAL,
    )
    num_moe_token_chunks: int = key(
        1,
        "Chunks of tokens in ring-of-experts, so that one is gathered while another is "
        "multiplied; 1: off",
        status=inert.EXPERT_CHUNKS,
    )
    moe_chunk_barrier: bool = key(
        False,
        "Compute the chunks of num_moe_token_chunks strictly one after the other",
        status=inert.EXPERT_CHUNKS,
    )
    num_moe_emb_chunks: int = key(
        0,
        "Chunks of the embedding in which tokens are gathered and multiplied by experts; 0: off",
        status=inert.EXPERT_CHUNKS,
    )
    first_num_hash_layers: int = key(
        0,
        "First layers that route tokens to experts by a hash of their ids",
        status=inert.DEEPSEEK_V4,
    )
    o_lora_rank: int = key(
        0,
        "Rank of the low-rank output projection of compressed attention; 0: a full projection",
        status=inert.DEEPSEEK_V4,
    )
    o_groups: int = key(
        0,
        "Groups of heads with an output projection of their own in compressed attention",
        status=inert.DEEPSEEK_V4,
    )
    compress_ratios: list[int] = key(
        list,
        "Tokens that each layer's attention compresses into one: 0, 4 or 128 a layer",
        status=inert.DEEPSEEK_V4,
    )
    compressed_rope_max_timescale: int = key(
        160000, "RoPE base of compressed attention", status=inert.DEEPSEEK_V4
    )
    hidden_size_per_layer_input: int = key(
        0,
        "Width of the embedding that each layer adds at its end; 0: none",
        status=inert.GEMMA_4_SMALL,
    )
    vocab_size_per_layer_input: int = key(
        0, "Vocabulary of the embeddings that each layer adds", status=inert.GEMMA_4_SMALL
    )
    num_kv_shared_layers: int = key(
        0,
        "Last layers that reuse the keys and values of the last layer of their kind before them",
        status=inert.GEMMA_4_SMALL,
    )
    use_double_wide_mlp: bool = key(
        False,
        "Double the MLP width of the layers of num_kv_shared_layers",
        status=inert.GEMMA_4_SMALL,
    )
    training_objective: str = key(
        "causal_lm",
        "What training predicts: causal_lm, the next token, or block_diffusion, masked tokens"
        " of a block",
        status=inert.BLOCK_DIFFUSION,
    )
    causal_block_size: int = key(
        32,
        "Tokens of a block whose tokens see each other, in attention of block diffusion",
        status=inert.BLOCK_DIFFUSION,
    )
    block_diffusion_mask_id: int = key(
        -1,
        "Token id of a masked token, required for training_objective=block_diffusion",
        status=inert.BLOCK_DIFFUSION,
    )
    block_diffusion_min_noise: float = key(
        0.001,
        "Smallest probability with which a token of a block is masked",
        status=inert.BLOCK_DIFFUSION,
    )
    block_diffusion_logit_alignment: str = key(
        "same_position",
        "Whether a logit predicts the token at its own position or the next: same_position or"
        " shifted",
        status=inert.BLOCK_DIFFUSION,
    )
    block_diffusion_canvas_policy: str = key(
        "all_masked",
        "What a block starts from: all_masked, or seed_and_mask",
        status=inert.BLOCK_DIFFUSION,
    )
    indexer_use_approx_top_k: bool = key(
        False,
        "Select keys with an approximate top-k in the DeepSeek indexer",
        status=inert.DEEPSEEK_ATTENTION,
    )
    indexer_approx_top_k_recall: float = key(
        0.95,
        "Share of the true top-k that indexer_use_approx_top_k must find",
        status=inert.DEEPSEEK_ATTENTION,
    )
    indexer_mask_exact_topk: bool = key(
        True,
        "Mask exactly indexer_topk keys; false: all keys at or above the last selected score",
        status=inert.DEEPSEEK_ATTENTION,
    )
    mla_qk_head_chunk_size: int = key(
        0,
        "Heads whose attention scores are computed at a time in MLA, to save memory; 0: all",
        status=inert.DEEPSEEK_ATTENTION,
    )
    indexer_cutoff_threshold: RematLocation = key(
        RematLocation.REMAT,
        "remat_policy=custom: the score of the last key that the indexer selects",
        status=inert.UNNAMED_TENSORS,
    )
    kv_proj: RematLocation = key(
        RematLocation.REMAT,
        "remat_policy=custom: keys and values that come from one projection",
        status=inert.UNNAMED_TENSORS,
    )
    enable_mhc_lite: bool = key(
        False,
        "Mix residual streams by a convex combination of permutations, without Sinkhorn iterations",
        status=inert.MHC_LITE,
    )
    dense_fsdp_use_two_stage_all_gather: bool = key(
        False,
        "Gather the weights of dense MLPs first over fsdp, then over fsdp_transpose",
        status=inert.TWO_STAGE_GATHER,
    )
    multi_tier_checkpointing_backup_interval_steps: int | None = key(
        None,
        "Steps between copies of local checkpoints to persistent storage; null: by minutes",
        status=inert.GOOGLE_CLOUD,
    )
    managed_mldiagnostics_on_demand_profiling: bool = key(
        True,
        "Let the ML Diagnostics service take profiles of a running job",
        status=inert.GOOGLE_CLOUD,
    )
    managed_mldiagnostics_region: str = key(
        "",
        "Google Cloud region of the ML Diagnostics service; empty: detected",
        status=inert.GOOGLE_CLOUD,
    )
    elastic_backup_kind: str = key(
        "snapshot",
        "How Pathways keeps the state of an elastic run in memory between two steps",
        status=inert.PATHWAYS,
    )
    te_comm_gemm_overlap: str = key(
        "disabled",
        "Overlap the communication of tensor_sequence with matmuls: disabled, mlp or full",
        status=inert.TRANSFORMER_ENGINE,
    )
    dcn_bandwidth_limit: str = key(
        "",
        "Bandwidth of each machine's network, such as 10gbit; empty: as it is",
        status=inert.NETWORK_SIMULATION,
    )
    dcn_bandwidth_burst: str = key(
        "10mb",
        "Bytes that may exceed dcn_bandwidth_limit in a burst",
        status=inert.NETWORK_SIMULATION,
    )
    dcn_bandwidth_latency: str = key(
        "50ms",
        "Longest time that data waits under dcn_bandwidth_limit",
        status=inert.NETWORK_SIMULATION,
    )
    dcn_bandwidth_interface: str = key(
        "eth0",
        "Network interface that dcn_bandwidth_limit slows down",
        status=inert.NETWORK_SIMULATION,
    )
    rope_pairwise: bool = key(
        False, "Keep the pairs that RoPE rotates in an axis of their own", status=inert.TPU_PROGRAMS
    )
    check_vma: bool = key(
        False,
        "Let JAX check and use which values differ between devices in manually partitioned code",
        status=inert.TPU_PROGRAMS,
    )
    use_sliced_mla_proj: bool = key(
        False,
        "Slice the weights of MLA before the matmul instead of its output",
        status=inert.TPU_PROGRAMS,
    )
    write_estimator_result: bool = key(
        False,
        "Write the batch size and remat policy that the estimator finds to a file",
        status=inert.ESTIMATES,
    )
