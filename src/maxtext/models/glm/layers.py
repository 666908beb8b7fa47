"""GLM-4.5 and 4.6: heads that rotate in part, with norms on queries and keys in the larger models;
a few dense layers, then experts chosen as DeepSeek 3 does, with one that all tokens share.
"""

from maxtext.configs.types import MaxTextConfig
from maxtext.layers.specs import LayerSpec
from maxtext.models.common import attention_spec, layer_spec, moe_layers, moe_spec, router_spec


def glm4_moe(config: MaxTextConfig) -> list[LayerSpec]:
    router = router_spec(
        config,
        score="sigmoid",
        bias="selection" if config.routed_bias else "none",
        group_score="top2",
        float32=True,
    )
    dense = layer_spec(config, attention=attention_spec(config, out_bias=False))
    sparse = layer_spec(config, attention=dense.attention, mlp=moe_spec(config, router))
    has_experts = moe_layers(
        config, config.num_decoder_layers, lambda layer: layer >= config.first_num_dense_layers
    )
    return [sparse if experts else dense for experts in has_experts]
