"""EXAONE 4: norms on the outputs of the sub-layers, and on queries and keys. In models with a
window, three sliding layers with RoPE to one global layer without.
"""

from maxtext.configs.types import MaxTextConfig
from maxtext.layers.specs import LayerSpec
from maxtext.models.common import attention_spec, layer_kinds, layer_spec


def exaone4(config: MaxTextConfig) -> list[LayerSpec]:
    has_window = config.sliding_window_size > 0
    kinds = layer_kinds(
        config,
        config.num_decoder_layers,
        lambda layer: "sliding" if has_window and (layer + 1) % 4 else "full",
    )

    def layer(kind: str) -> LayerSpec:
        rope = {"rope": None} if has_window and kind == "full" else {}
        return layer_spec(
            config,
            attention=attention_spec(config, kind, **rope),
            attention_norm=False,
            mlp_norm=False,
            post_attention_norm=True,
            post_mlp_norm=True,
        )

    return [layer(kind) for kind in kinds]
