"""Gemma 1 to 4, for text."""

from maxtext.checkpoint.convert.families.table import (
    PRE_NORMS,
    SANDWICH_NORMS,
    Json,
    Reading,
    Table,
    activation,
    attention_rules,
    dense_config,
    dense_keys,
    kinds,
    mlp_rules,
    need,
    norm_rules,
    one_rope,
    outer_rules,
    packed_expert_rules,
    rope_fields,
    rope_keys,
    their_activation,
    their_kinds,
    their_rope,
)
from maxtext.checkpoint.convert.rules import Rule
from maxtext.common.errors import UserError
from maxtext.configs.types import MaxTextConfig
from maxtext.models.registry import layers


def gemma_keys(hf: Json, block: str) -> Json:
    if hf.get("use_bidirectional_attention") not in (
        None,
        False,
        "vision",
    ):  # "vision" is of images alone
        raise UserError("config.json: use_bidirectional_attention of text is not supported")
    keys = dense_keys(hf, block)
    # The first releases wrote gelu and meant its tanh form.
    name = hf.get("hidden_activation") or hf.get("hidden_act") or "gelu_pytorch_tanh"
    keys["mlp_activations"] = ["gelu" if name == "gelu" else activation(name), "linear"]
    return keys


def read_gemma(hf: Json) -> Reading:
    rope = one_rope(hf)
    return Reading(gemma_keys(hf, "gemma") | rope.keys, rope.facts)


def gemma_rules(config: MaxTextConfig) -> list[Rule]:
    return outer_rules() + norm_rules(PRE_NORMS) + attention_rules(config) + mlp_rules()


def write_gemma(config: MaxTextConfig) -> Json:
    return dense_config(config) | {"rope_parameters": their_rope(layers(config)[0].attention.rope)}


def capped_keys(hf: Json) -> Json:
    return {
        "attn_logits_soft_cap": hf.get("attn_logit_softcapping"),
        "final_logits_soft_cap": hf.get("final_logit_softcapping"),
        "sliding_window_size": hf["sliding_window"] or 0,
        "use_post_attn_norm": True,
        "use_post_ffw_norm": True,
    }


def read_gemma2(hf: Json) -> Reading:
    rope = one_rope(hf)
    keys = gemma_keys(hf, "gemma2") | capped_keys(hf) | rope.keys
    facts = {
        "layer_kinds": kinds(hf, lambda i: "full" if i % 2 else "sliding"),
        "softmax_scale": hf["query_pre_attn_scalar"] ** -0.5,
    }
    return Reading(keys, facts | rope.facts)


def write_gemma2(config: MaxTextConfig) -> Json:
    attention = layers(config)[0].attention
    hidden = their_activation(config)
    return write_gemma(config) | {
        "hidden_activation": hidden,
        "layer_types": their_kinds(config),
        "sliding_window": config.sliding_window_size,
        "query_pre_attn_scalar": scalar(attention.scale),
        "attn_logit_softcapping": config.attn_logits_soft_cap or None,
        "final_logit_softcapping": config.final_logits_soft_cap or None,
    }


def scalar(scale: float) -> int:
    """Their way to say a softmax scale, which takes whole numbers."""
    value = round(scale**-2)
    if abs(value**-0.5 - scale) > 1e-9:
        raise UserError(
            f"a softmax scale of {scale} is not 1/√n of a whole n, as Gemma's config.json needs"
        )
    return value


def sandwich_rules(config: MaxTextConfig) -> list[Rule]:
    return outer_rules() + norm_rules(SANDWICH_NORMS) + attention_rules(config) + mlp_rules()


def read_gemma3(hf: Json) -> Reading:
    parameters = hf.get("rope_parameters") or {}
    if (
        "full_attention" not in parameters
    ):  # as published: two bases and a scaling of the global one
        scaling = dict(hf.get("rope_scaling") or {})
        scaling.setdefault("rope_type", scaling.pop("type", "default"))
        parameters = {
            "full_attention": scaling | {"rope_theta": hf.get("rope_theta", 1_000_000.0)},
            "sliding_attention": {"rope_theta": hf.get("rope_local_base_freq", 10_000.0)},
        }
    full = rope_fields(hf, {"rope_theta": 1_000_000.0} | parameters["full_attention"])
    sliding = rope_fields(hf, {"rope_theta": 10_000.0} | parameters["sliding_attention"])
    pattern = hf.get("sliding_window_pattern", 6)
    keys = gemma_keys(hf, "gemma3") | capped_keys(hf) | rope_keys(full)
    if sliding["max_timescale"].is_integer():
        keys["local_rope_max_timescale"] = int(sliding["max_timescale"])
    facts = {
        "layer_kinds": kinds(hf, lambda i: "sliding" if (i + 1) % pattern else "full"),
        "softmax_scale": hf["query_pre_attn_scalar"] ** -0.5,
        "rope": {"full": full, "sliding": sliding},
    }
    return Reading(keys, facts)


def both_ropes(config: MaxTextConfig) -> Json:
    ropes: Json = {}
    for spec, kind in zip(layers(config), their_kinds(config), strict=True):
        ropes.setdefault(kind, their_rope(spec.attention.rope))
    default = {"rope_type": "default", "rope_theta": 10_000.0}
    return {kind: ropes.get(kind, default) for kind in ("full_attention", "sliding_attention")}


def write_gemma3(config: MaxTextConfig) -> Json:
    return write_gemma2(config) | {"rope_parameters": both_ropes(config)}


def read_gemma4(hf: Json) -> Reading:
    need(hf, hidden_size_per_layer_input=0, num_kv_shared_layers=0, use_double_wide_mlp=False)
    parameters = hf["rope_parameters"]
    listed = kinds(hf, lambda i: "sliding" if (i + 1) % 6 else "full") or []
    listed[-1] = "full"
    shares = hf.get("attention_k_eq_v", False)
    wide = {"head_dim": hf["global_head_dim"]}
    if shares and hf.get("num_global_key_value_heads"):
        wide["num_key_value_heads"] = hf["num_global_key_value_heads"]
    # Layers are numbered 0, 1, … or, in models of more than ten, 00, 01, …
    own = hf.get("per_layer_config") and {
        int(number): layer for number, layer in hf["per_layer_config"].items()
    }
    each = [
        wide if own is None else own.get(i, {}) for i, kind in enumerate(listed) if kind == "full"
    ]
    if any(layer != each[0] for layer in each) or any(
        own.get(i) for i, kind in enumerate(listed) if own and kind != "full"
    ):
        raise UserError(
            "config.json: per_layer_config must be the same on all full_attention layers and absent elsewhere"
        )
    full = rope_fields(hf, parameters["full_attention"])
    sliding = rope_fields(hf, parameters["sliding_attention"])
    keys = gemma_keys(hf, "gemma4") | capped_keys(hf)
    keys |= {
        "global_head_dim": each[0].get("head_dim", keys["head_dim"]),
        "global_num_kv_heads": each[0].get("num_key_value_heads", keys["base_num_kv_heads"]),
        "share_kv_projections": shares,
        "v_norm_with_scale": False,
        "global_rope_proportion": full["fraction"],
        "local_rope_proportion": sliding["fraction"],
    }
    for name, fields in (("global", full), ("local", sliding)):
        if fields["max_timescale"].is_integer():
            keys[f"{name}_rope_max_timescale"] = int(fields["max_timescale"])
    if hf.get("enable_moe_block"):
        keys |= {
            "num_experts": hf["num_experts"],
            "num_experts_per_tok": hf["top_k_experts"],
            "base_moe_mlp_dim": hf["moe_intermediate_size"],
            "shared_experts": 1,
        }
    return Reading(keys, {"layer_kinds": listed, "rope": {"full": full, "sliding": sliding}})


def write_gemma4(config: MaxTextConfig) -> Json:
    experts = config.num_experts > 1
    return dense_config(config) | {
        "hidden_activation": their_activation(config),
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": config.vocab_size,
        "layer_types": their_kinds(config),
        "sliding_window": config.sliding_window_size,
        "final_logit_softcapping": config.final_logits_soft_cap or None,
        "global_head_dim": config.global_head_dim or config.head_dim,
        "num_global_key_value_heads": config.global_num_kv_heads or config.num_kv_heads,
        "attention_k_eq_v": config.share_kv_projections,
        "enable_moe_block": experts,
        "num_experts": config.num_experts if experts else None,
        "top_k_experts": config.num_experts_per_tok if experts else None,
        "moe_intermediate_size": config.moe_mlp_dim if experts else None,
        "rope_parameters": both_ropes(config),
    }


def gemma4_rules(config: MaxTextConfig) -> list[Rule]:
    layer, ours = "model.layers.{i}.", "layers/{i}/mlp/"
    rules = [*sandwich_rules(config), Rule(f"{layer}layer_scalar", "layers/{i}/scale", "n -> n")]
    if config.num_experts == 1:
        return rules
    beside = {
        "pre_feedforward_layernorm": "mlp/dense_norm",
        "pre_feedforward_layernorm_2": "mlp/sparse_norm",
        "post_feedforward_layernorm_1": "mlp/post_dense_norm",
        "post_feedforward_layernorm_2": "mlp/post_sparse_norm",
    }
    return [
        *rules,
        *norm_rules(beside),
        *mlp_rules(f"{layer}mlp.", f"{ours}dense/"),
        Rule(f"{layer}router.proj.weight", f"{ours}sparse/router/kernel", "x e -> e x"),
        Rule(f"{layer}router.scale", f"{ours}sparse/router/scale", "e -> e"),
        Rule(f"{layer}router.per_expert_scale", f"{ours}sparse/router/expert_scale", "x -> x"),
        *packed_expert_rules(
            f"{layer}experts.", f"{ours}sparse/", "x (b m) e -> b x e m", "x e m -> x m e"
        ),
    ]


TABLES = (
    Table(("GemmaForCausalLM",), "gemma", "gemma", read_gemma, write_gemma, gemma_rules),
    Table(("Gemma2ForCausalLM",), "gemma2", "gemma2", read_gemma2, write_gemma2, sandwich_rules),
    Table(("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), "gemma3_text", "gemma3", read_gemma3, write_gemma3,
          sandwich_rules),
    Table(("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"), "gemma4_text", "gemma4", read_gemma4, write_gemma4,
          gemma4_rules),
)  # fmt: skip
