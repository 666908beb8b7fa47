"""DeepSeek 2, 3 and 3.2; Kimi K2 has the classes of DeepSeek 3."""

from dataclasses import replace

from maxtext.common.errors import UserError
from maxtext.configs.types import MaxTextConfig
from maxtext.hf.config_json import (
    HfMapping,
    Json,
    ModelSettings,
    dense_keys,
    size_defaults,
    uniform_rope,
)
from maxtext.hf.layer_rules import (
    HF_LAYER,
    PRE_NORMS,
    expert_rules,
    mlp_rules,
    norm_rules,
    outer_rules,
)
from maxtext.hf.rope_parameters import required, rope_parameters, yarn_temperature
from maxtext.hf.rules import Rule
from maxtext.hf.schema import COUNT, NULL, POSITIVE, SIZE, SWITCH, TEXT, all_of, list_of, per_layer
from maxtext.models.hf_config import LayerSpecs, dense_entries, first_rope_entry, has_experts

MULTI_TOKEN_NORMS = {
    "enorm": "embedding_norm",
    "hnorm": "hidden_norm",
    "shared_head.norm": "output_norm",
}
BUFFERS = (r".*rotary_emb\.inv_freq",)  # in Kimi K2's folders


def read_shared(hf_config: Json, interleave: bool = True) -> ModelSettings:
    """The settings that the three versions share."""
    rope = uniform_rope(hf_config, interleave=interleave)
    keys = dense_keys(hf_config, "deepseek") | rope.keys
    del keys["head_dim"]  # heads have three sizes of their own
    keys |= {
        "attention_type": "mla",
        "q_lora_rank": hf_config["q_lora_rank"] or 0,
        "kv_lora_rank": hf_config["kv_lora_rank"],
        "qk_nope_head_dim": hf_config["qk_nope_head_dim"],
        "qk_rope_head_dim": hf_config["qk_rope_head_dim"],
        "v_head_dim": hf_config["v_head_dim"],
        "base_moe_mlp_dim": hf_config["moe_intermediate_size"],
        "num_experts": hf_config["n_routed_experts"],
        "num_experts_per_tok": hf_config["num_experts_per_tok"],
        "shared_experts": hf_config["n_shared_experts"] or 0,
        "routed_scaling_factor": hf_config["routed_scaling_factor"],
        "n_routing_groups": hf_config["n_group"] or -1,
        "topk_routing_group": hf_config["topk_group"] or -1,
        "first_num_dense_layers": min(
            hf_config["first_k_dense_replace"], hf_config["num_hidden_layers"]
        ),
    }
    scale = (hf_config["qk_nope_head_dim"] + hf_config["qk_rope_head_dim"]) ** -0.5
    parameters = rope_parameters(hf_config)
    if parameters["rope_type"] != "default" and parameters.get("mscale_all_dim"):
        factor = required(parameters, "factor")
        scale *= yarn_temperature(factor, parameters["mscale_all_dim"]) ** 2
    return ModelSettings(keys, {"softmax_scale": scale} | rope.hf_attributes)


def read_deepseek2(hf_config: Json) -> ModelSettings:
    settings = read_shared(hf_config)
    method = hf_config["topk_method"] or "greedy"
    if method == "greedy":
        settings.keys |= {"n_routing_groups": -1, "topk_routing_group": -1}
    elif method != "group_limited_greedy":
        raise UserError(
            f"config.json: topk_method={method!r} is not supported: greedy and "
            "group_limited_greedy are"
        )
    settings.keys |= {"routed_score_func": "softmax"}
    return settings


def read_deepseek3(hf_config: Json) -> ModelSettings:
    settings = read_shared(hf_config, bool(hf_config.get("rope_interleave", True)))
    settings.keys |= {"routed_score_func": "sigmoid", "routed_bias": True}
    settings.hf_attributes["normalise_chosen"] = bool(hf_config["norm_topk_prob"])
    return settings


def read_deepseek32(hf_config: Json) -> ModelSettings:
    settings = read_deepseek3(hf_config)
    settings.keys |= {
        "use_indexer": True,
        "indexer_n_heads": hf_config["index_n_heads"],
        "indexer_head_dim": hf_config["index_head_dim"],
        "indexer_topk": hf_config["index_topk"],
    }
    if hf_config["mlp_layer_types"]:
        settings.hf_attributes["moe_layers"] = [
            kind == "sparse" for kind in hf_config["mlp_layer_types"]
        ]
    return settings


def write_shared(config: MaxTextConfig, layers: LayerSpecs) -> Json:
    parameters = first_rope_entry(layers)
    plain_scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    # YaRN's temperature, whose square multiplies the softmax scale.
    temperature = (layers[0].attention.scale / plain_scale) ** 0.5
    if abs(temperature - 1) > 1e-9:
        if parameters["rope_type"] != "yarn":
            raise UserError(
                "a softmax scale other than 1/√(head size) needs rope_type=yarn in a DeepSeek "
                "config.json"
            )
        # transformers multiplies the scale by (0.1 m ln factor + 1)², m = mscale_all_dim.
        yarn = yarn_temperature(parameters["factor"])
        parameters["mscale_all_dim"] = (temperature - 1) / (yarn - 1)
    num_dense = next((i for i, spec in enumerate(layers) if has_experts(spec)), len(layers))
    entries = dense_entries(config, layers) | {
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
        "first_k_dense_replace": num_dense,
        "rope_parameters": parameters,
    }
    del entries["head_dim"]
    return entries


def write_deepseek2(config: MaxTextConfig, layers: LayerSpecs) -> Json:
    grouped = config.n_routing_groups > 1
    return write_shared(config, layers) | {
        "topk_method": "group_limited_greedy" if grouped else "greedy"
    }


def write_deepseek3(config: MaxTextConfig, layers: LayerSpecs) -> Json:
    router = next(spec.mlp.router for spec in layers if has_experts(spec))
    interleave = layers[0].attention.rope.interleave
    return write_shared(config, layers) | {
        "norm_topk_prob": router.normalise,
        "rope_interleave": interleave,
        "num_nextn_predict_layers": config.mtp_num_layers,
    }


def write_deepseek32(config: MaxTextConfig, layers: LayerSpecs) -> Json:
    kinds = ["sparse" if has_experts(spec) else "dense" for spec in layers]
    return write_deepseek3(config, layers) | {
        "index_n_heads": config.indexer_n_heads,
        "index_head_dim": config.indexer_head_dim,
        "index_topk": config.indexer_topk,
        "mlp_layer_types": kinds,
    }


def deepseek_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[Rule]:
    return [*outer_rules(), *layer_rules(), *multi_token_rules(config)]


def layer_rules() -> list[Rule]:
    hf, native = f"{HF_LAYER}self_attn.", "layers/{i}/attention/"
    mlp, native_mlp = f"{HF_LAYER}mlp.", "layers/{i}/mlp/"
    return [
        *norm_rules(PRE_NORMS),
        Rule(f"{hf}q_proj.weight", f"{native}query/weight", "(h w) e -> e h w"),
        Rule(f"{hf}q_a_proj.weight", f"{native}query_a/weight", "r e -> e r"),
        Rule(f"{hf}q_a_proj.bias", f"{native}query_a/bias", "r -> r"),
        Rule(f"{hf}q_a_layernorm.weight", f"{native}query_norm/scale", "r -> r"),
        Rule(f"{hf}q_b_proj.weight", f"{native}query_b/weight", "(h w) r -> r h w"),
        Rule(f"{hf}kv_a_proj_with_mqa.weight", f"{native}kv_a/weight", "r e -> e r"),
        Rule(f"{hf}kv_a_proj_with_mqa.bias", f"{native}kv_a/bias", "r -> r"),
        Rule(f"{hf}kv_a_layernorm.weight", f"{native}kv_norm/scale", "r -> r"),
        Rule(f"{hf}kv_b_proj.weight", f"{native}kv_b/weight", "(h w) r -> r h w"),
        Rule(f"{hf}o_proj.weight", f"{native}out/weight", "e (h d) -> h d e"),
        Rule(f"{hf}o_proj.bias", f"{native}out/bias", "e -> e"),
        Rule(f"{hf}indexer.wq_b.weight", f"{native}indexer/query/weight", "(h d) r -> r h d"),
        Rule(f"{hf}indexer.wk.weight", f"{native}indexer/key/weight", "d e -> e d"),
        Rule(f"{hf}indexer.k_norm.weight", f"{native}indexer/key_norm/scale", "d -> d"),
        Rule(f"{hf}indexer.k_norm.bias", f"{native}indexer/key_norm/bias", "d -> d"),
        Rule(f"{hf}indexer.weights_proj.weight", f"{native}indexer/weight/weight", "h e -> e h"),
        *mlp_rules(),
        Rule(f"{mlp}gate.weight", f"{native_mlp}router/weight", "x e -> e x"),
        Rule(f"{mlp}gate.e_score_correction_bias", f"{native_mlp}router/bias", "x -> x"),
        *expert_rules(f"{mlp}experts."),
        *mlp_rules(f"{mlp}shared_experts.", f"{native_mlp}shared/"),
    ]


def multi_token_rules(config: MaxTextConfig) -> list[Rule]:
    """Rules of the multi-token prediction layers (mtp_num_layers), which are numbered after the
    decoder layers.
    """
    rules = []
    for layer in range(config.mtp_num_layers):
        hf, native = f"model.layers.{config.num_decoder_layers + layer}.", f"mtp/layers/{layer}/"
        rules.append(Rule(f"{hf}eh_proj.weight", f"{native}projection/weight", "e f -> f e"))
        for hf_norm, native_norm in MULTI_TOKEN_NORMS.items():
            rules.append(Rule(f"{hf}{hf_norm}.weight", f"{native}{native_norm}/scale", "e -> e"))
        for rule in layer_rules():
            hf_names = tuple(name.replace(HF_LAYER, hf) for name in rule.hf_names)
            native_names = tuple(
                name.replace("layers/{i}/", f"{native}block/") for name in rule.native_names
            )
            rules.append(replace(rule, hf=hf_names, native=native_names))
    return rules


def ignored_layers(config: MaxTextConfig) -> tuple[str, ...]:
    """Layers beyond those of the model, and the copies of embedding and head in multi-token
    prediction layers.
    """
    layers = "|".join(map(str, range(config.num_decoder_layers + config.mtp_num_layers)))
    return (
        rf"model\.layers\.(?!({layers})\.)\d+\..*",
        r"model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight",
    )


def version(config: MaxTextConfig) -> int:
    if config.use_indexer:
        return 32
    return 3 if config.routed_score_func == "sigmoid" else 2


LATENT_DEFAULTS = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "attention_bias": False,
}
DEEPSEEK3_DEFAULTS = LATENT_DEFAULTS | {
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 3,
}
# transformers does not read these: it has one router for the family.
SUPPORTED = {
    "scoring_func": (None, "sigmoid"),
    "topk_method": (None, "noaux_tc"),
    "moe_layer_freq": (None, 1),
}
FIELDS = {
    **all_of(SIZE, "n_routed_experts", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim"),
    **all_of(SIZE, "index_n_heads", "index_head_dim", "index_topk"),
    **all_of(COUNT, "first_k_dense_replace", "qk_nope_head_dim"),
    **all_of(SIZE | NULL, "n_group", "topk_group", "q_lora_rank"),
    **all_of(COUNT | NULL, "n_shared_experts", "num_nextn_predict_layers"),
    **all_of(POSITIVE, "routed_scaling_factor"),
    **all_of(SWITCH | NULL, "rope_interleave"),
    **all_of(TEXT | NULL, "topk_method", "scoring_func"),
    "mlp_layer_types": per_layer(list_of(TEXT, "names") | NULL),
}

MAPPINGS = (
    HfMapping(
        architectures=("DeepseekV2ForCausalLM",),
        model_type="deepseek_v2",
        read=read_deepseek2,
        write=write_deepseek2,
        rules=deepseek_rules,
        matches=lambda config: version(config) == 2,
        defaults=size_defaults(
            vocab_size=102_400,
            hidden_size=4096,
            intermediate_size=11_008,
            num_hidden_layers=32,
            num_attention_heads=32,
            max_position_embeddings=2048,
            **LATENT_DEFAULTS,
            n_routed_experts=64,
            n_shared_experts=2,
            moe_intermediate_size=1407,
            routed_scaling_factor=1.0,
            first_k_dense_replace=0,
            topk_method="greedy",
            n_group=None,
            topk_group=None,
            num_experts_per_tok=None,
        ),
        supported={
            "scoring_func": (None, "softmax"),
            "moe_layer_freq": (None, 1),
            "mlp_bias": (None, False),
        },
        aliases={"num_experts": "n_routed_experts"},
        fields=FIELDS,
    ),
    HfMapping(
        architectures=("DeepseekV3ForCausalLM",),
        model_type="deepseek_v3",
        read=read_deepseek3,
        write=write_deepseek3,
        rules=deepseek_rules,
        matches=lambda config: version(config) == 3,
        ignored=BUFFERS,
        ignored_in=ignored_layers,
        defaults=size_defaults(
            vocab_size=129_280,
            hidden_size=7168,
            intermediate_size=18_432,
            num_hidden_layers=61,
            num_attention_heads=128,
            max_position_embeddings=4096,
            **DEEPSEEK3_DEFAULTS,
            rope_interleave=True,
        ),
        supported=SUPPORTED,
        aliases={"num_local_experts": "n_routed_experts"},
    ),
    HfMapping(
        architectures=("DeepseekV32ForCausalLM",),
        model_type="deepseek_v32",
        read=read_deepseek32,
        write=write_deepseek32,
        rules=deepseek_rules,
        matches=lambda config: version(config) == 32,
        ignored=BUFFERS,
        ignored_in=ignored_layers,
        defaults=size_defaults(
            vocab_size=129_280,
            hidden_size=7168,
            intermediate_size=18_432,
            num_hidden_layers=61,
            num_attention_heads=128,
            max_position_embeddings=163_840,
            **DEEPSEEK3_DEFAULTS,
            index_n_heads=64,
            index_head_dim=128,
            index_topk=2048,
            mlp_layer_types=None,
        ),
        supported=SUPPORTED,
        aliases={"num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts"},
    ),
)
