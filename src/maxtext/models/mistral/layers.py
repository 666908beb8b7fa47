"""Mistral, and Mixtral with experts whose weights are the softmax over the chosen ones."""

from maxtext.configs.types import MaxTextConfig
from maxtext.layers.specs import AttentionSpec, LayerSpec
from maxtext.models.common import attention_spec, feed_spec, layer_spec, router_spec, uniform


def mistral(config: MaxTextConfig) -> list[LayerSpec]:
    return uniform(config, layer_spec(config, attention=mistral_attention(config)))


def mixtral(config: MaxTextConfig) -> list[LayerSpec]:
    mlp = feed_spec(config, router_spec(config, normalise=True))
    return uniform(config, layer_spec(config, attention=mistral_attention(config), mlp=mlp))


def mistral_attention(config: MaxTextConfig) -> AttentionSpec:
    """Llama's, with a sliding window in every layer of checkpoints that have one (the first release
    has, later ones do not).
    """
    return attention_spec(config, "sliding" if config.sliding_window_size else None)
