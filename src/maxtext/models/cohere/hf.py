"""Command-R and Command-R7B in Hugging Face folders."""

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
from maxtext.hf.layer_rules import HF_LAYER, attention_rules, mlp_rules, norm_rules, outer_rules
from maxtext.hf.rules import Rule
from maxtext.hf.schema import NULL, POSITIVE, SIZE, all_of
from maxtext.models.hf_config import LayerSpecs, dense_entries, layer_types, rope_entry

EPSILON = "layer_norm_eps"


def read_cohere(hf_config: Json) -> ModelSettings:
    settings = read_shared(hf_config, "cohere")
    settings.keys["use_qk_norm"] = bool(hf_config["use_qk_norm"])
    return settings


def read_cohere2(hf_config: Json) -> ModelSettings:
    settings = read_shared(hf_config, "cohere2")
    settings.keys["sliding_window_size"] = window_size(hf_config)
    pattern = hf_config["sliding_window_pattern"]
    settings.hf_attributes["layer_kinds"] = layer_kinds(
        hf_config, lambda i: "sliding" if (i + 1) % pattern else "full"
    )
    return settings


def read_shared(hf_config: Json, block: str) -> ModelSettings:
    rope = uniform_rope(hf_config, interleave=True)
    keys = dense_keys(hf_config, block, epsilon=EPSILON) | rope.keys
    return ModelSettings(keys, rope.hf_attributes | {"logit_scale": hf_config["logit_scale"]})


def write_cohere(config: MaxTextConfig, layers: LayerSpecs) -> Json:
    return write_shared(config, layers) | {"use_qk_norm": config.use_qk_norm}


def write_cohere2(config: MaxTextConfig, layers: LayerSpecs) -> Json:
    return write_shared(config, layers) | {
        "sliding_window": config.sliding_window_size,
        "layer_types": layer_types(layers),
    }


def write_shared(config: MaxTextConfig, layers: LayerSpecs) -> Json:
    entries = dense_entries(config, layers)
    entries[EPSILON] = entries.pop("rms_norm_eps")
    rope = next((spec.attention.rope for spec in layers if spec.attention.rope), None)
    return entries | {
        "logit_scale": config.architecture.logit_scale,
        "rope_parameters": rope_entry(rope),
    }


def cohere_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[Rule]:
    hf, native = f"{HF_LAYER}self_attn.", "layers/{i}/attention/"
    return [
        *outer_rules(),
        *norm_rules({"input_layernorm": "attention_norm"}),
        Rule(f"{hf}q_norm.weight", f"{native}query_norm/scale", "h d -> h d"),
        Rule(f"{hf}k_norm.weight", f"{native}key_norm/scale", "h d -> h d"),
        *attention_rules(config),
        *mlp_rules(),
    ]


DEFAULTS = size_defaults(
    vocab_size=256_000,
    hidden_size=8192,
    intermediate_size=22_528,
    num_hidden_layers=40,
    num_attention_heads=64,
    max_position_embeddings=8192,
    layer_norm_eps=1e-5,
    logit_scale=0.0625,
    tie_word_embeddings=True,
    attention_bias=False,
)
FIELDS = {
    **all_of(POSITIVE | NULL, "layer_norm_eps"),
    **all_of(POSITIVE, "logit_scale"),
}

COHERE = HfMapping(
    architectures=("CohereForCausalLM",),
    model_type="cohere",
    read=read_cohere,
    write=write_cohere,
    rules=cohere_rules,
    defaults=DEFAULTS | {"use_qk_norm": False, "rope_theta": 500_000.0},
    fields=FIELDS,
)
COHERE2 = HfMapping(
    architectures=("Cohere2ForCausalLM",),
    model_type="cohere2",
    read=read_cohere2,
    write=write_cohere2,
    rules=cohere_rules,
    defaults=DEFAULTS | {"sliding_window": 4096, "layer_types": None, "sliding_window_pattern": 4},
    fields=all_of(SIZE, "sliding_window_pattern"),
)
