"""Llama 2, 3, 3.1, 3.3 and 4, Mistral, and the generic block: pre-norm attention and a gated
MLP.
"""

from maxtext.configs.types import MaxTextConfig
from maxtext.layers.attention import Temperature
from maxtext.layers.block import LayerSpec
from maxtext.models.common import (
    attention_spec,
    layer_kinds,
    layer_spec,
    moe_layers,
    moe_spec,
    norm_spec,
    per_layer,
    rope_spec,
    router_spec,
    uniform,
)


def llama(config: MaxTextConfig) -> list[LayerSpec]:
    return uniform(config, layer_spec(config))


def mistral(config: MaxTextConfig) -> list[LayerSpec]:
    """Llama with every layer sliding where the checkpoint has a window (the first release had,
    later ones do not).
    """
    kind = "sliding" if config.sliding_window_size else None
    return uniform(config, layer_spec(config, attention=attention_spec(config, kind)))


def default(config: MaxTextConfig) -> list[LayerSpec]:
    """Attention and MLP side by side, both reading the same normed input."""
    return uniform(config, layer_spec(config, parallel=True))


def llama4(config: MaxTextConfig) -> list[LayerSpec]:
    """Chunked layers that turn neighbouring pairs; every nope_layer_interval-th layer is global and
    has no positions, but queries that grow with them. Every interleave_moe_layer_step-th has
    experts; a sigmoid weighs what they read."""
    count, interval, step = (
        config.num_decoder_layers,
        config.nope_layer_interval,
        config.interleave_moe_layer_step,
    )
    turns = per_layer("rope_layers", config.architecture.rope_layers, count) or [
        interval <= 0 or (layer + 1) % interval != 0 for layer in range(count)
    ]
    kinds = layer_kinds(config, count, lambda layer: "chunk" if turns[layer] else "full")
    experts = moe_layers(config, count, lambda layer: (layer + 1) % step == 0)
    facts = config.architecture
    temperature = (
        Temperature(facts.temperature_scale, facts.temperature_length)
        if config.temperature_tuning
        else None
    )
    norm = norm_spec(config, scaled=False) if config.use_qk_norm else None
    sparse = moe_spec(config, router_spec(config, score="sigmoid"), weigh_input=True)

    def layer(index: int) -> LayerSpec:
        turned = {
            "rope": rope_spec(config, interleave=True),
            "qk_norm": norm,
            "qk_norm_over": "rotated",
        }
        still = {"rope": None, "qk_norm": None, "temperature": temperature}
        attention = attention_spec(config, kinds[index], **(turned if turns[index] else still))
        return layer_spec(
            config, attention=attention, **({"mlp": sparse} if experts[index] else {})
        )

    return [layer(index) for index in range(count)]
