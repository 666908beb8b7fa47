"""Gemma 1 to 4 in Hugging Face folders: the text models."""

from maxtext.common.errors import UserError
from maxtext.configs.types import MaxTextConfig
from maxtext.hf.config_json import (
    HfMapping,
    Json,
    ModelSettings,
    dense_keys,
    hf_activation,
    layer_kinds,
    size_defaults,
    uniform_rope,
    window_size,
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
from maxtext.hf.rope_parameters import (
    completed,
    rope_fields,
    rope_keys,
    rope_parameters_by_kind,
    with_outer_truncate,
)
from maxtext.hf.rules import Rule
from maxtext.hf.schema import COUNT, LAYER_FIELDS, NULL, OBJECT, POSITIVE, SIZE, SWITCH, all_of
from maxtext.models.hf_config import (
    LayerSpecs,
    dense_entries,
    first_rope_entry,
    layer_types,
    rope_entries,
)

SLIDING_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


def read_gemma(hf_config: Json) -> ModelSettings:
    rope = uniform_rope(hf_config)
    if hf_config["hidden_act"] == "gelu":  # as published; its tanh approximation is meant
        hf_config = hf_config | {"hidden_act": "gelu_pytorch_tanh"}
    return ModelSettings(dense_keys(hf_config, "gemma") | rope.keys, rope.hf_attributes)


def gemma_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[Rule]:
    return dense_rules(config)


def write_gemma(config: MaxTextConfig, layers: LayerSpecs) -> Json:
    return dense_entries(config, layers) | {"rope_parameters": first_rope_entry(layers)}


def capped_keys(hf_config: Json) -> Json:
    return {
        "attn_logits_soft_cap": hf_config.get("attn_logit_softcapping"),
        "final_logits_soft_cap": hf_config["final_logit_softcapping"],
        "sliding_window_size": window_size(hf_config),
        "use_post_attn_norm": True,
        "use_post_ffw_norm": True,
    }


def read_gemma2(hf_config: Json) -> ModelSettings:
    rope = uniform_rope(hf_config)
    keys = dense_keys(hf_config, "gemma2") | capped_keys(hf_config) | rope.keys
    hf_attributes = {
        "layer_kinds": layer_kinds(hf_config, lambda i: "full" if i % 2 else "sliding"),
        "softmax_scale": hf_config["query_pre_attn_scalar"] ** -0.5,
    }
    return ModelSettings(keys, hf_attributes | rope.hf_attributes)


def write_gemma2(config: MaxTextConfig, layers: LayerSpecs) -> Json:
    return write_gemma(config, layers) | {
        "hidden_activation": hf_activation(config),
        "layer_types": layer_types(layers),
        "sliding_window": config.sliding_window_size,
        "query_pre_attn_scalar": query_pre_attn_scalar(layers[0].attention.scale),
        "attn_logit_softcapping": config.attn_logits_soft_cap or None,
        "final_logit_softcapping": config.final_logits_soft_cap or None,
    }


def query_pre_attn_scalar(scale: float) -> int:
    """n, for a softmax scale of 1/√n. Raises UserError if n is not a whole number."""
    value = round(scale**-2)
    if abs(value**-0.5 - scale) > 1e-9:
        raise UserError(
            f"a softmax scale of {scale} is not 1/√n of a whole n, as Gemma's config.json needs"
        )
    return value


def sandwich_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[Rule]:
    return outer_rules() + norm_rules(SANDWICH_NORMS) + attention_rules(config) + mlp_rules()


def read_gemma3(hf_config: Json) -> ModelSettings:
    parameters = rope_parameters_by_kind(hf_config, local_theta=hf_config["rope_local_base_freq"])
    full = rope_fields(hf_config, parameters["full_attention"])
    sliding = rope_fields(hf_config, parameters["sliding_attention"])
    pattern = hf_config["sliding_window_pattern"]
    keys = dense_keys(hf_config, "gemma3") | capped_keys(hf_config) | rope_keys(full)
    if sliding["max_timescale"].is_integer():
        keys["local_rope_max_timescale"] = int(sliding["max_timescale"])
    hf_attributes = {
        "layer_kinds": layer_kinds(hf_config, lambda i: "sliding" if (i + 1) % pattern else "full"),
        "softmax_scale": hf_config["query_pre_attn_scalar"] ** -0.5,
        "rope": {"full": full, "sliding": sliding},
    }
    return ModelSettings(keys, hf_attributes)


def write_gemma3(config: MaxTextConfig, layers: LayerSpecs) -> Json:
    return write_gemma2(config, layers) | {"rope_parameters": rope_entries(layers, SLIDING_ROPE)}


def read_gemma4(hf_config: Json) -> ModelSettings:
    kinds = layer_kinds(hf_config, lambda i: "sliding" if (i + 1) % 6 else "full") or []
    kinds[-1] = "full"
    shared_kv = hf_config["attention_k_eq_v"]
    global_layer = global_layer_config(hf_config, kinds, shared_kv)
    parameters = gemma4_rope_parameters(hf_config)
    full = rope_fields(hf_config, parameters["full_attention"])
    sliding = rope_fields(hf_config, parameters["sliding_attention"])
    keys = dense_keys(hf_config, "gemma4") | capped_keys(hf_config)
    keys |= {
        "global_head_dim": global_layer.get("head_dim", keys["head_dim"]),
        "global_num_kv_heads": global_layer.get("num_key_value_heads", keys["base_num_kv_heads"]),
        "share_kv_projections": shared_kv,
        "v_norm_with_scale": False,
        "global_rope_proportion": full["fraction"],
        "local_rope_proportion": sliding["fraction"],
    }
    for name, fields in (("global", full), ("local", sliding)):
        if fields["max_timescale"].is_integer():
            keys[f"{name}_rope_max_timescale"] = int(fields["max_timescale"])
    if hf_config["enable_moe_block"]:
        keys |= {
            "num_experts": hf_config["num_experts"],
            "num_experts_per_tok": hf_config["top_k_experts"],
            "base_moe_mlp_dim": hf_config["moe_intermediate_size"],
            "shared_experts": 1,
        }
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


def write_gemma4(config: MaxTextConfig, layers: LayerSpecs) -> Json:
    experts = config.num_experts > 1
    return dense_entries(config, layers) | {
        "hidden_activation": hf_activation(config),
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": config.vocab_size,
        "layer_types": layer_types(layers),
        "sliding_window": config.sliding_window_size,
        "final_logit_softcapping": config.final_logits_soft_cap or None,
        "global_head_dim": config.global_head_dim or config.head_dim,
        "num_global_key_value_heads": config.global_num_kv_heads or config.num_kv_heads,
        "attention_k_eq_v": config.share_kv_projections,
        "enable_moe_block": experts,
        "num_experts": config.num_experts if experts else None,
        "top_k_experts": config.num_experts_per_tok if experts else None,
        "moe_intermediate_size": config.moe_mlp_dim if experts else None,
        "rope_parameters": rope_entries(layers, SLIDING_ROPE),
    }


def gemma4_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[Rule]:
    native = "layers/{i}/mlp/"
    rules = [
        *sandwich_rules(config, layers),
        Rule(f"{HF_LAYER}layer_scalar", "layers/{i}/scale", "n -> n"),
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
        Rule(f"{HF_LAYER}router.proj.weight", f"{native}sparse/router/weight", "x e -> e x"),
        Rule(f"{HF_LAYER}router.scale", f"{native}sparse/router/scale", "e -> e"),
        Rule(f"{HF_LAYER}router.per_expert_scale", f"{native}sparse/router/expert_scale", "x -> x"),
        *stacked_expert_rules(
            f"{HF_LAYER}experts.", f"{native}sparse/", "x (b m) e -> b x e m", "x e m -> x m e"
        ),
    ]


GEMMA_DEFAULTS = {
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "attention_bias": False,
}
# Those of Gemma 2 to 4.
NEWER_DEFAULTS = GEMMA_DEFAULTS | {
    "hidden_activation": "gelu_pytorch_tanh",  # hidden_act has no effect
    "layer_types": None,
    "final_logit_softcapping": None,
}
# "vision" concerns images only.
SUPPORTED = {"use_bidirectional_attention": (None, False, "vision")}
GEMMA4_ROPES = {
    "sliding_attention": SLIDING_ROPE,
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    },
}

GEMMA = HfMapping(
    architectures=("GemmaForCausalLM",),
    model_type="gemma",
    read=read_gemma,
    write=write_gemma,
    rules=gemma_rules,
    defaults=size_defaults(
        vocab_size=256_000,
        hidden_size=3072,
        intermediate_size=24_576,
        num_hidden_layers=28,
        num_attention_heads=16,
        max_position_embeddings=8192,
        **GEMMA_DEFAULTS,
        num_key_value_heads=16,
    ),
    supported=SUPPORTED,
)
GEMMA2 = HfMapping(
    architectures=("Gemma2ForCausalLM",),
    model_type="gemma2",
    read=read_gemma2,
    write=write_gemma2,
    rules=sandwich_rules,
    defaults=size_defaults(
        vocab_size=256_000,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=26,
        num_attention_heads=8,
        max_position_embeddings=8192,
        **NEWER_DEFAULTS,
        num_key_value_heads=4,
        sliding_window=4096,
        query_pre_attn_scalar=256,
        attn_logit_softcapping=50.0,
    )
    | {"final_logit_softcapping": 30.0},
    supported=SUPPORTED,
    fields={
        **all_of(SIZE, "query_pre_attn_scalar"),
        **all_of(POSITIVE | NULL, "attn_logit_softcapping", "final_logit_softcapping"),
    },
)
GEMMA3 = HfMapping(
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    model_type="gemma3_text",
    read=read_gemma3,
    write=write_gemma3,
    rules=sandwich_rules,
    defaults=size_defaults(
        vocab_size=262_208,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=26,
        num_attention_heads=8,
        max_position_embeddings=131_072,
        **NEWER_DEFAULTS,
        num_key_value_heads=4,
        sliding_window=4096,
        query_pre_attn_scalar=256,
        rope_theta=1_000_000.0,
        rope_local_base_freq=10_000.0,
        sliding_window_pattern=6,
    ),
    supported=SUPPORTED,
    fields={
        **all_of(SIZE, "sliding_window_pattern"),
        **all_of(POSITIVE | NULL, "rope_local_base_freq"),
    },
)
GEMMA4 = HfMapping(
    architectures=("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    model_type="gemma4_text",
    read=read_gemma4,
    write=write_gemma4,
    rules=gemma4_rules,
    defaults=size_defaults(
        vocab_size=262_144,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=30,
        num_attention_heads=8,
        max_position_embeddings=131_072,
        **NEWER_DEFAULTS,
        num_key_value_heads=4,
        sliding_window=512,
        global_head_dim=512,
        hidden_size_per_layer_input=256,
        rope_theta=None,
        num_global_key_value_heads=None,
        attention_k_eq_v=False,
        enable_moe_block=False,
        num_experts=None,
        top_k_experts=None,
        moe_intermediate_size=None,
        per_layer_config=None,
    ),
    supported=SUPPORTED
    | {
        "hidden_size_per_layer_input": (0,),
        "num_kv_shared_layers": (0,),
        "use_double_wide_mlp": (False,),
    },
    fields={
        **all_of(SIZE, "global_head_dim"),
        **all_of(SIZE | NULL, "num_global_key_value_heads", "top_k_experts"),
        **all_of(COUNT | NULL, "hidden_size_per_layer_input", "num_kv_shared_layers"),
        **all_of(SWITCH | NULL, "attention_k_eq_v", "enable_moe_block"),
        **all_of(OBJECT, "per_layer_config"),
    },
)
