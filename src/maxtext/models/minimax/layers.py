"""MiniMax M2: norms jointly over all heads of queries and of keys, heads that rotate in part, and
experts in every layer, chosen by sigmoids and a bias.
"""

from maxtext.configs.types import MaxTextConfig
from maxtext.layers.specs import LayerSpec
from maxtext.models.common import attention_spec, feed_spec, layer_spec, router_spec, uniform


def minimax_m2(config: MaxTextConfig) -> list[LayerSpec]:
    bias = "selection" if config.routed_bias else "none"
    router = router_spec(config, score="sigmoid", bias=bias, normalise=True)
    attention = attention_spec(config, qk_norm_over="heads")
    return uniform(config, layer_spec(config, attention=attention, mlp=feed_spec(config, router)))
