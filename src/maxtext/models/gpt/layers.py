"""GPT-3 and GPT-2: learned positions, LayerNorm with bias, biases everywhere, one gelu branch."""

from maxtext.configs.types import MaxTextConfig
from maxtext.layers.specs import LayerSpec
from maxtext.models.common import attention_spec, layer_spec, mlp_spec, norm_spec, uniform


def gpt3(config: MaxTextConfig) -> list[LayerSpec]:
    spec = layer_spec(
        config,
        attention=attention_spec(config, bias=True, out_bias=True),
        mlp=mlp_spec(config, bias=True),
        norm=norm_spec(config, kind="layer"),
    )
    return uniform(config, spec)
