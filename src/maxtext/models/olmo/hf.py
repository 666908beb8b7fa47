"""OLMo 2 and 3 in Hugging Face folders."""

from maxtext.configs.types import MaxTextConfig
from maxtext.hf.config_json import (
    ATTENTION_BIAS,
    FieldGroup,
    HfMapping,
    LayerSpecs,
    dense_fields,
    dense_keys,
    window_field,
)
from maxtext.hf.layer_rules import attention_rules, mlp_rules, norm_rules, outer_rules
from maxtext.hf.rules import TensorRule
from maxtext.models.hf_config import (
    every_nth,
    layer_types,
    rope_entries,
    rope_entry_fields,
    ropes_by_kind,
    uniform_rope,
)

THETA = 500_000.0  # of OLMo 3


def olmo_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[TensorRule]:
    post_norms = {
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_mlp_norm",
    }
    return outer_rules() + norm_rules(post_norms) + attention_rules(config) + mlp_rules()


FIELDS = (
    *dense_fields(
        vocab_size=50_304,
        hidden_size=4096,
        intermediate_size=11_008,
        num_hidden_layers=32,
        num_attention_heads=32,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
    ),
    ATTENTION_BIAS,
)
OLMO2 = HfMapping(
    architectures=("Olmo2ForCausalLM",),
    model_type="olmo2",
    keys=dense_keys("olmo2", use_qk_norm=True),
    fields=(*FIELDS, uniform_rope()),
    rules=olmo_rules,
)
OLMO3 = HfMapping(
    architectures=("Olmo3ForCausalLM",),
    model_type="olmo3",
    keys=dense_keys("olmo3", use_qk_norm=True),
    fields=(
        *FIELDS,
        window_field(4096),
        layer_types(every_nth(4, "full")),
        FieldGroup(
            rope_entry_fields(rope_theta=THETA),  # rope_theta is the base of full layers only
            lambda entries: ropes_by_kind(entries, local_theta=THETA),
            lambda config, layers: {"rope_parameters": rope_entries(layers)},
        ),
    ),
    rules=olmo_rules,
)
