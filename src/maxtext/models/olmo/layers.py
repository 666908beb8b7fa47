"""OLMo: norms on the outputs of the sub-layers, and jointly over all heads of queries and of keys.
The layers of OLMo 2 are global; OLMo 3 has three sliding layers to one global."""

from maxtext.configs.types import MaxTextConfig
from maxtext.layers.specs import AttentionSpec, LayerSpec
from maxtext.models.common import attention_spec, layer_kinds, layer_spec, rope_spec


def olmo2(config: MaxTextConfig) -> list[LayerSpec]:
    attention = attention_spec(config, "full", rope=rope_spec(config), qk_norm_over="heads")
    return [output_normed(config, attention)] * config.num_decoder_layers


def olmo3(config: MaxTextConfig) -> list[LayerSpec]:
    kinds = layer_kinds(
        config, config.num_decoder_layers, lambda layer: "sliding" if (layer + 1) % 4 else "full"
    )
    # The context was extended on the global layers alone: sliding ones keep the plain angles.
    plain = rope_spec(config, "sliding", kind="default", attention_scaling=False)

    def layer(kind: str) -> LayerSpec:
        rope = plain if kind == "sliding" else rope_spec(config)
        return output_normed(config, attention_spec(config, kind, rope=rope, qk_norm_over="heads"))

    return [layer(kind) for kind in kinds]


def output_normed(config: MaxTextConfig, attention: AttentionSpec) -> LayerSpec:
    return layer_spec(
        config,
        attention=attention,
        attention_norm=False,
        mlp_norm=False,
        post_attention_norm=True,
        post_mlp_norm=True,
    )
