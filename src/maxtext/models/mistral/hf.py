"""Mistral and Mixtral in Hugging Face folders."""

from maxtext.configs.types import MaxTextConfig
from maxtext.hf.config_json import (
    EXPERT_DIMS,
    Field,
    HfMapping,
    LayerSpecs,
    dense_fields,
    dense_keys,
    or_null,
    window_field,
)
from maxtext.hf.layer_rules import HF_LAYER, dense_rules, expert_rules
from maxtext.hf.rules import TensorRule
from maxtext.models.hf_config import uniform_rope


def mistral_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[TensorRule]:
    return dense_rules(config)


def mixtral_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[TensorRule]:
    moe = f"{HF_LAYER}block_sparse_moe."
    router = TensorRule(f"{moe}gate.weight", "layers/{i}/mlp/router/weight", "x e -> e x")
    return [*dense_rules(config), router, *expert_rules(f"{moe}experts.", ("w1", "w3", "w2"))]


MISTRAL = HfMapping(
    architectures=("MistralForCausalLM",),
    model_type="mistral",
    keys=dense_keys("mistral"),
    fields=(
        *dense_fields(
            vocab_size=32_000,
            hidden_size=4096,
            intermediate_size=14_336,
            num_hidden_layers=32,
            num_attention_heads=32,
            max_position_embeddings=131_072,
            num_key_value_heads=8,
        ),
        window_field(4096, to_hf=or_null),
        uniform_rope(),
    ),
    rules=mistral_rules,
)
MIXTRAL = HfMapping(
    architectures=("MixtralForCausalLM",),
    model_type="mixtral",
    keys=dense_keys("mixtral"),
    fields=(
        *dense_fields(
            vocab_size=32_000,
            hidden_size=4096,
            intermediate_size=14_336,
            num_hidden_layers=32,
            num_attention_heads=32,
            max_position_embeddings=131_072,
            num_key_value_heads=8,
            rms_norm_eps=1e-5,
            mlp_dims=EXPERT_DIMS,
        ),
        window_field(None, to_hf=or_null),
        uniform_rope(rope_theta=1_000_000.0),
        Field("num_local_experts", "num_experts", 8, aliases=("num_experts",)),
        Field("num_experts_per_tok", "num_experts_per_tok", 2),
    ),
    rules=mixtral_rules,
    module_renaming=(".block_sparse_moe.", ".mlp."),
)
