"""SmolLM3: Llama's layers, of which every nope_layer_interval-th has no RoPE; a checkpoint may list
such layers, and sliding ones.
"""

from maxtext.configs.types import MaxTextConfig
from maxtext.layers.specs import LayerSpec
from maxtext.models.common import attention_spec, layer_kinds, layer_spec, rope_layers


def smollm3(config: MaxTextConfig) -> list[LayerSpec]:
    count = config.num_decoder_layers

    def layer(kind: str, has_rope: bool) -> LayerSpec:
        return layer_spec(
            config, attention=attention_spec(config, kind, **({} if has_rope else {"rope": None}))
        )

    kinds = layer_kinds(config, count, lambda _: "full")
    return [layer(*pair) for pair in zip(kinds, rope_layers(config, count), strict=True)]
