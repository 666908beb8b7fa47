"""Attention: masks, needs.MLA, sparse attention, Gated DeltaNet, and kernel tuning."""

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt

from maxtext.configs.types import inert
from maxtext.configs.types.key import (
    INDEXER_LOSS,
    INT64_MAX,
    MLA,
    PAGED_ATTENTION,
    PAGED_OR_PREFIX_CACHE,
    TRAINED_WEIGHTS,
    Group,
    key,
)


class Attention(Group):
    """Attention back end, masks, norms and logit caps."""

    attention: str = key(
        "autoselected",
        "Back end: autoselected, dot_product (anywhere), cudnn_flash_jax (NVIDIA), flash (TPU)",
        choices=(
            "autoselected",
            "dot_product",
            "flash",
            "cudnn_flash_jax",
            "cudnn_flash_te",
            "paged",
            "vllm_rpa",
        ),
    )
    attention_type: Literal["global", "local_sliding", "chunk", "mla", "full"] = key(
        "global",
        "Attention mask, unless decoder_block determines it: global, local_sliding, chunk, "
        "mla (latent), full (no causal mask)",
    )
    share_kv_projections: bool = key(
        False,
        "Use the key projection's output as value too, so no value weights exist (Gemma 4 "
        "global layers)",
    )
    global_num_kv_heads: int = key(
        0,
        "Key/value heads in full-attention layers where they differ from the local ones "
        "(Gemma 4); 0: base_num_kv_heads",
        low=0,
    )
    attention_sink: bool = key(
        False,
        "Add a learned logit per head to the softmax denominator, so a head may attend to "
        "nothing (gpt-oss)",
    )
    float32_qk_product: bool = key(False, "Multiply queries and keys in float32 instead of dtype")
    float32_logits: bool = key(False, "Convert attention scores to float32 before the softmax")
    sliding_window_size: NonNegativeInt = key(
        0, "Window in tokens, the query included, of local_sliding layers; 0: no window"
    )
    chunk_attn_window_size: NonNegativeInt = key(
        0,
        "Chunk length in tokens for attention_type=chunk: causal within a chunk, no attention"
        " across chunks; 0: unset",
    )
    attn_logits_soft_cap: None | NonNegativeFloat = key(
        None,
        "Squash attention scores to +-cap by cap*tanh(x/cap) (Gemma 2 uses 50); null or 0: no cap",
    )
    use_post_attn_norm: bool = key(
        False, "Normalise the attention output before it is added to the residual"
    )
    use_post_ffw_norm: bool = key(
        False, "Normalise the MLP output before it is added to the residual"
    )
    use_ragged_attention: bool = key(
        False, "Require the paged decode attention kernel, which GPUs use automatically"
    )
    use_tokamax_gmm: bool = key(
        False, "Run the grouped matmul of MoE with the Tokamax kernel", status=inert.KERNELS
    )
    ragged_block_size: int = key(
        256,
        "Block size in tokens of the paged decode kernel with use_ragged_attention",
        low=1,
        needs="use_ragged_attention",
    )
    enable_padding_causal_mask: bool = key(
        True,
        "Pass padding as well as causality to Transformer Engine attention "
        "(attention=cudnn_flash_te)",
        status=inert.TRANSFORMER_ENGINE,
    )
    use_tokamax_splash: bool = key(
        False,
        "Use Tokamax's Splash attention kernel when attention=flash on TPU",
        status=inert.KERNELS,
    )
    use_jax_splash: bool = key(
        False,
        "Use the Splash attention kernel shipped with JAX when attention=flash on TPU",
        status=inert.KERNELS,
    )
    force_q_layout: bool = key(
        False,
        "Pin the memory layout of queries before the attention kernel to avoid a copy; TPU tuning",
        status=inert.KERNELS,
    )
    use_qk_clip: bool = key(
        False,
        "After each step, shrink MLA query/key weights of heads whose largest score is over "
        "qk_clip_threshold",
        needs=TRAINED_WEIGHTS,
    )
    qk_clip_threshold: float = key(
        100.0,
        "Largest attention score a head may reach before use_qk_clip scales its weights down",
        low=1,
        needs="use_qk_clip",
    )


class MoBa(Group):
    """Mixture of block attention: each query selects a few chunks of keys."""

    moba: bool = key(
        False,
        "Mixture of block attention: each query attends only to the chunks of keys that match"
        " it best",
    )
    moba_chunk_size: int = key(1024, "Tokens per key chunk when moba is on", low=1, needs="moba")
    moba_topk: int = key(
        8,
        "Chunks each query attends to when moba is on, its own chunk counted among them",
        low=1,
        needs="moba",
    )


class MlaAttention(Group):
    """Multi-head latent attention: sizes of the compressed queries, keys and values."""

    mla_naive_kvcache: bool = key(
        True,
        "MLA: make the keys and values of every head; false: attend to the small shared "
        "latent itself; the same result",
        needs=MLA,
    )
    q_lora_rank: NonNegativeInt = key(
        0,
        "MLA: width of the compressed query latent; 0: queries come straight from the hidden state",
        needs=MLA,
    )
    kv_lora_rank: NonNegativeInt = key(
        512,
        "MLA: width of the compressed latent from which keys and values are expanded",
        low=1,
        needs=MLA,
    )
    qk_nope_head_dim: NonNegativeInt = key(
        128, "MLA: query/key dimensions per head that carry no position", needs=MLA
    )
    qk_rope_head_dim: NonNegativeInt = key(
        64,
        "MLA: query/key dimensions per head that get rotary position; the key part is shared "
        "by all heads",
        low=1,
        needs=MLA,
    )
    v_head_dim: NonNegativeInt = key(
        128,
        "MLA: size of one value head, which may differ from the query/key size",
        low=1,
        needs=MLA,
    )


class AttentionIndexer(Group):
    """The indexer that selects keys in DeepSeek sparse attention."""

    use_indexer: bool = key(
        False,
        "DeepSeek sparse attention: a small scorer picks which keys each query may attend to;"
        " needs MLA",
    )
    indexer_head_dim: NonNegativeInt = key(
        128, "Size of one scoring head of the sparse-attention indexer", low=1, needs="use_indexer"
    )
    indexer_n_heads: NonNegativeInt = key(
        64,
        "Number of scoring heads of the sparse-attention indexer; all share one key head",
        low=1,
        needs="use_indexer",
    )
    indexer_topk: NonNegativeInt = key(
        2048,
        "Keys that each query attends to with use_indexer; all keys if there are fewer",
        low=1,
        needs="use_indexer",
    )
    indexer_sparse_training: bool = key(
        False,
        "Train the indexer on its top-k keys, together with the model; false: dense warm-up, "
        "which trains the indexer only",
        needs=INDEXER_LOSS,
    )
    indexer_loss_scaling_factor: float = key(
        0.0,
        "Weight of the KL loss that teaches the indexer the main attention's distribution; 0:"
        " no loss",
        low=0,
        needs="use_indexer",
    )


class Llama4Attention(Group):
    """Query/key normalisation and the position-dependent temperature of Llama 4."""

    use_qk_norm: bool = key(
        False,
        "Normalise queries and keys before their product; per head or joint, as the model "
        "family defines",
    )
    temperature_tuning: bool = key(
        False, "Scale queries up with position on layers without RoPE, for long contexts (Llama 4)"
    )


class SplashAttention(Group):
    """Block sizes and tuning switches of the TPU flash-attention kernel."""

    sa_block_q: int = key(512, "Splash attention forward: query tokens per block", low=1)
    sa_block_kv: int = key(
        512, "Splash attention forward: key/value tokens loaded per block", low=1
    )
    sa_block_kv_compute: int = key(
        512,
        "Splash attention forward: key/value tokens per inner product; must divide sa_block_kv",
        low=1,
    )
    sa_block_q_dkv: int = key(
        512, "Splash attention backward for keys and values: query tokens per block", low=1
    )
    sa_block_kv_dkv: int = key(
        512,
        "Splash attention backward for keys and values: key/value tokens loaded per block",
        low=1,
    )
    sa_block_kv_dkv_compute: int = key(
        512,
        "Splash attention backward for keys and values: tokens per inner product; divides "
        "sa_block_kv_dkv",
        low=1,
    )
    sa_block_q_dq: int = key(
        512,
        "Splash attention backward for queries: query tokens per block; unused with the fused"
        " backward",
        low=1,
    )
    sa_block_kv_dq: int = key(
        512,
        "Splash attention backward for queries: key/value tokens per block; unused with the "
        "fused backward",
        low=1,
    )
    sa_use_fused_bwd_kernel: bool = key(
        False,
        "Compute the gradients of queries, keys and values in one Splash kernel instead of two",
    )
    sa_q_layout: str = key(
        "HEAD_DIM_MINOR",
        "Memory order of queries in Splash attention: HEAD_DIM_MINOR or SEQ_MINOR (which axis"
        " is contiguous)",
        choices=("HEAD_DIM_MINOR", "SEQ_MINOR"),
    )
    sa_k_layout: str = key(
        "HEAD_DIM_MINOR",
        "Memory order of keys in Splash attention: HEAD_DIM_MINOR or SEQ_MINOR (which axis is"
        " contiguous)",
        choices=("HEAD_DIM_MINOR", "SEQ_MINOR"),
    )
    sa_v_layout: str = key(
        "HEAD_DIM_MINOR",
        "Memory order of values in Splash attention: HEAD_DIM_MINOR or SEQ_MINOR (which axis "
        "is contiguous)",
        choices=("HEAD_DIM_MINOR", "SEQ_MINOR"),
    )
    use_max_logit_estimate: int = key(
        -1,
        "Fixed upper bound on attention scores that spares Splash the running maximum; -1: "
        "compute the maximum",
        limit=INT64_MAX,
        status=inert.KERNELS,
    )
    cost_estimate_flops_fwd: int = key(
        -1,
        "FLOPs reported to XLA for the forward Splash kernel, so it overlaps communication; "
        "-1: kernel's estimate",
        limit=INT64_MAX,
        status=inert.KERNELS,
    )
    cost_estimate_flops_bwd: int = key(
        -1,
        "FLOPs reported to XLA for the backward Splash kernel, so it overlaps communication; "
        "-1: kernel's estimate",
        limit=INT64_MAX,
        status=inert.KERNELS,
    )
    dq_reduction_steps: int = key(
        0,
        "Partial sums of the query gradient stored in the fused Splash backward: 3, or 0 for "
        "one per KV block",
        status=inert.KERNELS,
    )
    use_splash_scheduler: bool = key(
        False, "Use the Splash kernel's experimental instruction scheduler", status=inert.KERNELS
    )


class PagedAttention(Group):
    """Size and layout of the paged KV cache used for serving."""

    pagedattn_num_pages: int = key(
        64,
        "Pages (blocks) in the KV-cache pool shared by all requests; attention=paged. 0, which is "
        "the default where a model is loaded to generate: as many as its sequences can use and fit "
        "in memory",
        low=0,
        needs=PAGED_ATTENTION,
    )
    pagedattn_tokens_per_page: int = key(
        32, "Tokens stored in one KV-cache page", low=1, needs=PAGED_OR_PREFIX_CACHE
    )
    pagedattn_pages_per_compute_block: int = key(
        4,
        "KV-cache pages the paged attention kernel processes per step",
        low=1,
        status=inert.KERNELS,
    )
    pagedattn_max_pages_per_group: int = key(
        -1,
        "Maximum number of pages that one request may hold; -1: enough for max_target_length",
        needs=PAGED_OR_PREFIX_CACHE,
    )
    pagedattn_head_dim_alignment: int = key(
        128,
        "Head size is padded up to a multiple of this in the page pool, as TPU lanes require;"
        " 0: no padding",
        status=inert.ONE_CACHE_LAYOUT,
    )


class Qwen3Next(Group):
    """Sizes of the Gated DeltaNet layers in Qwen3-Next and Qwen3.5."""

    gdn_conv_kernel_dim: int = key(
        4, "Width in tokens of the causal convolution before a Gated DeltaNet layer", low=1
    )
    gdn_key_head_dim: int = key(128, "Size of one query/key head in Gated DeltaNet layers", low=1)
    gdn_value_head_dim: int = key(128, "Size of one value head in Gated DeltaNet layers", low=1)
    gdn_num_key_heads: int = key(16, "Number of query/key heads in Gated DeltaNet layers", low=1)
    gdn_num_value_heads: int = key(
        32, "Number of value heads in Gated DeltaNet layers; a multiple of gdn_num_key_heads", low=1
    )
    gdn_chunk_size: int = key(
        64,
        "Tokens processed together in the chunked Gated DeltaNet algorithm; affects speed, "
        "not results",
        low=1,
    )
    use_qk_norm_in_gdn: bool = key(
        True, "L2-normalise queries and keys inside Gated DeltaNet layers"
    )
    partial_rotary_factor: float = key(
        1.0,
        "Fraction of head dimensions that RoPE rotates (Qwen3-Next: 0.25); 1.0: all",
        low=0,
        high=1,
    )
