"""Attention in all its forms, and the kernels that compute it."""

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt

from maxtext.configs.types.blocks import (
    DELTA_NETS,
    KINDS,
    PATTERNS,
    attends,
    block,
    custom_remat,
    in_turn,
    latent,
    plainly_attends,
    rotates,
    sees,
)
from maxtext.configs.types.group import Group, acts_only, in_range, one_of, rule


class Attention(Group):
    """Which kernel computes attention, and what each token may see."""

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
    """Block attention in which each query picks a few key chunks."""

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
    """The small scorer that picks keys in DeepSeek sparse attention."""

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


one_of(
    "attention",
    "autoselected",
    "dot_product",
    "flash",
    "cudnn_flash_jax",
    "cudnn_flash_te",
    "paged",
    "vllm_rpa",
)
in_range(1, None, "moba_chunk_size", "moba_topk", "ragged_block_size", "qk_clip_threshold")
in_range(0, 1, "partial_rotary_factor")
in_range(1, None, "gdn_conv_kernel_dim", "gdn_key_head_dim", "gdn_value_head_dim", "gdn_chunk_size")
in_range(1, None, "gdn_num_key_heads", "gdn_num_value_heads")
in_range(1, None, "kv_lora_rank", "qk_rope_head_dim", "v_head_dim")
in_range(1, None, "indexer_head_dim", "indexer_n_heads", "indexer_topk")
in_range(0, None, "indexer_loss_scaling_factor", "global_num_kv_heads")
in_range(
    1, None, "pagedattn_num_pages", "pagedattn_tokens_per_page", "pagedattn_pages_per_compute_block"
)
in_range(
    1, None, "sa_block_q", "sa_block_kv", "sa_block_kv_compute", "sa_block_q_dkv", "sa_block_kv_dkv",
    "sa_block_kv_dkv_compute", "sa_block_q_dq", "sa_block_kv_dq",
)  # fmt: skip
for _layout in ("sa_q_layout", "sa_k_layout", "sa_v_layout"):
    one_of(_layout, "HEAD_DIM_MINOR", "SEQ_MINOR")


def typed(c):
    """Whether attention_type says what the layers see; a window that a block has anyway may be said
    again.
    """
    if not attends(c) or c.architecture.layer_kinds or block(c) in PATTERNS:
        return False
    return sees(c) == {KINDS[c.attention_type]}


acts_only(
    typed,
    "a decoder_block with attention that does not say itself what each layer sees",
    "attention_type",
)
acts_only(lambda c: "sliding" in sees(c), "attention_type=local_sliding, or a decoder_block with sliding layers",
          "sliding_window_size")  # fmt: skip
acts_only(lambda c: "chunk" in sees(c), "attention_type=chunk, or a decoder_block with chunked layers",
          "chunk_attn_window_size")  # fmt: skip
acts_only(lambda c: rotates(c) and block(c) != "gemma4",
          "rotary positions, in a decoder_block other than gemma4 (which has local_ and global_rope_proportion)",
          "partial_rotary_factor")  # fmt: skip
acts_only(
    attends,
    "a decoder_block with attention",
    "float32_qk_product",
    "float32_logits",
    "attn_logits_soft_cap",
)
acts_only(plainly_attends, "attention other than MLA", "attention_sink", "use_qk_norm")
acts_only(in_turn, "a decoder_block whose attention and MLP follow each other", "use_post_attn_norm",
          "use_post_ffw_norm")  # fmt: skip
acts_only(
    lambda c: block(c) == "gemma4",
    "decoder_block=gemma4",
    "share_kv_projections",
    "global_num_kv_heads",
)
acts_only(lambda c: block(c) == "llama4" and (c.nope_layer_interval > 0 or bool(c.architecture.rope_layers)),
          "decoder_block=llama4 and nope_layer_interval", "temperature_tuning")  # fmt: skip
acts_only(lambda c: c.use_qk_clip, "use_qk_clip=true", "qk_clip_threshold")
acts_only(lambda c: c.moba, "moba=true", "moba_chunk_size", "moba_topk")
acts_only(
    lambda c: plainly_attends(c) and not c.moba,
    "attention other than MLA and MoBA",
    "use_ragged_attention",
)
acts_only(lambda c: c.use_ragged_attention, "use_ragged_attention=true", "ragged_block_size")
acts_only(latent, "attention_type=mla", "mla_naive_kvcache", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
          "qk_rope_head_dim", "v_head_dim")  # fmt: skip
acts_only(lambda c: c.use_indexer, "use_indexer=true", "indexer_head_dim", "indexer_n_heads", "indexer_topk",
          "indexer_loss_scaling_factor")  # fmt: skip
acts_only(lambda c: c.use_indexer and c.indexer_loss_scaling_factor > 0,
          "use_indexer=true and indexer_loss_scaling_factor", "indexer_sparse_training")  # fmt: skip
acts_only(lambda c: block(c) in DELTA_NETS, "decoder_block=qwen3_next or qwen3_5", "gdn_conv_kernel_dim",
          "gdn_key_head_dim", "gdn_value_head_dim", "gdn_num_key_heads", "gdn_num_value_heads", "gdn_chunk_size",
          "use_qk_norm_in_gdn")  # fmt: skip

# Tensors that remat_policy=custom can keep only where they exist.
acts_only(
    lambda c: attends(c) and not c.fused_qkv,
    "fused_qkv=false",
    "query_proj",
    "key_proj",
    "value_proj",
)
acts_only(lambda c: c.fused_qkv, "fused_qkv=true", "qkv_proj")
acts_only(
    lambda c: custom_remat(c) and latent(c),
    "remat_policy=custom and attention_type=mla",
    "kv_wa_proj",
    "mla_q",
)
acts_only(lambda c: custom_remat(c) and latent(c) and c.mla_naive_kvcache,
          "remat_policy=custom, attention_type=mla and mla_naive_kvcache=true", "mla_kv")  # fmt: skip
acts_only(lambda c: custom_remat(c) and latent(c) and c.q_lora_rank > 0,
          "remat_policy=custom, attention_type=mla and q_lora_rank", "query_wa_proj")  # fmt: skip


@rule
def latent_attention_has_its_block(c):
    if latent(c) and block(c) != "deepseek":
        return f"attention_type=mla needs decoder_block=deepseek, not {block(c)}: no other block has latent attention"
    return None


@rule
def every_head_of_latent_attention_has_its_own_keys(c):
    if latent(c) and c.base_num_kv_heads != c.base_num_query_heads:
        return (
            f"base_num_kv_heads={c.base_num_kv_heads} does not fit attention_type=mla, where each query head has its "
            f"own keys: set it to {c.base_num_query_heads}, as base_num_query_heads"
        )
    return None


@rule
def global_heads_divide_evenly(c):
    if c.global_num_kv_heads and c.base_num_query_heads % c.global_num_kv_heads:
        return (
            f"base_num_query_heads={c.base_num_query_heads} is not a multiple of global_num_kv_heads="
            f"{c.global_num_kv_heads}: each key/value head serves the same number of query heads"
        )
    return None


@rule
def sliding_attention_has_a_window(c):
    if c.sliding_window_size or "sliding" not in sees(c):
        return None
    who = (
        "attention_type=local_sliding"
        if c.attention_type == "local_sliding"
        else f"decoder_block={block(c)}"
    )
    return f"{who} needs sliding_window_size: the number of tokens that a token sees in a sliding layer"


@rule
def chunk_attention_has_a_chunk(c):
    if c.chunk_attn_window_size or "chunk" not in sees(c):
        return None
    who = "attention_type=chunk" if c.attention_type == "chunk" else f"decoder_block={block(c)}"
    return f"{who} needs chunk_attn_window_size: the length of a chunk"


@rule
def indexer_needs_mla(c):
    if c.use_indexer and c.attention_type != "mla":
        return "use_indexer=true needs attention_type=mla: the indexer reads MLA's query latent"
    return None


@rule
def indexer_needs_a_query_latent(c):
    if c.use_indexer and c.q_lora_rank == 0:
        return "use_indexer=true needs q_lora_rank > 0: the indexer reads the query latent"
    return None


@rule
def indexer_heads_hold_the_rotary_part(c):
    if c.use_indexer and c.indexer_head_dim < c.qk_rope_head_dim:
        return (
            f"indexer_head_dim={c.indexer_head_dim} is below qk_rope_head_dim={c.qk_rope_head_dim}, the part of a "
            "head that turns"
        )
    return None


@rule
def qk_clip_needs_mla(c):
    if c.use_qk_clip and c.attention_type != "mla":
        return "use_qk_clip=true needs attention_type=mla: clipping rescales MLA's projections"
    return None


@rule
def delta_net_heads_divide_evenly(c):
    if c.gdn_num_value_heads % c.gdn_num_key_heads:
        return f"gdn_num_value_heads={c.gdn_num_value_heads} is not a multiple of gdn_num_key_heads={c.gdn_num_key_heads}"
    return None


@rule
def moba_is_causal_attention(c):
    if c.moba and (latent(c) or sees(c) - {"linear"} != {"full"}):
        seen = "mla" if latent(c) else " and ".join(sorted(sees(c))) or "no"
        return f"moba=true works on plain causal attention (attention_type=global), and there is {seen} attention"
    return None
