"""Gemma 1 to 4 in Hugging Face folders: the text models."""

from dataclasses import replace

from maxtext.common.errors import UserError
from maxtext.configs.types import MaxTextConfig
from maxtext.hf.config_json import (
    ATTENTION_BIAS,
    Field,
    FieldGroup,
    HfMapping,
    Json,
    LayerSpecs,
    ModelSettings,
    activation_field,
    dense_fields,
    dense_keys,
    native_activation,
    optional,
    or_null,
    window_field,
)
from maxtext.hf.layer_rules import (
    HF_LAYER,
    SANDWICH_NORMS,
    attention_rules,
    dense_rules,
    mlp_rules,
    norm_rules,
    outer_rules,
    stacked_expert_rules,
)
from maxtext.hf.rope_parameters import completed, rope_fields, with_outer_truncate
from maxtext.hf.rules import TensorRule
from maxtext.hf.schema import BOOL, COUNT, LAYER_FIELDS, NULL, OBJECT, POSITIVE, SIZE
from maxtext.models.hf_config import (
    every_nth,
    layer_kinds,
    layer_types,
    layer_types_entry,
    rope_entries,
    rope_entry_fields,
    ropes_by_kind,
    uniform_rope,
)

SLIDING_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
GEMMA4_ROPES = {
    "sliding_attention": SLIDING_ROPE,
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    },
}


def gemma_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[TensorRule]:
    return dense_rules(config)


def native_gelu(name: str | None) -> list[str]:
    """ "gelu", as published, means its tanh approximation."""
    return [native_activation("gelu_pytorch_tanh" if name == "gelu" else name), "linear"]


def read_softmax_scale(entries: Json) -> ModelSettings:
    return ModelSettings({}, {"softmax_scale": entries["query_pre_attn_scalar"] ** -0.5})


def write_softmax_scale(config: MaxTextConfig, layers: LayerSpecs) -> Json:
    return {
        "num_hidden_layers": len(layers),  # Gemma 2's keys count pairs
        "query_pre_attn_scalar": query_pre_attn_scalar(layers[0].attention.scale),
    }


def query_pre_attn_scalar(scale: float) -> int:
    """n, for a softmax scale of 1/√n. Raises UserError if n is not a whole number."""
    value = round(scale**-2)
    if abs(value**-0.5 - scale) > 1e-9:
        raise UserError(
            f"a softmax scale of {scale} is not 1/√n of a whole n, as Gemma's config.json needs"
        )
    return value


def sandwich_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[TensorRule]:
    return outer_rules() + norm_rules(SANDWICH_NORMS) + attention_rules(config) + mlp_rules()


def read_gemma3_ropes(entries: Json) -> ModelSettings:
    settings = ropes_by_kind(entries, local_theta=entries["rope_local_base_freq"])
    theta = settings.hf_attributes["rope"]["sliding"]["max_timescale"]
    if theta.is_integer():
        settings.keys["local_rope_max_timescale"] = int(theta)
    return settings


def write_ropes(config: MaxTextConfig, layers: LayerSpecs) -> Json:
    return {"rope_parameters": rope_entries(layers, SLIDING_ROPE)}


def read_gemma4_layers(entries: Json) -> ModelSettings:
    kinds = layer_kinds(entries, every_nth(6, "full"))
    kinds[-1] = "full"
    shared_kv = entries["attention_k_eq_v"]
    global_layer = global_layer_config(entries, kinds, shared_kv)
    parameters = gemma4_rope_parameters(entries)
    full = rope_fields(entries, parameters["full_attention"])
    sliding = rope_fields(entries, parameters["sliding_attention"])
    keys = {
        "global_head_dim": global_layer.get("head_dim", entries["head_dim"]),
        "global_num_kv_heads": global_layer.get(
            "num_key_value_heads", entries["num_key_value_heads"]
        ),
        "share_kv_projections": shared_kv,
        "global_rope_proportion": full["fraction"],
        "local_rope_proportion": sliding["fraction"],
    }
    for name, fields in (("global", full), ("local", sliding)):
        if fields["max_timescale"].is_integer():
            keys[f"{name}_rope_max_timescale"] = int(fields["max_timescale"])
    return ModelSettings(keys, {"layer_kinds": kinds, "rope": {"full": full, "sliding": sliding}})


def gemma4_rope_parameters(hf_config: Json) -> dict[str, Json]:
    """RoPE parameters of full and sliding layers, which rope_scaling replaces."""
    given = hf_config["rope_scaling"] or hf_config["rope_parameters"] or GEMMA4_ROPES
    missing = [kind for kind in GEMMA4_ROPES if not isinstance(given.get(kind), dict)]
    if missing:
        raise UserError(f"config.json: the RoPE parameters have no {' and no '.join(missing)}")
    return {
        kind: with_outer_truncate(completed(given[kind], hf_config, hf_config["rope_theta"]), given)
        for kind in GEMMA4_ROPES
    }


def global_layer_config(hf_config: Json, kinds: list[str], shared_kv: bool) -> Json:
    """head_dim and num_key_value_heads of the global layers, which must be alike."""
    default = {"head_dim": hf_config["global_head_dim"]}
    if shared_kv and hf_config["num_global_key_value_heads"]:
        default["num_key_value_heads"] = hf_config["num_global_key_value_heads"]
    if hf_config["per_layer_config"] is None:
        return default
    # Layers are numbered 0, 1, … or, in models of more than ten, 00, 01, …
    configs = {int(number): layer for number, layer in hf_config["per_layer_config"].items()}
    of_global = [configs.get(i, {}) for i, kind in enumerate(kinds) if kind == "full"]
    of_sliding = [configs.get(i) for i, kind in enumerate(kinds) if kind != "full"]
    others = sorted({name for layer in configs.values() for name in layer} - set(LAYER_FIELDS))
    if others:
        raise UserError(
            f"config.json: per_layer_config has {', '.join(others)}: {', '.join(LAYER_FIELDS)} of "
            "the full_attention layers are supported"
        )
    if any(layer != of_global[0] for layer in of_global) or any(of_sliding):
        raise UserError(
            "config.json: per_layer_config must be the same on all full_attention layers and "
            "absent elsewhere"
        )
    return of_global[0]


def write_gemma4_layers(config: MaxTextConfig, layers: LayerSpecs) -> Json:
    return write_ropes(config, layers) | {
        "layer_types": layer_types_entry(layers),
        "global_head_dim": config.global_head_dim or config.head_dim,
        "num_global_key_value_heads": config.global_num_kv_heads or config.num_kv_heads,
        "attention_k_eq_v": config.share_kv_projections,
    }


def read_gemma4_experts(entries: Json) -> ModelSettings:
    if not entries["enable_moe_block"]:
        return ModelSettings({})
    return ModelSettings(
        {
            "num_experts": entries["num_experts"],
            "num_experts_per_tok": entries["top_k_experts"],
            "base_moe_mlp_dim": entries["moe_intermediate_size"],
            "shared_experts": 1,
        }
    )


def write_gemma4_experts(config: MaxTextConfig, layers: LayerSpecs) -> Json:
    experts = config.num_experts > 1
    return {
        "enable_moe_block": experts,
        "num_experts": config.num_experts if experts else None,
        "top_k_experts": config.num_experts_per_tok if experts else None,
        "moe_intermediate_size": config.moe_mlp_dim if experts else None,
        "vocab_size_per_layer_input": config.vocab_size,
        "hidden_size_per_layer_input": 0,
    }


def gemma4_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[TensorRule]:
    native = "layers/{i}/mlp/"
    rules = [
        *sandwich_rules(config, layers),
        TensorRule(f"{HF_LAYER}layer_scalar", "layers/{i}/scale", "n -> n"),
    ]
    if config.num_experts == 1:
        return rules
    parallel_norms = {
        "pre_feedforward_layernorm": "mlp/dense_norm",
        "pre_feedforward_layernorm_2": "mlp/sparse_norm",
        "post_feedforward_layernorm_1": "mlp/post_dense_norm",
        "post_feedforward_layernorm_2": "mlp/post_sparse_norm",
    }
    return [
        *rules,
        *norm_rules(parallel_norms),
        *mlp_rules(f"{HF_LAYER}mlp.", f"{native}dense/"),
        TensorRule(f"{HF_LAYER}router.proj.weight", f"{native}sparse/router/weight", "x e -> e x"),
        TensorRule(f"{HF_LAYER}router.scale", f"{native}sparse/router/scale", "e -> e"),
        TensorRule(
            f"{HF_LAYER}router.per_expert_scale", f"{native}sparse/router/expert_scale", "x -> x"
        ),
        *stacked_expert_rules(
            f"{HF_LAYER}experts.", f"{native}sparse/", "x (b m) e -> b x e m", "x e m -> x m e"
        ),
    ]


def cap_field(hf: str, key: str, default: float | None) -> Field:
    return Field(hf, key, default, to_native=optional, to_hf=or_null, kind=POSITIVE | NULL)


# "vision" concerns images only.
CAUSAL = Field("use_bidirectional_attention", supported=(None, False, "vision"))
# Those of Gemma 2 to 4, of which hidden_act has no effect.
NEWER_FIELDS = (
    Field("hidden_act", default="gelu_pytorch_tanh"),
    replace(
        activation_field("hidden_activation", "gelu_pytorch_tanh"),
        null=lambda entries: entries["hidden_act"],
    ),
    ATTENTION_BIAS,
    CAUSAL,
)
NEWER_KEYS = {"use_post_attn_norm": True, "use_post_ffw_norm": True}

GEMMA = HfMapping(
    architectures=("GemmaForCausalLM",),
    model_type="gemma",
    keys=dense_keys("gemma"),
    fields=(
        *dense_fields(
            vocab_size=256_000,
            hidden_size=3072,
            intermediate_size=24_576,
            num_hidden_layers=28,
            num_attention_heads=16,
            max_position_embeddings=8192,
            num_key_value_heads=16,
            head_dim=256,
            tie_word_embeddings=True,
        ),
        replace(activation_field(default="gelu_pytorch_tanh"), to_native=native_gelu),
        ATTENTION_BIAS,
        CAUSAL,
        uniform_rope(),
    ),
    rules=gemma_rules,
)
GEMMA2 = HfMapping(
    architectures=("Gemma2ForCausalLM",),
    model_type="gemma2",
    keys=dense_keys("gemma2", **NEWER_KEYS),
    fields=(
        *dense_fields(
            vocab_size=256_000,
            hidden_size=2304,
            intermediate_size=9216,
            num_hidden_layers=26,
            num_attention_heads=8,
            max_position_embeddings=8192,
            num_key_value_heads=4,
            head_dim=256,
            tie_word_embeddings=True,
        ),
        *NEWER_FIELDS,
        window_field(4096),
        cap_field("attn_logit_softcapping", "attn_logits_soft_cap", 50.0),
        cap_field("final_logit_softcapping", "final_logits_soft_cap", 30.0),
        layer_types(every_nth(2, "full")),
        uniform_rope(),
        FieldGroup(
            (Field("query_pre_attn_scalar", default=256, kind=SIZE),),
            read_softmax_scale,
            write_softmax_scale,
        ),
    ),
    rules=sandwich_rules,
)
GEMMA3 = HfMapping(
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    model_type="gemma3_text",
    keys=dense_keys("gemma3", **NEWER_KEYS),
    fields=(
        *dense_fields(
            vocab_size=262_208,
            hidden_size=2304,
            intermediate_size=9216,
            num_hidden_layers=26,
            num_attention_heads=8,
            max_position_embeddings=131_072,
            num_key_value_heads=4,
            head_dim=256,
            tie_word_embeddings=True,
        ),
        *NEWER_FIELDS,
        window_field(4096),
        cap_field("final_logit_softcapping", "final_logits_soft_cap", None),
        layer_types(
            every_nth("sliding_window_pattern", "full"),
            Field("sliding_window_pattern", default=6),
        ),
        FieldGroup(
            (
                *rope_entry_fields(rope_theta=1_000_000.0),
                Field("rope_local_base_freq", default=10_000.0, kind=POSITIVE | NULL),
            ),
            read_gemma3_ropes,
            write_ropes,
        ),
        FieldGroup(
            (Field("query_pre_attn_scalar", default=256, kind=SIZE),),
            read_softmax_scale,
            write_softmax_scale,
        ),
    ),
    rules=sandwich_rules,
)
GEMMA4 = HfMapping(
    architectures=("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    model_type="gemma4_text",
    keys=dense_keys("gemma4", v_norm_with_scale=False, **NEWER_KEYS),
    fields=(
        *dense_fields(
            vocab_size=262_144,
            hidden_size=2304,
            intermediate_size=9216,
            num_hidden_layers=30,
            num_attention_heads=8,
            max_position_embeddings=131_072,
            num_key_value_heads=4,
            head_dim=256,
            tie_word_embeddings=True,
        ),
        *NEWER_FIELDS,
        window_field(512),
        cap_field("final_logit_softcapping", "final_logits_soft_cap", None),
        FieldGroup(
            (
                *rope_entry_fields(rope_theta=None),
                Field("layer_types"),
                Field("global_head_dim", default=512, kind=SIZE),
                Field("num_global_key_value_heads", kind=SIZE | NULL),
                Field("attention_k_eq_v", default=False, kind=BOOL | NULL),
                Field("per_layer_config", kind=OBJECT),
            ),
            read_gemma4_layers,
            write_gemma4_layers,
        ),
        FieldGroup(
            (
                Field("enable_moe_block", default=False, kind=BOOL | NULL),
                Field("num_experts"),
                Field("top_k_experts", kind=SIZE | NULL),
                Field("moe_intermediate_size"),
            ),
            read_gemma4_experts,
            write_gemma4_experts,
        ),
        Field("hidden_size_per_layer_input", default=256, supported=(0,), kind=COUNT | NULL),
        Field("num_kv_shared_layers", supported=(0,), kind=COUNT | NULL),
        Field("use_double_wide_mlp", supported=(False,)),
    ),
    rules=gemma4_rules,
)
