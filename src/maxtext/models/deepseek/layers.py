"""DeepSeek 2, 3 and 3.2, and Kimi K2: latent attention, a few dense layers, then experts with one
that all share.
"""

import math
from dataclasses import replace

from maxtext.configs.types import MaxTextConfig
from maxtext.layers.specs import IndexerSpec, LayerSpec, MlaSpec
from maxtext.models.common import (
    attention_mask,
    attention_spec,
    backend,
    block_sizes,
    layer_spec,
    moe_layers,
    moe_spec,
    norm_spec,
    rope_spec,
    router_spec,
)

LATENT_EPSILON = 1e-6  # of the norms inside attention, whatever the other norms have


def deepseek(config: MaxTextConfig) -> list[LayerSpec]:
    count = config.num_decoder_layers
    experts = moe_layers(config, count, lambda layer: layer >= config.first_num_dense_layers)
    attention = mla_spec(config) if config.attention_type == "mla" else attention_spec(config)
    sigmoid = config.routed_score_func == "sigmoid"
    router = router_spec(
        config,
        score=config.routed_score_func or "softmax",
        bias="selection" if config.routed_bias else "none",
        normalise=sigmoid or config.norm_topk_prob,
        group_score="top2" if sigmoid else "max",
        float32=True,
    )
    sparse = layer_spec(config, attention=attention, mlp=moe_spec(config, router))
    dense = layer_spec(config, attention=attention)
    return [sparse if has_experts else dense for has_experts in experts]


def mla_spec(config: MaxTextConfig) -> MlaSpec:
    return MlaSpec(
        heads=config.num_query_heads,
        query_rank=config.q_lora_rank,
        kv_rank=config.kv_lora_rank,
        nope_dim=config.qk_nope_head_dim,
        rope_dim=config.qk_rope_head_dim,
        value_dim=config.v_head_dim,
        scale=softmax_scale(config),
        rope=rope_spec(config),
        norm=norm_spec(config, epsilon=LATENT_EPSILON),
        bias=config.attention_bias,
        mask=attention_mask(config),
        soft_cap=config.attn_logits_soft_cap or None,
        backend=backend(config),
        float32_logits=config.float32_logits,
        float32_product=config.float32_qk_product,
        blocks=block_sizes(config),
        latent=not config.mla_naive_kvcache,
        indexer=indexer_spec(config) if config.use_indexer else None,
        report_max_logits=config.use_qk_clip,
    )


def softmax_scale(config: MaxTextConfig) -> float:
    """1 / √(head size), times the square of YaRN's temperature where the context was extended."""
    if config.architecture.softmax_scale:
        return config.architecture.softmax_scale
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    if config.rope_type.value == "yarn" and config.rope_factor > 1:
        scale *= (0.1 * config.mscale * math.log(config.rope_factor) + 1) ** 2
    return scale


def indexer_spec(config: MaxTextConfig) -> IndexerSpec:
    return IndexerSpec(
        heads=config.indexer_n_heads,
        head_dim=config.indexer_head_dim,
        rope_dim=config.qk_rope_head_dim,
        rope=replace(rope_spec(config), interleave=False),
        topk=config.indexer_topk,
        sparse_training=config.indexer_sparse_training,
        loss_factor=config.indexer_loss_scaling_factor,
    )
