"""Phi-3 and Phi-4: Llama's layers with a sliding window in checkpoints that have one, and LongRoPE
where the context was extended.
"""

from maxtext.configs.types import MaxTextConfig
from maxtext.layers.specs import LayerSpec
from maxtext.models.common import attention_spec, layer_spec, uniform


def phi3(config: MaxTextConfig) -> list[LayerSpec]:
    kind = "sliding" if config.sliding_window_size else None
    return uniform(config, layer_spec(config, attention=attention_spec(config, kind)))
