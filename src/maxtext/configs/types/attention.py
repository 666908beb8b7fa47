"""Attention: masks, MLA, sparse attention, Gated DeltaNet, and kernel tuning."""

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt

from maxtext.configs.types.group import Group


class Attention(Group):
    """Attention back end, masks, norms and logit caps."""

    attention: str = "autoselected"
    attention_type: Literal["global", "local_sliding", "chunk", "mla", "full"] = "global"
    share_kv_projections: bool = False
    global_num_kv_heads: int = 0
    attention_sink: bool = False
    float32_qk_product: bool = False
    float32_logits: bool = False
    sliding_window_size: NonNegativeInt = 0
    chunk_attn_window_size: NonNegativeInt = 0
    attn_logits_soft_cap: None | NonNegativeFloat = None
    use_post_attn_norm: bool = False
    use_post_ffw_norm: bool = False
    use_ragged_attention: bool = False
    use_tokamax_gmm: bool = False
    ragged_block_size: int = 256
    enable_padding_causal_mask: bool = True
    use_tokamax_splash: bool = False
    use_jax_splash: bool = False
    force_q_layout: bool = False
    use_qk_clip: bool = False
    qk_clip_threshold: float = 100.0


class MoBa(Group):
    """Mixture of block attention: each query selects a few chunks of keys."""

    moba: bool = False
    moba_chunk_size: int = 1024
    moba_topk: int = 8


class MlaAttention(Group):
    """Multi-head latent attention: sizes of the compressed queries, keys and values."""

    mla_naive_kvcache: bool = True
    q_lora_rank: NonNegativeInt = 0
    kv_lora_rank: NonNegativeInt = 512
    qk_nope_head_dim: NonNegativeInt = 128
    qk_rope_head_dim: NonNegativeInt = 64
    v_head_dim: NonNegativeInt = 128


class AttentionIndexer(Group):
    """The indexer that selects keys in DeepSeek sparse attention."""

    use_indexer: bool = False
    indexer_head_dim: NonNegativeInt = 128
    indexer_n_heads: NonNegativeInt = 64
    indexer_topk: NonNegativeInt = 2048
    indexer_sparse_training: bool = False
    indexer_loss_scaling_factor: float = 0.0


class Llama4Attention(Group):
    """Query/key normalisation and the position-dependent temperature of Llama 4."""

    use_qk_norm: bool = False
    temperature_tuning: bool = False


class SplashAttention(Group):
    """Block sizes and tuning switches of the TPU flash-attention kernel."""

    sa_block_q: int = 512
    sa_block_kv: int = 512
    sa_block_kv_compute: int = 512
    sa_block_q_dkv: int = 512
    sa_block_kv_dkv: int = 512
    sa_block_kv_dkv_compute: int = 512
    sa_block_q_dq: int = 512
    sa_block_kv_dq: int = 512
    sa_use_fused_bwd_kernel: bool = False
    sa_q_layout: str = "HEAD_DIM_MINOR"
    sa_k_layout: str = "HEAD_DIM_MINOR"
    sa_v_layout: str = "HEAD_DIM_MINOR"
    use_max_logit_estimate: int = -1
    cost_estimate_flops_fwd: int = -1
    cost_estimate_flops_bwd: int = -1
    dq_reduction_steps: int = 0
    use_splash_scheduler: bool = False


class PagedAttention(Group):
    """Size and layout of the paged KV cache used for serving."""

    pagedattn_num_pages: int = 64
    pagedattn_tokens_per_page: int = 32
    pagedattn_pages_per_compute_block: int = 4
    pagedattn_max_pages_per_group: int = -1
    pagedattn_head_dim_alignment: int = 128


class Qwen3Next(Group):
    """Sizes of the Gated DeltaNet layers in Qwen3-Next and Qwen3.5."""

    gdn_conv_kernel_dim: int = 4
    gdn_key_head_dim: int = 128
    gdn_value_head_dim: int = 128
    gdn_num_key_heads: int = 16
    gdn_num_value_heads: int = 32
    gdn_chunk_size: int = 64
    use_qk_norm_in_gdn: bool = True
    partial_rotary_factor: float = 1.0
