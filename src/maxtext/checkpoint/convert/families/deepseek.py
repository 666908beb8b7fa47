"""DeepSeek 2, 3 and 3.2; Kimi K2 has the classes of DeepSeek 3."""

from dataclasses import replace

from maxtext.checkpoint.convert.families.table import (
    PRE_NORMS,
    Json,
    Reading,
    Table,
    dense_config,
    dense_keys,
    expert_rules,
    mlp_rules,
    need,
    norm_rules,
    one_rope,
    outer_rules,
    rope_parameters,
    their_rope,
    yarn_temperature,
)
from maxtext.checkpoint.convert.rules import Rule
from maxtext.common.errors import UserError
from maxtext.configs.types import MaxTextConfig
from maxtext.models.registry import layers

AHEAD_NORMS = {"enorm": "embedding_norm", "hnorm": "hidden_norm", "shared_head.norm": "output_norm"}
BUFFERS = (r".*rotary_emb\.inv_freq",)  # in Kimi K2's folders


def read_shared(hf: Json, interleave: bool = True) -> Reading:
    """What the three versions have in common."""
    rope = one_rope(hf, interleave=interleave)
    keys = dense_keys(hf, "deepseek") | rope.keys
    del keys["head_dim"]  # heads have three sizes of their own
    keys |= {
        "attention_type": "mla",
        "q_lora_rank": hf["q_lora_rank"] or 0,
        "kv_lora_rank": hf["kv_lora_rank"],
        "qk_nope_head_dim": hf["qk_nope_head_dim"],
        "qk_rope_head_dim": hf["qk_rope_head_dim"],
        "v_head_dim": hf["v_head_dim"],
        "base_moe_mlp_dim": hf["moe_intermediate_size"],
        "num_experts": hf["n_routed_experts"],
        "num_experts_per_tok": hf["num_experts_per_tok"],
        "shared_experts": hf["n_shared_experts"] or 0,
        "routed_scaling_factor": hf["routed_scaling_factor"],
        "n_routing_groups": hf.get("n_group") or -1,
        "topk_routing_group": hf.get("topk_group") or -1,
        "first_num_dense_layers": min(hf["first_k_dense_replace"], hf["num_hidden_layers"]),
    }
    scale = (hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"]) ** -0.5
    parameters = rope_parameters(hf)
    if parameters.get("rope_type", "default") != "default" and parameters.get("mscale_all_dim"):
        scale *= yarn_temperature(parameters["factor"], parameters["mscale_all_dim"]) ** 2
    return Reading(keys, {"softmax_scale": scale} | rope.facts)


def read_deepseek2(hf: Json) -> Reading:
    need(hf, scoring_func="softmax")
    reading = read_shared(hf)
    method = hf.get("topk_method") or "greedy"
    if method == "greedy":
        reading.keys |= {"n_routing_groups": -1, "topk_routing_group": -1}
    elif method != "group_limited_greedy":
        raise UserError(
            f"config.json: topk_method={method!r} is not supported: greedy and group_limited_greedy are"
        )
    reading.keys |= {"routed_score_func": "softmax"}
    return reading


def read_deepseek3(hf: Json) -> Reading:
    need(hf, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    reading = read_shared(hf, bool(hf.get("rope_interleave", True)))
    reading.keys |= {"routed_score_func": "sigmoid", "routed_bias": True}
    reading.facts["normalise_chosen"] = bool(hf["norm_topk_prob"])
    return reading


def read_deepseek32(hf: Json) -> Reading:
    reading = read_deepseek3(hf)
    reading.keys |= {
        "use_indexer": True,
        "indexer_n_heads": hf["index_n_heads"],
        "indexer_head_dim": hf["index_head_dim"],
        "indexer_topk": hf["index_topk"],
    }
    if hf.get("mlp_layer_types"):
        reading.facts["moe_layers"] = [kind == "sparse" for kind in hf["mlp_layer_types"]]
    return reading


def write_shared(config: MaxTextConfig) -> Json:
    specs = layers(config)
    parameters = their_rope(specs[0].attention.rope)
    plain = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    extra = (
        specs[0].attention.scale / plain
    ) ** 0.5  # the temperature whose square is on the scale
    if abs(extra - 1) > 1e-9:
        if parameters["rope_type"] != "yarn":
            raise UserError(
                "a softmax scale of its own needs rope_type=yarn in a DeepSeek config.json"
            )
        # Their scale is what attention_factor does not say: (0.1 m ln factor + 1)², m =
        # mscale_all_dim.
        parameters["mscale_all_dim"] = (extra - 1) / (yarn_temperature(parameters["factor"]) - 1)
    dense = next((i for i, spec in enumerate(specs) if hasattr(spec.mlp, "router")), len(specs))
    written = dense_config(config) | {
        "q_lora_rank": config.q_lora_rank or None,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "num_key_value_heads": config.num_query_heads,
        "moe_intermediate_size": config.moe_mlp_dim,
        "n_routed_experts": config.num_experts,
        "n_shared_experts": config.shared_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "routed_scaling_factor": config.routed_scaling_factor,
        "n_group": config.n_routing_groups if config.n_routing_groups > 0 else 1,
        "topk_group": config.topk_routing_group if config.topk_routing_group > 0 else 1,
        "first_k_dense_replace": dense,
        "rope_parameters": parameters,
    }
    del written["head_dim"]
    return written


def write_deepseek2(config: MaxTextConfig) -> Json:
    grouped = config.n_routing_groups > 1
    return write_shared(config) | {"topk_method": "group_limited_greedy" if grouped else "greedy"}


def write_deepseek3(config: MaxTextConfig) -> Json:
    router = next(spec.mlp.router for spec in layers(config) if hasattr(spec.mlp, "router"))
    interleave = layers(config)[0].attention.rope.interleave
    return write_shared(config) | {
        "norm_topk_prob": router.normalise,
        "rope_interleave": interleave,
        "num_nextn_predict_layers": config.mtp_num_layers,
    }


def write_deepseek32(config: MaxTextConfig) -> Json:
    kinds = ["sparse" if hasattr(spec.mlp, "router") else "dense" for spec in layers(config)]
    return write_deepseek3(config) | {
        "index_n_heads": config.indexer_n_heads,
        "index_head_dim": config.indexer_head_dim,
        "index_topk": config.indexer_topk,
        "mlp_layer_types": kinds,
    }


def deepseek_rules(config: MaxTextConfig) -> list[Rule]:
    return [*outer_rules(), *layer_rules(), *ahead_rules(config)]


def layer_rules() -> list[Rule]:
    theirs, ours = "model.layers.{i}.self_attn.", "layers/{i}/attention/"
    mlp, our_mlp = "model.layers.{i}.mlp.", "layers/{i}/mlp/"
    return [
        *norm_rules(PRE_NORMS),
        Rule(f"{theirs}q_proj.weight", f"{ours}query/kernel", "(h w) e -> e h w"),
        Rule(f"{theirs}q_a_proj.weight", f"{ours}query_a/kernel", "r e -> e r"),
        Rule(f"{theirs}q_a_proj.bias", f"{ours}query_a/bias", "r -> r"),
        Rule(f"{theirs}q_a_layernorm.weight", f"{ours}query_norm/scale", "r -> r"),
        Rule(f"{theirs}q_b_proj.weight", f"{ours}query_b/kernel", "(h w) r -> r h w"),
        Rule(f"{theirs}kv_a_proj_with_mqa.weight", f"{ours}kv_a/kernel", "r e -> e r"),
        Rule(f"{theirs}kv_a_proj_with_mqa.bias", f"{ours}kv_a/bias", "r -> r"),
        Rule(f"{theirs}kv_a_layernorm.weight", f"{ours}kv_norm/scale", "r -> r"),
        Rule(f"{theirs}kv_b_proj.weight", f"{ours}kv_b/kernel", "(h w) r -> r h w"),
        Rule(f"{theirs}o_proj.weight", f"{ours}out/kernel", "e (h d) -> h d e"),
        Rule(f"{theirs}o_proj.bias", f"{ours}out/bias", "e -> e"),
        Rule(f"{theirs}indexer.wq_b.weight", f"{ours}indexer/query/kernel", "(h d) r -> r h d"),
        Rule(f"{theirs}indexer.wk.weight", f"{ours}indexer/key/kernel", "d e -> e d"),
        Rule(f"{theirs}indexer.k_norm.weight", f"{ours}indexer/key_norm/scale", "d -> d"),
        Rule(f"{theirs}indexer.k_norm.bias", f"{ours}indexer/key_norm/bias", "d -> d"),
        Rule(f"{theirs}indexer.weights_proj.weight", f"{ours}indexer/weight/kernel", "h e -> e h"),
        *mlp_rules(),
        Rule(f"{mlp}gate.weight", f"{our_mlp}router/kernel", "x e -> e x"),
        Rule(f"{mlp}gate.e_score_correction_bias", f"{our_mlp}router/bias", "x -> x"),
        *expert_rules(f"{mlp}experts."),
        *mlp_rules(f"{mlp}shared_experts.", f"{our_mlp}shared/"),
    ]


def ahead_rules(config: MaxTextConfig) -> list[Rule]:
    """Of the layers that predict further tokens (mtp_num_layers): with them the numbering goes
    on.
    """
    rules = []
    for layer in range(config.mtp_num_layers):
        theirs, ours = f"model.layers.{config.num_decoder_layers + layer}.", f"mtp/layers/{layer}/"
        rules.append(Rule(f"{theirs}eh_proj.weight", f"{ours}projection/kernel", "e f -> f e"))
        for their_norm, our_norm in AHEAD_NORMS.items():
            rules.append(Rule(f"{theirs}{their_norm}.weight", f"{ours}{our_norm}/scale", "e -> e"))
        for rule in layer_rules():
            their_names = tuple(
                name.replace("model.layers.{i}.", theirs) for name in rule.their_names
            )
            our_names = tuple(
                name.replace("layers/{i}/", f"{ours}block/") for name in rule.our_names
            )
            rules.append(replace(rule, theirs=their_names, ours=our_names))
    return rules


def ignored_layers(config: MaxTextConfig) -> tuple[str, ...]:
    """Layers beyond those of the model; and in those that predict further tokens, the copies of
    embedding and head.
    """
    known = "|".join(map(str, range(config.num_decoder_layers + config.mtp_num_layers)))
    return (
        rf"model\.layers\.(?!({known})\.)\d+\..*",
        r"model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight",
    )


def version(config: MaxTextConfig) -> int:
    if config.use_indexer:
        return 32
    return 3 if config.routed_score_func == "sigmoid" else 2


TABLES = (
    Table(("DeepseekV2ForCausalLM",), "deepseek_v2", "deepseek", read_deepseek2, write_deepseek2, deepseek_rules,
          lambda config: version(config) == 2),
    Table(("DeepseekV3ForCausalLM",), "deepseek_v3", "deepseek", read_deepseek3, write_deepseek3, deepseek_rules,
          lambda config: version(config) == 3, BUFFERS, ignored_layers),
    Table(("DeepseekV32ForCausalLM",), "deepseek_v32", "deepseek", read_deepseek32, write_deepseek32, deepseek_rules,
          lambda config: version(config) == 32, BUFFERS, ignored_layers),
)  # fmt: skip
