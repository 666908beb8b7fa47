"""gpt-oss in Hugging Face folders."""

from maxtext.configs.types import MaxTextConfig
from maxtext.hf.config_json import (
    EXPERT_DIMS,
    Field,
    HfMapping,
    LayerSpecs,
    bool_field,
    dense_fields,
    dense_keys,
    optional,
    window_field,
)
from maxtext.hf.layer_rules import (
    HF_LAYER,
    PRE_NORMS,
    attention_rules,
    norm_rules,
    outer_rules,
    stacked_expert_rules,
)
from maxtext.hf.rules import TensorRule
from maxtext.hf.schema import NULL, POSITIVE
from maxtext.models.hf_config import every_nth, layer_types, uniform_rope

DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def gpt_oss_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[TensorRule]:
    mlp, native = f"{HF_LAYER}mlp.", "layers/{i}/mlp/"
    return [
        *outer_rules(),
        *norm_rules(PRE_NORMS),
        *attention_rules(config),
        TensorRule(f"{mlp}router.weight", f"{native}router/weight", "x e -> e x"),
        TensorRule(f"{mlp}router.bias", f"{native}router/bias", "x -> x"),
        # Gate and up are interleaved.
        *stacked_expert_rules(f"{mlp}experts.", native, "x e (m b) -> b x e m", "x m e -> x m e"),
        TensorRule(
            f"{mlp}experts.gate_up_proj_bias", f"{native}experts/wi_{{b}}/bias", "x (m b) -> b x m"
        ),
        TensorRule(f"{mlp}experts.down_proj_bias", f"{native}experts/wo/bias", "x e -> x e"),
    ]


GPT_OSS = HfMapping(
    architectures=("GptOssForCausalLM",),
    model_type="gpt_oss",
    keys=dense_keys(
        "gpt_oss",
        mlp_activations=["sigmoid", "linear"],
        routed_bias=True,
        mlp_bias=True,
        attention_sink=True,
    ),
    fields=(
        *dense_fields(
            vocab_size=201_088,
            hidden_size=2880,
            intermediate_size=2880,
            num_hidden_layers=36,
            num_attention_heads=64,
            max_position_embeddings=131_072,
            num_key_value_heads=8,
            head_dim=64,
            rms_norm_eps=1e-5,
            mlp_dims=EXPERT_DIMS,
        ),
        Field("hidden_act", default="silu"),  # experts have an activation of their own
        Field("swiglu_alpha", supported=(1.702,)),
        Field(
            "swiglu_limit", "mlp_activations_limit", 7.0, to_native=optional, kind=POSITIVE | NULL
        ),
        bool_field("attention_bias", "attention_bias", True),
        window_field(128),
        layer_types(every_nth(2, "full")),
        uniform_rope(rope_theta=150_000.0),
        Field("rope_parameters", null=lambda entries: DEFAULT_ROPE),
        Field("num_local_experts", "num_experts", 128, aliases=("num_experts",)),
        Field("num_experts_per_tok", "num_experts_per_tok", 4),
    ),
    rules=gpt_oss_rules,
)
