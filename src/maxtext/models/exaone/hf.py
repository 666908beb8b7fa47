"""EXAONE 4 in Hugging Face folders."""

from maxtext.configs.types import MaxTextConfig
from maxtext.hf.config_json import (
    Field,
    HfMapping,
    Json,
    LayerSpecs,
    dense_fields,
    dense_keys,
    or_null,
    window_field,
)
from maxtext.hf.layer_rules import attention_rules, mlp_rules, norm_rules, outer_rules
from maxtext.hf.rules import TensorRule
from maxtext.models.hf_config import every_nth, layer_types, uniform_rope


def exaone4_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[TensorRule]:
    post_norms = {
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_mlp_norm",
    }
    return outer_rules() + norm_rules(post_norms) + attention_rules(config) + mlp_rules()


def layer_kind(layer: int, entries: Json) -> str:
    if entries["sliding_window"] is None:
        return "full"
    return every_nth("sliding_window_pattern", "full")(layer, entries)


EXAONE4 = HfMapping(
    architectures=("Exaone4ForCausalLM",),
    model_type="exaone4",
    keys=dense_keys("exaone4", use_qk_norm=True),
    fields=(
        *dense_fields(
            vocab_size=102_400,
            hidden_size=4096,
            intermediate_size=16_384,
            num_hidden_layers=32,
            num_attention_heads=32,
            max_position_embeddings=2048,
            num_key_value_heads=32,
            rms_norm_eps=1e-5,
        ),
        window_field(4096, to_hf=or_null),
        layer_types(layer_kind, Field("sliding_window_pattern", default=4)),
        uniform_rope(required=False),
    ),
    rules=exaone4_rules,
)
