"""Llama 2, 3, 3.1, 3.3 and 4, and the generic block: pre-norm attention and a gated MLP."""

from maxtext.configs.types import MaxTextConfig
from maxtext.layers.specs import LayerSpec, Temperature
from maxtext.models.common import (
    attention_spec,
    layer_kinds,
    layer_spec,
    moe_layers,
    moe_spec,
    norm_spec,
    rope_layers,
    rope_spec,
    router_spec,
    uniform,
)


def llama(config: MaxTextConfig) -> list[LayerSpec]:
    return uniform(config, layer_spec(config))


def default(config: MaxTextConfig) -> list[LayerSpec]:
    """Attention and MLP in parallel, on the same normed input."""
    return uniform(config, layer_spec(config, parallel=True))


def llama4(config: MaxTextConfig) -> list[LayerSpec]:
    """Chunked layers with interleaved RoPE; every nope_layer_interval-th layer is global, without
    RoPE, and scales its queries by a temperature that grows with the position. Every
    interleave_moe_layer_step-th has experts, whose inputs are weighted by a sigmoid."""
    count, step = config.num_decoder_layers, config.interleave_moe_layer_step
    hf_attributes = config.architecture
    has_rope = rope_layers(config, count)
    kinds = layer_kinds(config, count, lambda layer: "chunk" if has_rope[layer] else "full")
    experts = moe_layers(config, count, lambda layer: (layer + 1) % step == 0)
    temperature = (
        Temperature(hf_attributes.temperature_scale, hf_attributes.temperature_length)
        if config.temperature_tuning
        else None
    )
    norm = norm_spec(config, scaled=False) if config.use_qk_norm else None
    rope = rope_spec(config, interleave=True)
    sparse = moe_spec(
        config, router_spec(config, score="sigmoid"), apply_router_weight_on_input=True
    )

    def layer(index: int) -> LayerSpec:
        if has_rope[index]:
            attention = attention_spec(
                config, kinds[index], rope=rope, qk_norm=norm, qk_norm_over="rotated"
            )
        else:
            attention = attention_spec(
                config, kinds[index], rope=None, qk_norm=None, temperature=temperature
            )
        return layer_spec(
            config, attention=attention, **({"mlp": sparse} if experts[index] else {})
        )

    return [layer(index) for index in range(count)]
