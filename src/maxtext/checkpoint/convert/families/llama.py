"""Llama 2 to 4, Mistral and Mixtral."""

from maxtext.checkpoint.convert.families.table import (
    PRE_NORMS,
    Json,
    Reading,
    Table,
    attention_rules,
    dense_config,
    dense_keys,
    expert_rules,
    kinds,
    mlp_rules,
    need,
    norm_rules,
    one_rope,
    outer_rules,
    packed_expert_rules,
    their_kinds,
    their_rope,
)
from maxtext.checkpoint.convert.rules import Rule
from maxtext.configs.types import MaxTextConfig
from maxtext.models.registry import layers


def read_llama(hf: Json) -> Reading:
    rope = one_rope(hf)
    keys = dense_keys(hf, "llama2")
    return Reading(keys | rope.keys, rope.facts)


def write_llama(config: MaxTextConfig) -> Json:
    rope = their_rope(layers(config)[0].attention.rope)
    return dense_config(config) | {"mlp_bias": config.mlp_bias, "rope_parameters": rope}


def dense_rules(config: MaxTextConfig) -> list[Rule]:
    return outer_rules() + norm_rules(PRE_NORMS) + attention_rules(config) + mlp_rules()


def read_mistral(hf: Json) -> Reading:
    rope = one_rope(hf)
    keys = dense_keys(hf, "mistral") | {"sliding_window_size": hf["sliding_window"] or 0}
    return Reading(keys | rope.keys, rope.facts)


def write_mistral(config: MaxTextConfig) -> Json:
    return write_llama(config) | {"sliding_window": config.sliding_window_size or None}


def read_mixtral(hf: Json) -> Reading:
    rope = one_rope(hf)
    keys = dense_keys(hf, "mixtral")
    keys |= {
        "base_moe_mlp_dim": hf["intermediate_size"],
        "num_experts": hf["num_local_experts"],
        "num_experts_per_tok": hf["num_experts_per_tok"],
        "sliding_window_size": hf.get("sliding_window") or 0,
    }
    return Reading(keys | rope.keys, rope.facts)


def write_mixtral(config: MaxTextConfig) -> Json:
    return write_mistral(config) | {
        "intermediate_size": config.moe_mlp_dim,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
    }


def mixtral_rules(config: MaxTextConfig) -> list[Rule]:
    moe = "model.layers.{i}.block_sparse_moe."
    router = Rule(f"{moe}gate.weight", "layers/{i}/mlp/router/kernel", "x e -> e x")
    return [*dense_rules(config), router, *expert_rules(f"{moe}experts.", ("w1", "w3", "w2"))]


def read_llama4(hf: Json) -> Reading:
    need(hf, router_jitter_noise=0.0)
    rope = one_rope(hf, interleave=True)
    count, step = hf["num_hidden_layers"], hf["interleave_moe_layer_step"]
    interval = hf["no_rope_layer_interval"]
    turns = [
        bool(turn)
        for turn in hf.get("no_rope_layers") or [(i + 1) % interval for i in range(count)]
    ]
    moe = hf.get("moe_layers")
    experts = [i in moe if moe is not None else (i + 1) % step == 0 for i in range(count)]
    keys = dense_keys(hf, "llama4")
    keys |= {
        "base_mlp_dim": hf["intermediate_size_mlp"],
        "base_moe_mlp_dim": hf["intermediate_size"],
        "num_experts": hf["num_local_experts"],
        "num_experts_per_tok": hf["num_experts_per_tok"],
        "shared_experts": 1,
        "use_qk_norm": hf["use_qk_norm"],
        "nope_layer_interval": interval,
        "interleave_moe_layer_step": step,
        "temperature_tuning": bool(hf["attn_temperature_tuning"]),
        "chunk_attn_window_size": hf["attention_chunk_size"] or 0,
    }
    facts = {
        "rope_layers": turns,
        "moe_layers": experts,
        "layer_kinds": kinds(hf, lambda i: "chunk" if turns[i] else "full"),
        "temperature_scale": hf["attn_scale"],
        "temperature_length": hf["floor_scale"],
    }
    return Reading(keys | rope.keys, facts | rope.facts)


def write_llama4(config: MaxTextConfig) -> Json:
    specs = layers(config)
    turns = [spec.attention.rope is not None for spec in specs]
    rope = next((spec.attention.rope for spec in specs if spec.attention.rope is not None), None)
    return dense_config(config) | {
        "intermediate_size": config.moe_mlp_dim,
        "intermediate_size_mlp": config.mlp_dim,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "use_qk_norm": config.use_qk_norm,
        "no_rope_layers": [int(turn) for turn in turns],
        "moe_layers": [i for i, spec in enumerate(specs) if hasattr(spec.mlp, "router")],
        "layer_types": their_kinds(config),
        "attention_chunk_size": config.chunk_attn_window_size,
        "attn_temperature_tuning": config.temperature_tuning,
        "attn_scale": config.architecture.temperature_scale,
        "floor_scale": config.architecture.temperature_length,
        "rope_parameters": their_rope(rope) if rope else None,
    }


def llama4_rules(config: MaxTextConfig) -> list[Rule]:
    feed, ours = "model.layers.{i}.feed_forward.", "layers/{i}/mlp/"
    return [
        *outer_rules(),
        *norm_rules(PRE_NORMS),
        *attention_rules(config),
        *mlp_rules(feed),
        Rule(f"{feed}router.weight", f"{ours}router/kernel", "x e -> e x"),
        *mlp_rules(f"{feed}shared_expert.", f"{ours}shared/"),
        *packed_expert_rules(f"{feed}experts.", ours, "x e (b m) -> b x e m", "x m e -> x m e"),
    ]


TABLES = (
    Table(("LlamaForCausalLM",), "llama", "llama2", read_llama, write_llama, dense_rules,
          ignored=(r".*rotary_emb\.inv_freq",)),
    Table(("MistralForCausalLM",), "mistral", "mistral", read_mistral, write_mistral, dense_rules),
    Table(("MixtralForCausalLM",), "mixtral", "mixtral", read_mixtral, write_mixtral, mixtral_rules),
    Table(("Llama4ForCausalLM", "Llama4ForConditionalGeneration"), "llama4_text", "llama4", read_llama4, write_llama4,
          llama4_rules),
)  # fmt: skip
