"""gpt-oss, OLMo 3, and GPT-2, whose weights our GPT-3 takes."""

from maxtext.checkpoint.convert.families.table import (
    PRE_NORMS,
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
    rope_parameters,
    their_activation,
    their_kinds,
    their_rope,
)
from maxtext.checkpoint.convert.rules import Rule
from maxtext.common.errors import UserError
from maxtext.configs.types import MaxTextConfig
from maxtext.models.registry import layers

GPT_OSS_ROPE = {
    "rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False, "original_max_position_embeddings": 4096,
}  # fmt: skip


def read_gpt_oss(hf: Json) -> Reading:
    need(hf, swiglu_alpha=1.702, hidden_act="silu")
    if not hf.get("rope_parameters") and not hf.get("rope_scaling"):
        hf = hf | {"rope_parameters": GPT_OSS_ROPE}
    rope = one_rope(hf)
    keys = dense_keys(hf, "gpt_oss")
    keys |= {
        "mlp_activations": ["sigmoid", "linear"],
        "mlp_activations_limit": hf["swiglu_limit"],
        "base_moe_mlp_dim": hf["intermediate_size"],
        "num_experts": hf["num_local_experts"],
        "num_experts_per_tok": hf["num_experts_per_tok"],
        "routed_bias": True,
        "mlp_bias": True,
        "attention_sink": True,
        "sliding_window_size": hf["sliding_window"] or 0,
    }
    return Reading(
        keys | rope.keys,
        {"layer_kinds": kinds(hf, lambda i: "full" if i % 2 else "sliding")} | rope.facts,
    )


def write_gpt_oss(config: MaxTextConfig) -> Json:
    return dense_config(config, hidden_act="silu") | {
        "intermediate_size": config.moe_mlp_dim,
        "swiglu_limit": config.mlp_activations_limit,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "sliding_window": config.sliding_window_size,
        "layer_types": their_kinds(config),
        "rope_parameters": their_rope(layers(config)[0].attention.rope),
    }


def gpt_oss_rules(config: MaxTextConfig) -> list[Rule]:
    mlp, ours = "model.layers.{i}.mlp.", "layers/{i}/mlp/"
    return [
        *outer_rules(),
        *norm_rules(PRE_NORMS),
        *attention_rules(config),
        Rule(f"{mlp}router.weight", f"{ours}router/kernel", "x e -> e x"),
        Rule(f"{mlp}router.bias", f"{ours}router/bias", "x -> x"),
        # Gate and up take turns.
        *packed_expert_rules(f"{mlp}experts.", ours, "x e (m b) -> b x e m", "x m e -> x m e"),
        Rule(f"{mlp}experts.gate_up_proj_bias", f"{ours}experts/wi_{{b}}/bias", "x (m b) -> b x m"),
        Rule(f"{mlp}experts.down_proj_bias", f"{ours}experts/wo/bias", "x e -> x e"),
    ]


def read_olmo3(hf: Json) -> Reading:
    parameters = rope_parameters(hf)
    if "full_attention" in parameters:
        full, sliding = parameters["full_attention"], parameters["sliding_attention"]
    else:
        full, sliding = parameters, {"rope_theta": parameters.get("rope_theta")}
    ropes = {"full": rope_fields(hf, full), "sliding": rope_fields(hf, sliding)}
    keys = dense_keys(hf, "olmo3") | rope_keys(ropes["full"])
    keys |= {"use_qk_norm": True, "sliding_window_size": hf["sliding_window"] or 0}
    return Reading(
        keys,
        {"layer_kinds": kinds(hf, lambda i: "sliding" if (i + 1) % 4 else "full"), "rope": ropes},
    )


def write_olmo3(config: MaxTextConfig) -> Json:
    ropes: Json = {}
    for spec, kind in zip(layers(config), their_kinds(config), strict=True):
        ropes.setdefault(kind, their_rope(spec.attention.rope))
    only = next(iter(ropes.values()))
    return dense_config(config) | {
        "layer_types": their_kinds(config),
        "sliding_window": config.sliding_window_size,
        "rope_parameters": {
            kind: ropes.get(kind, only) for kind in ("full_attention", "sliding_attention")
        },
    }


def olmo3_rules(config: MaxTextConfig) -> list[Rule]:
    outputs = {
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_mlp_norm",
    }
    return outer_rules() + norm_rules(outputs) + attention_rules(config) + mlp_rules()


def read_gpt2(hf: Json) -> Reading:
    need(
        hf,
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
    )
    width, heads = hf["n_embd"], hf["n_head"]
    keys = {
        "decoder_block": "gpt3",
        "base_emb_dim": width,
        "base_num_query_heads": heads,
        "base_num_kv_heads": heads,
        "head_dim": width // heads,
        "base_mlp_dim": hf.get("n_inner") or 4 * width,
        "base_num_decoder_layers": hf["n_layer"],
        "vocab_size": hf["vocab_size"],
        "mlp_activations": [activation(hf["activation_function"])],
        "normalization_layer_epsilon": hf["layer_norm_epsilon"],
        "trainable_position_size": hf["n_positions"],
        "logits_via_embedding": hf["tie_word_embeddings"],
        "normalize_embedding_logits": False,
        "fused_qkv": True,
        "enable_dropout": False,
    }
    return Reading(keys)


def write_gpt2(config: MaxTextConfig) -> Json:
    name = their_activation(config)
    if config.num_query_heads * config.head_dim != config.emb_dim:
        raise UserError(
            f"GPT-2's heads are as wide as the model together: head_dim={config.head_dim} must be "
            f"{config.emb_dim} / {config.num_query_heads}"
        )
    return {
        "n_embd": config.emb_dim,
        "n_head": config.num_query_heads,
        "n_inner": config.mlp_dim,
        "n_layer": config.num_decoder_layers,
        "n_positions": config.trainable_position_size,
        "vocab_size": config.vocab_size,
        "activation_function": "gelu_new" if name == "gelu_pytorch_tanh" else name,
        "layer_norm_epsilon": config.normalization_layer_epsilon,
        "tie_word_embeddings": config.logits_via_embedding,
    }


def gpt2_rules(config: MaxTextConfig) -> list[Rule]:
    """GPT-2 keeps matrices from inputs to outputs, and queries, keys and values side by side."""
    layer, ours = "transformer.h.{i}.", "layers/{i}/"
    parts = tuple(f"{ours}attention/{name}" for name in ("query", "key", "value"))
    rules = [
        Rule("transformer.wte.weight", "embedder/embedding", "v e -> v e"),
        Rule("transformer.wpe.weight", "positions/embedding", "p e -> p e"),
        Rule("lm_head.weight", "head/kernel", "v e -> e v"),
        Rule(f"{layer}attn.c_attn.weight", f"{ours}attention/qkv/kernel", "e (g k d) -> e k g d"),
        Rule(f"{layer}attn.c_attn.bias", f"{ours}attention/qkv/bias", "(g k d) -> k g d"),
        Rule(
            f"{layer}attn.c_attn.weight",
            tuple(f"{part}/kernel" for part in parts),
            "e (h d) -> e h d",
            join=1,
        ),
        Rule(
            f"{layer}attn.c_attn.bias",
            tuple(f"{part}/bias" for part in parts),
            "(h d) -> h d",
            join=0,
        ),
        Rule(f"{layer}attn.c_proj.weight", f"{ours}attention/out/kernel", "(h d) e -> h d e"),
        Rule(f"{layer}attn.c_proj.bias", f"{ours}attention/out/bias", "e -> e"),
    ]
    for theirs, name in (("c_fc", "wi"), ("c_proj", "wo")):
        rules.append(Rule(f"{layer}mlp.{theirs}.weight", f"{ours}mlp/{name}/kernel", "n o -> n o"))
        rules.append(Rule(f"{layer}mlp.{theirs}.bias", f"{ours}mlp/{name}/bias", "o -> o"))
    norms = {f"{layer}ln_1": f"{ours}attention_norm", f"{layer}ln_2": f"{ours}mlp_norm"}
    for theirs, name in (norms | {"transformer.ln_f": "final_norm"}).items():
        rules.append(Rule(f"{theirs}.weight", f"{name}/scale", "e -> e"))
        rules.append(Rule(f"{theirs}.bias", f"{name}/bias", "e -> e"))
    return rules


TABLES = (
    Table(("GptOssForCausalLM",), "gpt_oss", "gpt_oss", read_gpt_oss, write_gpt_oss, gpt_oss_rules),
    Table(("Olmo3ForCausalLM",), "olmo3", "olmo3", read_olmo3, write_olmo3, olmo3_rules),
    Table(("GPT2LMHeadModel",), "gpt2", "gpt3", read_gpt2, write_gpt2, gpt2_rules,
          ignored=(r".*\.attn\.(masked_)?bias",)),
)  # fmt: skip
