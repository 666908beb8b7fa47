"""Qwen 2.5, 3, 3 with experts, 3-Next and 3.5, for text."""

from maxtext.checkpoint.convert.families.llama import dense_rules
from maxtext.checkpoint.convert.families.table import (
    PRE_NORMS,
    Json,
    Reading,
    Table,
    attention_rules,
    dense_config,
    dense_keys,
    expert_rules,
    in_layers,
    kinds,
    mlp_rules,
    norm_rules,
    one_rope,
    outer_rules,
    their_kinds,
    their_rope,
)
from maxtext.checkpoint.convert.rules import Rule
from maxtext.configs.types import MaxTextConfig
from maxtext.models.registry import layers


def window(hf: Json) -> int:
    """The sliding window where the model uses it."""
    return (hf["sliding_window"] or 0) if hf.get("use_sliding_window") else 0


def read_shared(hf: Json, block: str) -> Reading:
    rope = one_rope(hf)
    return Reading(
        dense_keys(hf, block) | rope.keys | {"sliding_window_size": window(hf)}, rope.facts
    )


def read_dense(hf: Json, block: str) -> Reading:
    reading = read_shared(hf, block)
    last = hf["max_window_layers"]
    reading.facts["layer_kinds"] = kinds(
        hf, lambda i: "sliding" if window(hf) and i >= last else "full"
    )
    return reading


def read_qwen2(hf: Json) -> Reading:
    reading = read_dense(hf, "qwen2")
    reading.keys["attention_bias"] = True
    return reading


def write_qwen2(config: MaxTextConfig) -> Json:
    written = write_qwen3(config)
    del written["attention_bias"]
    return written


def read_qwen3(hf: Json) -> Reading:
    reading = read_dense(hf, "qwen3")
    reading.keys["use_qk_norm"] = True
    return reading


def write_qwen3(config: MaxTextConfig) -> Json:
    slides = config.sliding_window_size > 0
    return dense_config(config) | {
        "rope_parameters": their_rope(layers(config)[0].attention.rope),
        "layer_types": their_kinds(config),
        "use_sliding_window": slides,
        "sliding_window": config.sliding_window_size if slides else None,
        "max_window_layers": len(layers(config)),
    }


def expert_keys(hf: Json) -> Json:
    return {
        "base_moe_mlp_dim": hf["moe_intermediate_size"],
        "num_experts": hf["num_experts"] if "num_experts" in hf else hf["num_local_experts"],
        "num_experts_per_tok": hf["num_experts_per_tok"],
        "norm_topk_prob": hf["norm_topk_prob"],
    }


def sparse_layers(hf: Json) -> list[bool]:
    step, dense = hf["decoder_sparse_step"], hf.get("mlp_only_layers") or []
    return [i not in dense and (i + 1) % step == 0 for i in range(hf["num_hidden_layers"])]


def read_qwen3_moe(hf: Json) -> Reading:
    reading = read_shared(hf, "qwen3_moe")
    reading.keys |= expert_keys(hf) | {"use_qk_norm": True}
    kind = "sliding" if window(hf) else "full"
    reading.facts |= {
        "layer_kinds": [kind] * hf["num_hidden_layers"],
        "moe_layers": sparse_layers(hf),
    }
    return reading


def write_experts(config: MaxTextConfig) -> Json:
    return {
        "moe_intermediate_size": config.moe_mlp_dim,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "norm_topk_prob": config.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [
            i for i, layer in enumerate(layers(config)) if not hasattr(layer.mlp, "router")
        ],
    }


def write_qwen3_moe(config: MaxTextConfig) -> Json:
    written = write_qwen3(config) | write_experts(config)
    del written["layer_types"]
    return written


def qwen3_moe_rules(config: MaxTextConfig) -> list[Rule]:
    return dense_rules(config) + experts("model.layers.{i}.mlp.")


def experts(mlp: str) -> list[Rule]:
    ours = "layers/{i}/mlp/"
    return [
        Rule(f"{mlp}gate.weight", f"{ours}router/kernel", "x e -> e x"),
        *expert_rules(f"{mlp}experts."),
        *mlp_rules(f"{mlp}shared_expert.", f"{ours}shared/"),
        Rule(f"{mlp}shared_expert_gate.weight", f"{ours}shared_gate/kernel", "n e -> e n"),
    ]


def read_delta(hf: Json, block: str) -> Reading:
    rope = one_rope(hf, fraction=0.25)
    keys = dense_keys(hf, block) | rope.keys
    keys |= {
        "gdn_conv_kernel_dim": hf["linear_conv_kernel_dim"],
        "gdn_key_head_dim": hf["linear_key_head_dim"],
        "gdn_value_head_dim": hf["linear_value_head_dim"],
        "gdn_num_key_heads": hf["linear_num_key_heads"],
        "gdn_num_value_heads": hf["linear_num_value_heads"],
    }
    interval = hf.get("full_attention_interval", 4)
    return Reading(
        keys,
        {"layer_kinds": kinds(hf, lambda i: "linear" if (i + 1) % interval else "full")}
        | rope.facts,
    )


def read_sparse_delta(hf: Json, block: str) -> Reading:
    reading = read_delta(hf, block)
    reading.keys |= expert_keys(hf) | {"shared_experts": 1}
    reading.facts |= {
        "shared_expert_dim": hf["shared_expert_intermediate_size"],
        "moe_layers": sparse_layers(hf),
    }
    return reading


def write_delta(config: MaxTextConfig) -> Json:
    attending = next(
        (layer.attention for layer in layers(config) if hasattr(layer.attention, "rope")), None
    )
    return dense_config(config) | {
        "linear_conv_kernel_dim": config.gdn_conv_kernel_dim,
        "linear_key_head_dim": config.gdn_key_head_dim,
        "linear_value_head_dim": config.gdn_value_head_dim,
        "linear_num_key_heads": config.gdn_num_key_heads,
        "linear_num_value_heads": config.gdn_num_value_heads,
        "layer_types": their_kinds(config),
        "rope_parameters": their_rope(attending.rope) if attending else None,
    }


def write_sparse_delta(config: MaxTextConfig) -> Json:
    shared = [
        layer.mlp.shared.width for layer in layers(config) if getattr(layer.mlp, "shared", None)
    ]
    width = shared[0] if shared else 0
    return write_delta(config) | write_experts(config) | {"shared_expert_intermediate_size": width}


def delta_rules(config: MaxTextConfig, projections: list[Rule]) -> list[Rule]:
    """Every layer's rules; a Gated DeltaNet's projections differ between the two families."""
    net, attention, ours = (
        "model.layers.{i}.linear_attn.",
        "model.layers.{i}.self_attn.",
        "layers/{i}/attention/",
    )
    channels = tuple(f"{ours}conv_{name}" for name in ("query", "key", "value"))
    attends = [hasattr(layer.attention, "rope") for layer in layers(config)]
    attending = [
        # A head's query and its gate lie together.
        Rule(
            f"{attention}q_proj.weight",
            (f"{ours}query/kernel", f"{ours}output_gate/kernel"),
            "(h w) e -> e h w",
            join="w",
        ),
        Rule(
            f"{attention}q_proj.bias",
            (f"{ours}query/bias", f"{ours}output_gate/bias"),
            "(h w) -> h w",
            join="w",
        ),
        *[
            rule
            for rule in attention_rules(config)
            if not any("q_proj" in name for name in rule.their_names)
        ],
    ]
    nets = [
        *projections,
        Rule(f"{net}conv1d.weight", channels, "(k w) 1 t -> t k w", join=0),
        Rule(f"{net}A_log", f"{ours}log_rate", "(k g) -> k g"),
        Rule(f"{net}dt_bias", f"{ours}step_bias", "(k g) -> k g"),
        Rule(f"{net}norm.weight", f"{ours}norm/scale", "d -> d"),
        Rule(f"{net}out_proj.weight", f"{ours}out/kernel", "e (k w) -> k w e"),
    ]
    return [
        *outer_rules(),
        *norm_rules(PRE_NORMS),
        *in_layers([i for i, one in enumerate(attends) if one], attending),
        *in_layers([i for i, one in enumerate(attends) if not one], nets),
        *mlp_rules(),
        *experts("model.layers.{i}.mlp."),
    ]


def qwen3_next_rules(config: MaxTextConfig) -> list[Rule]:
    net, ours = "model.layers.{i}.linear_attn.", "layers/{i}/attention/"
    wide = tuple(f"{ours}{name}/kernel" for name in ("query", "key", "value", "gate"))
    narrow = (f"{ours}beta/kernel", f"{ours}decay/kernel")
    return delta_rules(
        config,
        [
            Rule(f"{net}in_proj_qkvz.weight", wide, "(k w) e -> e k w", join="w"),
            Rule(f"{net}in_proj_ba.weight", narrow, "(k w) e -> e k w", join="w"),
        ],
    )


def qwen3_5_rules(config: MaxTextConfig) -> list[Rule]:
    net, ours = "model.layers.{i}.linear_attn.", "layers/{i}/attention/"
    wide = tuple(f"{ours}{name}/kernel" for name in ("query", "key", "value"))
    return delta_rules(
        config,
        [
            Rule(f"{net}in_proj_qkv.weight", wide, "(k w) e -> e k w", join=0),
            Rule(f"{net}in_proj_z.weight", f"{ours}gate/kernel", "(k w) e -> e k w"),
            Rule(f"{net}in_proj_b.weight", f"{ours}beta/kernel", "(k w) e -> e k w"),
            Rule(f"{net}in_proj_a.weight", f"{ours}decay/kernel", "(k w) e -> e k w"),
        ],
    )


def has_experts(config: MaxTextConfig) -> bool:
    return config.num_experts > 1


MTP = (r"mtp\..*",)  # layers that predict further tokens; transformers leaves them out

TABLES = (
    Table(("Qwen2ForCausalLM",), "qwen2", "qwen2", read_qwen2, write_qwen2, dense_rules),
    Table(("Qwen3ForCausalLM",), "qwen3", "qwen3", read_qwen3, write_qwen3, dense_rules),
    Table(("Qwen3MoeForCausalLM",), "qwen3_moe", "qwen3_moe", read_qwen3_moe, write_qwen3_moe, qwen3_moe_rules),
    Table(("Qwen3NextForCausalLM",), "qwen3_next", "qwen3_next", lambda hf: read_sparse_delta(hf, "qwen3_next"),
          write_sparse_delta, qwen3_next_rules, ignored=MTP),
    Table(("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"), "qwen3_5_moe_text", "qwen3_5",
          lambda hf: read_sparse_delta(hf, "qwen3_5"), write_sparse_delta, qwen3_5_rules, has_experts, MTP),
    Table(("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"), "qwen3_5_text", "qwen3_5",
          lambda hf: read_delta(hf, "qwen3_5"), write_delta, qwen3_5_rules, lambda c: not has_experts(c), MTP),
)  # fmt: skip
