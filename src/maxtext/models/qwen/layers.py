"""Qwen 2.5 and 3, dense and with experts; Qwen3-Next and 3.5, whose layers are mostly Gated
DeltaNets; and a variant with attention output and experts in a narrower space."""

from dataclasses import dataclass

from maxtext.configs.types import MaxTextConfig
from maxtext.layers.specs import (
    AttentionSpec,
    GatedDeltaNetSpec,
    LayerSpec,
    MixerSpec,
    MlpSpec,
    MoeSpec,
    NormSpec,
    Spec,
)
from maxtext.models.common import (
    attention_spec,
    feed_spec,
    layer_kinds,
    layer_spec,
    moe_layers,
    moe_spec,
    norm_spec,
    router_spec,
)
from maxtext.models.flops import feed_flops, layer_flops, mixer_flops


def qwen2(config: MaxTextConfig) -> list[LayerSpec]:
    """Llama with biases on queries, keys and values alone; a checkpoint may list sliding layers."""
    return [
        layer_spec(config, attention=attention_spec(config, kind, out_bias=False))
        for kind in listed_kinds(config)
    ]


def qwen3(config: MaxTextConfig) -> list[LayerSpec]:
    return [
        layer_spec(config, attention=attention_spec(config, kind)) for kind in listed_kinds(config)
    ]


def listed_kinds(config: MaxTextConfig) -> list[str | None]:
    return [*layer_kinds(config, config.num_decoder_layers, lambda _: "")]


def qwen3_moe(config: MaxTextConfig) -> list[LayerSpec]:
    experts = moe_spec(config, router_spec(config))
    has_experts = moe_layers(config, config.num_decoder_layers, lambda _: True)
    return [
        layer_spec(
            config, attention=attention_spec(config, kind), **({"mlp": experts} if sparse else {})
        )
        for kind, sparse in zip(listed_kinds(config), has_experts, strict=True)
    ]


def qwen3_next(config: MaxTextConfig) -> list[LayerSpec]:
    """Every fourth layer attends, with a gate on its output; the others are Gated DeltaNets."""
    norm = norm_spec(config, offset=True)
    count = config.num_decoder_layers
    kinds = layer_kinds(config, count, lambda layer: "linear" if (layer + 1) % 4 else "full")
    has_experts = moe_layers(config, count, lambda _: True)
    experts = moe_spec(config, router_spec(config), shared_gate=config.shared_experts > 0)

    def layer(kind: str, sparse: bool) -> LayerSpec:
        mixer: MixerSpec = delta_net_spec(config)
        if kind != "linear":
            mixer = attention_spec(config, kind, qk_norm=norm, gated=True)
        return layer_spec(
            config, attention=mixer, norm=norm, **({"mlp": experts} if sparse else {})
        )

    return [layer(kind, sparse) for kind, sparse in zip(kinds, has_experts, strict=True)]


qwen3_5 = qwen3_next  # for text; they differ in how images are placed and in the names of weights


def delta_net_spec(config: MaxTextConfig) -> GatedDeltaNetSpec:
    return GatedDeltaNetSpec(
        key_heads=config.gdn_num_key_heads,
        value_heads=config.gdn_num_value_heads,
        key_dim=config.gdn_key_head_dim,
        value_dim=config.gdn_value_head_dim,
        conv_width=config.gdn_conv_kernel_dim,
        chunk=config.gdn_chunk_size,
        norm_epsilon=config.normalization_layer_epsilon,
        qk_norm=config.use_qk_norm_in_gdn,
    )


def qwen3_custom_moe(config: MaxTextConfig) -> list["NarrowSpec"]:
    """Attention projects to attention_output_dim; experts work in that space, and a projection
    restores emb_dim.
    """
    output_dim, mlp_dim = (
        dim if dim > 0 else config.emb_dim
        for dim in (config.attention_output_dim, config.moe_expert_input_dim)
    )
    spec = NarrowSpec(
        embed_dim=config.emb_dim,
        mlp_dim=mlp_dim,
        attention=attention_spec(config, output_dim=output_dim),
        mlp=feed_spec(config, router_spec(config)),
        norm=norm_spec(config),
    )
    return [spec] * config.num_decoder_layers


@dataclass(frozen=True)
class NarrowSpec(Spec):
    """x + widened(experts(norm(attention(norm(x)))))."""

    module = "maxtext.models.qwen.narrow_block"

    embed_dim: int
    mlp_dim: int
    attention: AttentionSpec
    mlp: MoeSpec | MlpSpec
    norm: NormSpec


@layer_flops.register
def _(spec: NarrowSpec, length: int) -> float:
    widening = 2 * spec.mlp_dim * spec.embed_dim if spec.mlp_dim != spec.embed_dim else 0.0
    mixer = mixer_flops(spec.attention, spec.embed_dim, length)
    return mixer + feed_flops(spec.mlp, spec.mlp_dim) + widening
