"""Phi-3 and Phi-4 in Hugging Face folders, with one tensor for queries, keys and values and one for
gate and up.
"""

from maxtext.common.errors import UserError
from maxtext.configs.types import MaxTextConfig
from maxtext.hf.config_json import (
    ABSENT,
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
from maxtext.hf.layer_rules import HF_LAYER, PRE_NORMS, norm_rules, outer_rules
from maxtext.hf.rope_parameters import rope_fields, rope_parameters
from maxtext.hf.rules import TensorRule
from maxtext.hf.schema import SIZE
from maxtext.models.hf_config import (
    NO_PAD_TOKEN,
    first_rope,
    rope_entry,
    rope_entry_fields,
    rope_settings,
)


def read_phi3_rope(entries: Json) -> ModelSettings:
    parameters = rope_parameters(entries)
    if parameters["rope_type"] in ("su", "yarn"):  # former names of the same scaling
        parameters = parameters | {"rope_type": "longrope"}
    if parameters["rope_type"] not in ("default", "longrope"):
        raise UserError(
            f"config.json: rope_type={parameters['rope_type']!r} is not supported: Phi-3 has "
            "default and longrope"
        )
    return rope_settings(rope_fields(entries, parameters, partial=True))


def original_length_entry(config: MaxTextConfig, layers: LayerSpecs) -> object:
    rope = first_rope(layers)
    return rope.original_length if rope and rope.kind == "longrope" else ABSENT


def phi3_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[TensorRule]:
    attention, mlp = "layers/{i}/attention/", "layers/{i}/mlp/"
    qkv = tuple(f"{attention}{name}/weight" for name in ("query", "key", "value"))
    gate_up = f"{HF_LAYER}mlp.gate_up_proj.weight"
    return [
        *outer_rules(),
        *norm_rules(PRE_NORMS),
        TensorRule(f"{HF_LAYER}self_attn.qkv_proj.weight", qkv, "(h d) e -> e h d", join=0),
        TensorRule(
            f"{HF_LAYER}self_attn.o_proj.weight", f"{attention}out/weight", "e (h d) -> h d e"
        ),
        TensorRule(gate_up, f"{mlp}wi_{{b}}/weight", "(b m) e -> b e m"),
        TensorRule(gate_up, f"{mlp}wi/weight", "(b m) e -> e b m"),
        TensorRule(f"{HF_LAYER}mlp.down_proj.weight", f"{mlp}wo/weight", "e m -> m e"),
    ]


PHI3 = HfMapping(
    architectures=("Phi3ForCausalLM",),
    model_type="phi3",
    keys=dense_keys("phi3"),
    fields=(
        *dense_fields(
            vocab_size=32_064,
            hidden_size=3072,
            intermediate_size=8192,
            num_hidden_layers=32,
            num_attention_heads=32,
            max_position_embeddings=4096,
            rms_norm_eps=1e-5,
        ),
        window_field(None, to_hf=or_null),
        FieldGroup(rope_entry_fields(), read_phi3_rope),
        Field("rope_parameters", from_layers=lambda config, layers: rope_entry(first_rope(layers))),
        Field(
            "original_max_position_embeddings",
            default=4096,
            from_layers=original_length_entry,
            kind=SIZE,
        ),
        NO_PAD_TOKEN,
    ),
    rules=phi3_rules,
)
