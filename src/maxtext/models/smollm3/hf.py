"""SmolLM3 in Hugging Face folders."""

from maxtext.configs.types import MaxTextConfig
from maxtext.hf.config_json import (
    ATTENTION_BIAS,
    MLP_BIAS,
    Field,
    FieldGroup,
    HfMapping,
    Json,
    LayerSpecs,
    ModelSettings,
    dense_fields,
    dense_keys,
    or_null,
    window_field,
)
from maxtext.hf.layer_rules import dense_rules
from maxtext.hf.rules import TensorRule
from maxtext.models.hf_config import (
    LAYER_TYPES_FIELD,
    NO_PAD_TOKEN,
    layer_kinds,
    listed_rope_layers,
    no_rope_layers_field,
    uniform_rope,
)


def read_layers(entries: Json) -> ModelSettings:
    """Which layers have RoPE, and which of the others slide."""
    has_rope = listed_rope_layers(entries)
    slides = entries["use_sliding_window"] and entries["sliding_window"] is not None
    kinds = layer_kinds(entries, lambda i, _: "sliding" if slides and not has_rope[i] else "full")
    return ModelSettings(
        {"nope_layer_interval": entries["no_rope_layer_interval"]},
        {"rope_layers": has_rope, "layer_kinds": kinds},
    )


def smollm3_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[TensorRule]:
    return dense_rules(config)


SMOLLM3 = HfMapping(
    architectures=("SmolLM3ForCausalLM",),
    model_type="smollm3",
    keys=dense_keys("smollm3"),
    fields=(
        *dense_fields(
            vocab_size=128_256,
            hidden_size=2048,
            intermediate_size=11_008,
            num_hidden_layers=36,
            num_attention_heads=16,
            max_position_embeddings=32_768,
            num_key_value_heads=4,
            tie_word_embeddings=True,
        ),
        ATTENTION_BIAS,
        MLP_BIAS,
        window_field(None, to_hf=or_null),
        uniform_rope(required=False, rope_theta=2_000_000.0),
        FieldGroup(
            (
                no_rope_layers_field(),
                Field("no_rope_layer_interval", default=4),
                Field(
                    "use_sliding_window",
                    default=False,
                    from_layers=lambda config, layers: config.sliding_window_size > 0,
                ),
                LAYER_TYPES_FIELD,
            ),
            read_layers,
        ),
        NO_PAD_TOKEN,
    ),
    rules=smollm3_rules,
)
