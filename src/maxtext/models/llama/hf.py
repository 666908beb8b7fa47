"""Llama 2 to 4 in Hugging Face folders."""

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
    bool_field,
    dense_fields,
    dense_keys,
    or_zero,
)
from maxtext.hf.layer_rules import (
    HF_LAYER,
    PRE_NORMS,
    attention_rules,
    dense_rules,
    mlp_rules,
    norm_rules,
    outer_rules,
    stacked_expert_rules,
)
from maxtext.hf.rules import TensorRule
from maxtext.hf.schema import BOOL, COUNT, NULL, POSITIVE, SIZE, list_of, per_layer
from maxtext.models.hf_config import (
    LAYER_TYPES_FIELD,
    has_experts,
    layer_kinds,
    listed_rope_layers,
    no_rope_layers_field,
    uniform_rope,
)


def llama_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[TensorRule]:
    return dense_rules(config)


LLAMA = HfMapping(
    architectures=("LlamaForCausalLM",),
    model_type="llama",
    keys=dense_keys("llama2"),
    fields=(
        *dense_fields(
            vocab_size=32_000,
            hidden_size=4096,
            intermediate_size=11_008,
            num_hidden_layers=32,
            num_attention_heads=32,
            max_position_embeddings=2048,
        ),
        ATTENTION_BIAS,
        MLP_BIAS,
        uniform_rope(),
    ),
    rules=llama_rules,
    ignored=(r".*rotary_emb\.inv_freq",),
)


def read_llama4_layers(entries: Json) -> ModelSettings:
    """Which layers have RoPE, experts and chunks."""
    count, step = entries["num_hidden_layers"], entries["interleave_moe_layer_step"]
    rope_layers = listed_rope_layers(entries)
    moe_layers = entries["moe_layers"]
    if moe_layers is None:
        moe_layers = [i for i in range(count) if (i + 1) % step == 0]
    hf_attributes = {
        "rope_layers": rope_layers,
        "moe_layers": [i in moe_layers for i in range(count)],
        "layer_kinds": layer_kinds(entries, lambda i, _: "chunk" if rope_layers[i] else "full"),
    }
    keys = {
        "nope_layer_interval": entries["no_rope_layer_interval"],
        "interleave_moe_layer_step": step,
    }
    return ModelSettings(keys, hf_attributes)


def llama4_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[TensorRule]:
    hf, native = f"{HF_LAYER}feed_forward.", "layers/{i}/mlp/"
    return [
        *outer_rules(),
        *norm_rules(PRE_NORMS),
        *attention_rules(config),
        *mlp_rules(hf),
        TensorRule(f"{hf}router.weight", f"{native}router/weight", "x e -> e x"),
        *mlp_rules(f"{hf}shared_expert.", f"{native}shared/"),
        *stacked_expert_rules(f"{hf}experts.", native, "x e (b m) -> b x e m", "x m e -> x m e"),
    ]


INDICES = list_of(COUNT, "whole numbers")
LLAMA4 = HfMapping(
    architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    model_type="llama4_text",
    keys=dense_keys("llama4", shared_experts=1),
    fields=(
        *dense_fields(
            vocab_size=202_048,
            hidden_size=5120,
            intermediate_size=8192,
            num_hidden_layers=48,
            num_attention_heads=40,
            max_position_embeddings=131_072,
            num_key_value_heads=8,
            head_dim=128,
            rms_norm_eps=1e-5,
            mlp_dims=("base_moe_mlp_dim",),
        ),
        ATTENTION_BIAS,
        uniform_rope(rope_theta=500_000.0, interleave=True, required=False),
        Field("intermediate_size_mlp", "base_mlp_dim", 16_384, kind=SIZE),
        Field("num_local_experts", "num_experts", 16),
        Field("num_experts_per_tok", "num_experts_per_tok", 1),
        bool_field("use_qk_norm", "use_qk_norm", True),
        Field(
            "attention_chunk_size",
            "chunk_attn_window_size",
            8192,
            to_native=or_zero,
            kind=COUNT | NULL,
        ),
        # Also published as 4.
        Field(
            "attn_temperature_tuning",
            "temperature_tuning",
            True,
            to_native=bool,
            kind=BOOL | COUNT | NULL,
        ),
        Field("attn_scale", "architecture.temperature_scale", 0.1, kind=POSITIVE),
        Field("floor_scale", "architecture.temperature_length", 8192, kind=SIZE),
        FieldGroup(
            (
                no_rope_layers_field(per_layer(INDICES | NULL)),
                Field("no_rope_layer_interval", default=4, kind=SIZE),
                Field(
                    "moe_layers",
                    from_layers=lambda config, layers: [
                        i for i, layer in enumerate(layers) if has_experts(layer)
                    ],
                    kind=INDICES | NULL,
                ),
                Field("interleave_moe_layer_step", default=1, kind=SIZE),
                LAYER_TYPES_FIELD,
            ),
            read_llama4_layers,
        ),
    ),
    rules=llama4_rules,
    peft_swaps_factors=True,
)
