"""Keys of later releases of MaxText, beyond the published list."""

from typing import Any

from pydantic import Field

from maxtext.configs.types.enums import CustomRule, RematLocation
from maxtext.configs.types.group import Group


class RunControl(Group):
    """The first save and evaluation, the sharding of evaluation, and steps in flight."""

    save_checkpoint_on_start: bool = False
    max_inflight_computations: int = 2
    eval_start_step: int = 0
    custom_mesh_and_rule_for_eval: CustomRule = CustomRule.DEFAULT
    logical_axis_rules_for_eval: Any = Field(default_factory=list)


class WeightsAndBiases(Group):
    """Metrics in Weights & Biases."""

    enable_wandb: bool = False
    wandb_project_name: str = "maxtext"
    wandb_run_name: str = ""


class LaterReleases(Group):
    """Keys of MaxText that do not act here, with their defaults."""

    moe_dispatch_no_expert_sharding: bool = False
    ici_context_usp_ulysses_parallelism: int = 1
    dcn_context_usp_ulysses_parallelism: int = 1
    ulysses_context_sharding: str = "context_usp_ulysses"
    use_gmm_v2: bool = False
    use_ragged_sort: bool = False
    ragged_gather_fallback: bool = False
    ragged_gather_reduce_fallback: bool = False
    ragged_gather_cost_estimate_flops: int = -1
    ragged_gather_reduce_cost_estimate_flops: int = -1
    ragged_gather_cost_estimate_bytes_accessed: int = -1
    ragged_gather_reduce_cost_estimate_bytes_accessed: int = -1
    sa_bwd_dkv_megacore: bool = False
    ring_scan_unroll: int = 1
    sa_fuse_reciprocal: bool = True
    sa_use_base2_exp: bool = True
    local_sa_block_q: int | None = None
    local_sa_block_kv: int | None = None
    local_sa_block_kv_compute: int | None = None
    local_sa_block_q_dkv: int | None = None
    local_sa_block_kv_dkv: int | None = None
    local_sa_block_kv_dkv_compute: int | None = None
    local_sa_block_q_dq: int | None = None
    local_sa_block_kv_dq: int | None = None
    local_sa_use_fused_bwd_kernel: bool | None = None
    local_sa_q_layout: str | None = None
    local_sa_k_layout: str | None = None
    local_sa_v_layout: str | None = None
    local_use_splash_scheduler: bool | None = None
    local_sa_fuse_reciprocal: bool | None = None
    local_sa_use_base2_exp: bool | None = None
    experimental_sa_quant_q_fp8: bool = False
    experimental_sa_quant_k_fp8: bool = False
    video_max_grid_t: int | None = None
    video_max_grid_h: int | None = None
    video_max_grid_w: int | None = None
    num_moe_token_chunks: int = 1
    moe_chunk_barrier: bool = False
    num_moe_emb_chunks: int = 0
    first_num_hash_layers: int = 0
    o_lora_rank: int = 0
    o_groups: int = 0
    compress_ratios: list[int] = Field(default_factory=list)
    compressed_rope_max_timescale: int = 160000
    hidden_size_per_layer_input: int = 0
    vocab_size_per_layer_input: int = 0
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False
    training_objective: str = "causal_lm"
    causal_block_size: int = 32
    block_diffusion_mask_id: int = -1
    block_diffusion_min_noise: float = 0.001
    block_diffusion_logit_alignment: str = "same_position"
    block_diffusion_canvas_policy: str = "all_masked"
    indexer_use_approx_top_k: bool = False
    indexer_approx_top_k_recall: float = 0.95
    indexer_mask_exact_topk: bool = True
    mla_qk_head_chunk_size: int = 0
    indexer_cutoff_threshold: RematLocation = RematLocation.REMAT
    kv_proj: RematLocation = RematLocation.REMAT
    enable_mhc_lite: bool = False
    dense_fsdp_use_two_stage_all_gather: bool = False
    multi_tier_checkpointing_backup_interval_steps: int | None = None
    managed_mldiagnostics_on_demand_profiling: bool = True
    managed_mldiagnostics_region: str = ""
    elastic_backup_kind: str = "snapshot"
    te_comm_gemm_overlap: str = "disabled"
    dcn_bandwidth_limit: str = ""
    dcn_bandwidth_burst: str = "10mb"
    dcn_bandwidth_latency: str = "50ms"
    dcn_bandwidth_interface: str = "eth0"
    rope_pairwise: bool = False
    check_vma: bool = False
    use_sliced_mla_proj: bool = False
    write_estimator_result: bool = False
