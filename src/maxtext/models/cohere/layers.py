"""Command-R and Command-R7B: attention and MLP in parallel after a LayerNorm without bias, with
interleaved RoPE.
"""

from maxtext.configs.types import MaxTextConfig
from maxtext.layers.specs import LayerSpec, NormSpec
from maxtext.models.common import (
    attention_spec,
    layer_kinds,
    layer_spec,
    norm_spec,
    rope_spec,
    uniform,
)


def cohere(config: MaxTextConfig) -> list[LayerSpec]:
    """Command-R; Command-R+ norms queries and keys, with a scale for each head."""
    norm = bias_free_norm(config)
    attention = attention_spec(
        config,
        rope=rope_spec(config, interleave=True),
        qk_norm=norm if config.use_qk_norm else None,
        qk_norm_over="scaled_head",
    )
    return uniform(config, layer_spec(config, attention=attention, norm=norm, parallel=True))


def cohere2(config: MaxTextConfig) -> list[LayerSpec]:
    """Command-R7B: three sliding layers with RoPE to one global layer without."""
    kinds = layer_kinds(
        config, config.num_decoder_layers, lambda layer: "sliding" if (layer + 1) % 4 else "full"
    )
    norm, rope = bias_free_norm(config), rope_spec(config, interleave=True)

    def layer(kind: str) -> LayerSpec:
        attention = attention_spec(config, kind, rope=rope if kind == "sliding" else None)
        return layer_spec(config, attention=attention, norm=norm, parallel=True)

    return [layer(kind) for kind in kinds]


def bias_free_norm(config: MaxTextConfig) -> NormSpec:
    return norm_spec(config, kind="layer", bias=False)
