"""ERNIE 4.5, the dense models: Llama's layers with interleaved RoPE."""

from maxtext.configs.types import MaxTextConfig
from maxtext.layers.specs import LayerSpec
from maxtext.models.common import attention_spec, layer_spec, rope_spec, uniform


def ernie4_5(config: MaxTextConfig) -> list[LayerSpec]:
    attention = attention_spec(config, rope=rope_spec(config, interleave=True))
    return uniform(config, layer_spec(config, attention=attention))
