"""Mistral and Mixtral in Hugging Face folders."""

from maxtext.configs.types import MaxTextConfig
from maxtext.hf.config_json import (
    HfMapping,
    Json,
    ModelSettings,
    dense_keys,
    size_defaults,
    uniform_rope,
    window_size,
)
from maxtext.hf.layer_rules import HF_LAYER, dense_rules, expert_rules
from maxtext.hf.rules import Rule
from maxtext.models.hf_config import LayerSpecs, dense_entries, first_rope_entry


def read_mistral(hf_config: Json) -> ModelSettings:
    rope = uniform_rope(hf_config)
    keys = dense_keys(hf_config, "mistral")
    keys |= {"sliding_window_size": window_size(hf_config)}
    return ModelSettings(keys | rope.keys, rope.hf_attributes)


def write_mistral(config: MaxTextConfig, layers: LayerSpecs) -> Json:
    return dense_entries(config, layers) | {
        "mlp_bias": config.mlp_bias,
        "rope_parameters": first_rope_entry(layers),
        "sliding_window": config.sliding_window_size or None,
    }


def mistral_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[Rule]:
    return dense_rules(config)


def read_mixtral(hf_config: Json) -> ModelSettings:
    rope = uniform_rope(hf_config)
    keys = dense_keys(hf_config, "mixtral")
    keys |= {
        "base_moe_mlp_dim": hf_config["intermediate_size"],
        "num_experts": hf_config["num_local_experts"],
        "num_experts_per_tok": hf_config["num_experts_per_tok"],
        "sliding_window_size": window_size(hf_config),
    }
    return ModelSettings(keys | rope.keys, rope.hf_attributes)


def write_mixtral(config: MaxTextConfig, layers: LayerSpecs) -> Json:
    return write_mistral(config, layers) | {
        "intermediate_size": config.moe_mlp_dim,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
    }


def mixtral_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[Rule]:
    moe = f"{HF_LAYER}block_sparse_moe."
    router = Rule(f"{moe}gate.weight", "layers/{i}/mlp/router/weight", "x e -> e x")
    return [*dense_rules(config), router, *expert_rules(f"{moe}experts.", ("w1", "w3", "w2"))]


MISTRAL = HfMapping(
    architectures=("MistralForCausalLM",),
    model_type="mistral",
    read=read_mistral,
    write=write_mistral,
    rules=mistral_rules,
    defaults=size_defaults(
        vocab_size=32_000,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        max_position_embeddings=131_072,
        num_key_value_heads=8,
        sliding_window=4096,
    ),
)
MIXTRAL = HfMapping(
    architectures=("MixtralForCausalLM",),
    model_type="mixtral",
    read=read_mixtral,
    write=write_mixtral,
    rules=mixtral_rules,
    defaults=size_defaults(
        vocab_size=32_000,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        max_position_embeddings=131_072,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        rope_theta=1_000_000.0,
        sliding_window=None,
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    aliases={"num_experts": "num_local_experts"},
    module_renaming=(".block_sparse_moe.", ".mlp."),
)
