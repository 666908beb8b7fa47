"""Seed-OSS: Llama's layers; of the projections of attention that of the output has no bias."""

from maxtext.configs.types import MaxTextConfig
from maxtext.layers.specs import LayerSpec
from maxtext.models.common import attention_spec, layer_spec, uniform


def seed_oss(config: MaxTextConfig) -> list[LayerSpec]:
    return uniform(config, layer_spec(config, attention=attention_spec(config, out_bias=False)))
