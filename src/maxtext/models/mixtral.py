"""Mixtral: Mistral's attention, and experts whose weights are the softmax over those chosen."""

from maxtext.configs.types import MaxTextConfig
from maxtext.layers.block import LayerSpec
from maxtext.models.common import attention_spec, feed_spec, layer_spec, router_spec, uniform


def mixtral(config: MaxTextConfig) -> list[LayerSpec]:
    kind = "sliding" if config.sliding_window_size else None
    feed = feed_spec(config, router_spec(config, normalise=True))
    return uniform(config, layer_spec(config, attention=attention_spec(config, kind), mlp=feed))
