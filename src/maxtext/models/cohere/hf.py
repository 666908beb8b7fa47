"""Command-R and Command-R7B in Hugging Face folders."""

from maxtext.configs.types import MaxTextConfig
from maxtext.hf.config_json import (
    ATTENTION_BIAS,
    Field,
    HfMapping,
    LayerSpecs,
    bool_field,
    dense_fields,
    dense_keys,
    window_field,
)
from maxtext.hf.layer_rules import HF_LAYER, attention_rules, mlp_rules, norm_rules, outer_rules
from maxtext.hf.rules import TensorRule
from maxtext.hf.schema import COUNT, NULL, POSITIVE, TEXT
from maxtext.models.hf_config import every_nth, layer_types, uniform_rope


def cohere_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[TensorRule]:
    hf, native = f"{HF_LAYER}self_attn.", "layers/{i}/attention/"
    return [
        *outer_rules(),
        *norm_rules({"input_layernorm": "attention_norm"}),
        TensorRule(f"{hf}q_norm.weight", f"{native}query_norm/scale", "h d -> h d"),
        TensorRule(f"{hf}k_norm.weight", f"{native}key_norm/scale", "h d -> h d"),
        *attention_rules(config),
        *mlp_rules(),
    ]


FIELDS = (
    *dense_fields(
        vocab_size=256_000,
        hidden_size=8192,
        intermediate_size=22_528,
        num_hidden_layers=40,
        num_attention_heads=64,
        max_position_embeddings=8192,
        rms_norm_eps=None,
        tie_word_embeddings=True,
    ),
    Field("layer_norm_eps", "normalization_layer_epsilon", 1e-5, kind=POSITIVE | NULL),
    Field("logit_scale", "architecture.logit_scale", 0.0625, kind=POSITIVE),
    ATTENTION_BIAS,
)
COHERE = HfMapping(
    architectures=("CohereForCausalLM",),
    model_type="cohere",
    keys=dense_keys("cohere"),
    fields=(
        *FIELDS,
        bool_field("use_qk_norm", "use_qk_norm"),
        uniform_rope(rope_theta=500_000.0, interleave=True),
    ),
    rules=cohere_rules,
)
COHERE2 = HfMapping(
    architectures=("Cohere2ForCausalLM",),
    model_type="cohere2",
    keys=dense_keys("cohere2"),
    fields=(
        *FIELDS,
        window_field(4096),
        layer_types(
            every_nth("sliding_window_pattern", "full"),
            Field("sliding_window_pattern", default=4, kind=COUNT | TEXT | NULL),
        ),
        uniform_rope(interleave=True),
    ),
    rules=cohere_rules,
)
