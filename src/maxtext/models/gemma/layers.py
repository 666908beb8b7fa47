"""Gemma 1 to 4: scaled embeddings, norms around the sub-layers, alternating sliding and global
layers; Gemma 4 with other heads on its global layers and experts in parallel with the MLP.
"""

from dataclasses import dataclass

from maxtext.common.types import Json
from maxtext.configs.types import MaxTextConfig
from maxtext.layers.specs import AttentionSpec, LayerSpec, MlpSpec, MoeSpec, NormSpec, Spec
from maxtext.models.common import (
    attention_spec,
    layer_kinds,
    layer_spec,
    mlp_spec,
    moe_spec,
    norm_spec,
    rope_spec,
    router_spec,
    uniform,
)
from maxtext.models.flops import feed_flops


def gemma(config: MaxTextConfig) -> list[LayerSpec]:
    return uniform(config, layer_spec(config, norm=norm_spec(config, offset=True)))


def gemma2(config: MaxTextConfig) -> list[LayerSpec]:
    """Sliding and global layers alternate; base_num_decoder_layers counts such pairs, unless a
    checkpoint lists its layers."""
    listed = config.architecture.layer_kinds
    count = config.num_decoder_layers if listed else 2 * config.num_decoder_layers
    kinds = layer_kinds(config, count, lambda layer: "full" if layer % 2 else "sliding")
    norm = norm_spec(config, offset=True)
    return [layer_spec(config, attention=attention_spec(config, kind), norm=norm) for kind in kinds]


def five_to_one(config: MaxTextConfig) -> list[str]:
    return layer_kinds(
        config, config.num_decoder_layers, lambda layer: "sliding" if (layer + 1) % 6 else "full"
    )


def gemma3(config: MaxTextConfig) -> list[LayerSpec]:
    """Five sliding layers to a global one, whose positions are stretched; norms on queries and
    keys.
    """
    norm = norm_spec(config, offset=True)
    near = {"max_timescale": local_timescale(config), "linear_factor": 1.0}
    ropes = {"sliding": rope_spec(config, "sliding", **near), "full": rope_spec(config)}

    def layer(kind: str) -> LayerSpec:
        return layer_spec(
            config,
            attention=attention_spec(config, kind, rope=ropes[kind], qk_norm=norm),
            norm=norm,
        )

    return [layer(kind) for kind in five_to_one(config)]


def local_timescale(config: MaxTextConfig) -> int:
    return (
        config.local_rope_max_timescale
        if config.local_rope_max_timescale > 0
        else config.rope_max_timescale
    )


def gemma4(config: MaxTextConfig) -> list[LayerSpec]:
    """Global layers have their own size and number of heads, may share keys and values, and rotate
    a part of each head.
    """
    norm = norm_spec(config)
    if config.num_experts > 1:
        router = router_spec(
            config, normalise=True, input_norm_epsilon=norm.epsilon, expert_scale=True
        )
        feed: Json = {
            "mlp": GemmaFeed(mlp_spec(config), moe_spec(config, router, shared=None), norm),
            "mlp_norm": False,
        }
    else:
        feed = {}

    def layer(kind: str) -> LayerSpec:
        return layer_spec(
            config, attention=gemma4_attention(config, kind, norm), scaled=True, **feed
        )

    return [layer(kind) for kind in five_to_one(config)]


def gemma4_attention(config: MaxTextConfig, kind: str, norm: NormSpec) -> AttentionSpec:
    values = norm_spec(config, scaled=config.v_norm_with_scale)
    shared = {
        "scale": config.architecture.softmax_scale or 1.0,
        "qk_norm": norm,
        "value_norm": values,
    }
    if kind == "sliding":
        near = {"max_timescale": local_timescale(config), "fraction": config.local_rope_proportion}
        return attention_spec(
            config, kind, rope=rope_spec(config, kind, **near, proportional=True), **shared
        )
    theta = config.global_rope_max_timescale
    far = {"fraction": config.global_rope_proportion, "proportional": True}
    far |= {"max_timescale": theta} if theta > 0 else {}
    return attention_spec(
        config,
        kind,
        rope=rope_spec(config, kind, **far),
        head_dim=config.global_head_dim or config.head_dim,
        kv_heads=config.global_num_kv_heads or config.num_kv_heads,
        shared_kv=config.share_kv_projections,
        **shared,
    )


@dataclass(frozen=True)
class GemmaFeed(Spec):
    """An MLP and experts in parallel, each between its own norms; the router reads the residual."""

    module = "maxtext.models.gemma.feed_forward"

    mlp: MlpSpec
    experts: MoeSpec
    norm: NormSpec


@feed_flops.register
def _(spec: GemmaFeed, embed_dim: int) -> float:
    return feed_flops(spec.mlp, embed_dim) + feed_flops(spec.experts, embed_dim)
