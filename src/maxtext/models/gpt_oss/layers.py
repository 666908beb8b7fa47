"""gpt-oss: alternating sliding and global layers, a sink in every head, biases, and experts with a
clipped activation.
"""

from maxtext.configs.types import MaxTextConfig
from maxtext.layers.specs import LayerSpec
from maxtext.models.common import attention_spec, feed_spec, layer_kinds, layer_spec, router_spec


def gpt_oss(config: MaxTextConfig) -> list[LayerSpec]:
    kinds = layer_kinds(
        config, config.num_decoder_layers, lambda layer: "full" if layer % 2 else "sliding"
    )
    bias = "logits" if config.routed_bias else "none"
    feed = feed_spec(
        config, router_spec(config, score="softmax_of_topk", bias=bias), bias=config.mlp_bias
    )
    return [layer_spec(config, attention=attention_spec(config, kind), mlp=feed) for kind in kinds]
