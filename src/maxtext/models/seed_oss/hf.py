"""Seed-OSS in Hugging Face folders."""

from maxtext.configs.types import MaxTextConfig
from maxtext.hf.config_json import (
    MLP_BIAS,
    Field,
    HfMapping,
    LayerSpecs,
    bool_field,
    dense_fields,
    dense_keys,
)
from maxtext.hf.layer_rules import dense_rules
from maxtext.hf.rules import TensorRule
from maxtext.models.hf_config import uniform_rope


def seed_oss_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[TensorRule]:
    return dense_rules(config)


SEED_OSS = HfMapping(
    architectures=("SeedOssForCausalLM",),
    model_type="seed_oss",
    keys=dense_keys("seed_oss"),
    fields=(
        *dense_fields(
            vocab_size=155_136,
            hidden_size=4096,
            intermediate_size=27_648,
            num_hidden_layers=64,
            num_attention_heads=80,
            max_position_embeddings=524_288,
            num_key_value_heads=8,
            head_dim=128,
        ),
        bool_field("attention_bias", "attention_bias", True),
        Field("attention_out_bias", supported=(False,)),
        MLP_BIAS,
        uniform_rope(),
    ),
    rules=seed_oss_rules,
)
