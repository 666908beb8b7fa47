"""gpt-oss in Hugging Face folders."""

from maxtext.configs.types import MaxTextConfig
from maxtext.hf.config_json import (
    HfMapping,
    Json,
    ModelSettings,
    dense_keys,
    layer_kinds,
    size_defaults,
    uniform_rope,
    window_size,
)
from maxtext.hf.layer_rules import (
    HF_LAYER,
    PRE_NORMS,
    attention_rules,
    norm_rules,
    outer_rules,
    stacked_expert_rules,
)
from maxtext.hf.rules import Rule
from maxtext.hf.schema import NULL, POSITIVE, all_of
from maxtext.models.hf_config import LayerSpecs, dense_entries, first_rope_entry, layer_types

DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_gpt_oss(hf_config: Json) -> ModelSettings:
    if hf_config["rope_parameters"] is None:
        hf_config = hf_config | {"rope_parameters": DEFAULT_ROPE}
    rope = uniform_rope(hf_config)
    keys = dense_keys(hf_config, "gpt_oss")
    keys |= {
        "mlp_activations": ["sigmoid", "linear"],
        "mlp_activations_limit": hf_config["swiglu_limit"],
        "base_moe_mlp_dim": hf_config["intermediate_size"],
        "num_experts": hf_config["num_local_experts"],
        "num_experts_per_tok": hf_config["num_experts_per_tok"],
        "routed_bias": True,
        "mlp_bias": True,
        "attention_sink": True,
        "sliding_window_size": window_size(hf_config),
    }
    return ModelSettings(
        keys | rope.keys,
        {"layer_kinds": layer_kinds(hf_config, lambda i: "full" if i % 2 else "sliding")}
        | rope.hf_attributes,
    )


def write_gpt_oss(config: MaxTextConfig, layers: LayerSpecs) -> Json:
    return dense_entries(config, layers, hidden_act="silu") | {
        "intermediate_size": config.moe_mlp_dim,
        "swiglu_limit": config.mlp_activations_limit,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "sliding_window": config.sliding_window_size,
        "layer_types": layer_types(layers),
        "rope_parameters": first_rope_entry(layers),
    }


def gpt_oss_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[Rule]:
    mlp, native = f"{HF_LAYER}mlp.", "layers/{i}/mlp/"
    return [
        *outer_rules(),
        *norm_rules(PRE_NORMS),
        *attention_rules(config),
        Rule(f"{mlp}router.weight", f"{native}router/weight", "x e -> e x"),
        Rule(f"{mlp}router.bias", f"{native}router/bias", "x -> x"),
        # Gate and up are interleaved.
        *stacked_expert_rules(f"{mlp}experts.", native, "x e (m b) -> b x e m", "x m e -> x m e"),
        Rule(
            f"{mlp}experts.gate_up_proj_bias", f"{native}experts/wi_{{b}}/bias", "x (m b) -> b x m"
        ),
        Rule(f"{mlp}experts.down_proj_bias", f"{native}experts/wo/bias", "x e -> x e"),
    ]


GPT_OSS = HfMapping(
    architectures=("GptOssForCausalLM",),
    model_type="gpt_oss",
    read=read_gpt_oss,
    write=write_gpt_oss,
    rules=gpt_oss_rules,
    defaults=size_defaults(
        vocab_size=201_088,
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=36,
        num_attention_heads=64,
        max_position_embeddings=131_072,
        num_key_value_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        attention_bias=True,
        rope_theta=150_000.0,
        sliding_window=128,
        num_local_experts=128,
        num_experts_per_tok=4,
        swiglu_limit=7.0,
        layer_types=None,
    ),
    supported={"swiglu_alpha": (1.702,)},
    aliases={"num_experts": "num_local_experts"},
    fields=all_of(POSITIVE | NULL, "swiglu_limit"),
)
