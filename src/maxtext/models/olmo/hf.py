"""OLMo 2 and 3 in Hugging Face folders."""

from maxtext.configs.types import MaxTextConfig
from maxtext.hf.config_json import (
    LAYER_TYPES,
    HfMapping,
    Json,
    ModelSettings,
    dense_keys,
    layer_kinds,
    size_defaults,
    uniform_rope,
    window_size,
)
from maxtext.hf.layer_rules import attention_rules, mlp_rules, norm_rules, outer_rules
from maxtext.hf.rope_parameters import rope_fields, rope_keys, rope_parameters_by_kind
from maxtext.hf.rules import Rule
from maxtext.models.hf_config import (
    LayerSpecs,
    dense_entries,
    first_rope_entry,
    layer_types,
    rope_entries,
)

THETA = 500_000.0  # of OLMo 3


def read_olmo2(hf_config: Json) -> ModelSettings:
    rope = uniform_rope(hf_config)
    keys = dense_keys(hf_config, "olmo2") | {"use_qk_norm": True}
    return ModelSettings(keys | rope.keys, rope.hf_attributes)


def write_olmo2(config: MaxTextConfig, layers: LayerSpecs) -> Json:
    return dense_entries(config, layers) | {"rope_parameters": first_rope_entry(layers)}


def read_olmo3(hf_config: Json) -> ModelSettings:
    # rope_theta is the base of full layers only.
    parameters = rope_parameters_by_kind(hf_config, local_theta=THETA)
    ropes = {LAYER_TYPES[kind]: rope_fields(hf_config, own) for kind, own in parameters.items()}
    keys = dense_keys(hf_config, "olmo3") | rope_keys(ropes["full"])
    keys |= {"use_qk_norm": True, "sliding_window_size": window_size(hf_config)}
    return ModelSettings(
        keys,
        {
            "layer_kinds": layer_kinds(hf_config, lambda i: "sliding" if (i + 1) % 4 else "full"),
            "rope": ropes,
        },
    )


def write_olmo3(config: MaxTextConfig, layers: LayerSpecs) -> Json:
    return dense_entries(config, layers) | {
        "layer_types": layer_types(layers),
        "sliding_window": config.sliding_window_size,
        "rope_parameters": rope_entries(layers),
    }


def olmo_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[Rule]:
    post_norms = {
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_mlp_norm",
    }
    return outer_rules() + norm_rules(post_norms) + attention_rules(config) + mlp_rules()


SIZES = size_defaults(
    vocab_size=50_304,
    hidden_size=4096,
    intermediate_size=11_008,
    num_hidden_layers=32,
    num_attention_heads=32,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    attention_bias=False,
)
OLMO2 = HfMapping(
    architectures=("Olmo2ForCausalLM",),
    model_type="olmo2",
    read=read_olmo2,
    write=write_olmo2,
    rules=olmo_rules,
    defaults=SIZES,
)
OLMO3 = HfMapping(
    architectures=("Olmo3ForCausalLM",),
    model_type="olmo3",
    read=read_olmo3,
    write=write_olmo3,
    rules=olmo_rules,
    defaults=SIZES | {"rope_theta": THETA, "sliding_window": 4096, "layer_types": None},
)
