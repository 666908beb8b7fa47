"""DeepSeek 2, 3 and 3.2; Kimi K2 has the classes of DeepSeek 3."""

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
    dense_fields,
    dense_keys,
    or_null,
    or_zero,
)
from maxtext.hf.layer_rules import (
    HF_LAYER,
    PRE_NORMS,
    expert_rules,
    mlp_rules,
    multi_token_rules,
    norm_rules,
    outer_rules,
)
from maxtext.hf.rope_parameters import required, rope_fields, rope_parameters, yarn_temperature
from maxtext.hf.rules import TensorRule
from maxtext.hf.schema import BOOL, COUNT, NULL, POSITIVE, SIZE, TEXT, list_of, per_layer
from maxtext.models.hf_config import (
    MTP_AFTER_NORMS,
    first_rope,
    has_experts,
    rope_entry,
    rope_entry_fields,
    rope_settings,
)

MULTI_TOKEN_NAMES = {
    "projection": "eh_proj",
    "embedding_norm": "enorm",
    "hidden_norm": "hnorm",
    "output_norm": "shared_head.norm",
}
BUFFERS = (r".*rotary_emb\.inv_freq",)  # in Kimi K2's folders


def read_attention(entries: Json) -> ModelSettings:
    """RoPE, and the softmax scale, which YaRN may change."""
    parameters = rope_parameters(entries)
    interleave = bool(entries.get("rope_interleave", True))
    settings = rope_settings(rope_fields(entries, parameters, interleave=interleave))
    scale = (entries["qk_nope_head_dim"] + entries["qk_rope_head_dim"]) ** -0.5
    if parameters["rope_type"] != "default" and parameters.get("mscale_all_dim"):
        factor = required(parameters, "factor")
        scale *= yarn_temperature(factor, parameters["mscale_all_dim"]) ** 2
    settings.hf_attributes["softmax_scale"] = scale
    return settings


def write_attention(config: MaxTextConfig, layers: LayerSpecs) -> Json:
    parameters = rope_entry(first_rope(layers))
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
    return {"num_key_value_heads": config.num_query_heads, "rope_parameters": parameters}


def read_dense_layers(entries: Json) -> ModelSettings:
    count = min(entries["first_k_dense_replace"], entries["num_hidden_layers"])
    return ModelSettings({"first_num_dense_layers": count})


def write_dense_layers(config: MaxTextConfig, layers: LayerSpecs) -> Json:
    sparse = (i for i, layer in enumerate(layers) if has_experts(layer))
    return {"first_k_dense_replace": next(sparse, len(layers))}


def read_routing2(entries: Json) -> ModelSettings:
    method = entries["topk_method"] or "greedy"
    if method == "greedy":
        return ModelSettings({"n_routing_groups": -1, "topk_routing_group": -1})
    if method != "group_limited_greedy":
        raise UserError(
            f"config.json: topk_method={method!r} is not supported: greedy and "
            "group_limited_greedy are"
        )
    return ModelSettings({})


def write_routing2(config: MaxTextConfig, layers: LayerSpecs) -> Json:
    grouped = config.n_routing_groups > 1
    return {"topk_method": "group_limited_greedy" if grouped else "greedy"}


def read_routing3(entries: Json) -> ModelSettings:
    return ModelSettings({}, {"normalise_chosen": bool(entries["norm_topk_prob"])})


def write_routing3(config: MaxTextConfig, layers: LayerSpecs) -> Json:
    router = next(layer.mlp.router for layer in layers if has_experts(layer))
    return {
        "norm_topk_prob": router.normalise,
        "num_nextn_predict_layers": config.mtp_num_layers,
    }


def read_mlp_types(entries: Json) -> ModelSettings:
    kinds = entries["mlp_layer_types"]
    return ModelSettings({}, {"moe_layers": [kind == "sparse" for kind in kinds]} if kinds else {})


def write_mlp_types(config: MaxTextConfig, layers: LayerSpecs) -> Json:
    kinds = ["sparse" if has_experts(layer) else "dense" for layer in layers]
    return {"mlp_layer_types": kinds}


def deepseek_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[TensorRule]:
    return [*outer_rules(), *layer_rules(), *numbered_mtp_rules(config, layer_rules())]


def layer_rules() -> list[TensorRule]:
    hf, native = f"{HF_LAYER}self_attn.", "layers/{i}/attention/"
    return [
        *norm_rules(PRE_NORMS),
        TensorRule(f"{hf}q_proj.weight", f"{native}query/weight", "(h w) e -> e h w"),
        TensorRule(f"{hf}q_a_proj.weight", f"{native}query_a/weight", "r e -> e r"),
        TensorRule(f"{hf}q_a_proj.bias", f"{native}query_a/bias", "r -> r"),
        TensorRule(f"{hf}q_a_layernorm.weight", f"{native}query_norm/scale", "r -> r"),
        TensorRule(f"{hf}q_b_proj.weight", f"{native}query_b/weight", "(h w) r -> r h w"),
        TensorRule(f"{hf}kv_a_proj_with_mqa.weight", f"{native}kv_a/weight", "r e -> e r"),
        TensorRule(f"{hf}kv_a_proj_with_mqa.bias", f"{native}kv_a/bias", "r -> r"),
        TensorRule(f"{hf}kv_a_layernorm.weight", f"{native}kv_norm/scale", "r -> r"),
        TensorRule(f"{hf}kv_b_proj.weight", f"{native}kv_b/weight", "(h w) r -> r h w"),
        TensorRule(f"{hf}o_proj.weight", f"{native}out/weight", "e (h d) -> h d e"),
        TensorRule(f"{hf}o_proj.bias", f"{native}out/bias", "e -> e"),
        TensorRule(f"{hf}indexer.wq_b.weight", f"{native}indexer/query/weight", "(h d) r -> r h d"),
        TensorRule(f"{hf}indexer.wk.weight", f"{native}indexer/key/weight", "d e -> e d"),
        TensorRule(f"{hf}indexer.k_norm.weight", f"{native}indexer/key_norm/scale", "d -> d"),
        TensorRule(f"{hf}indexer.k_norm.bias", f"{native}indexer/key_norm/bias", "d -> d"),
        TensorRule(
            f"{hf}indexer.weights_proj.weight", f"{native}indexer/weight/weight", "h e -> e h"
        ),
        *routed_mlp_rules(),
    ]


def routed_mlp_rules() -> list[TensorRule]:
    """The MLP of a dense layer, or the experts of another with one that all tokens share."""
    mlp, native_mlp = f"{HF_LAYER}mlp.", "layers/{i}/mlp/"
    return [
        *mlp_rules(),
        TensorRule(f"{mlp}gate.weight", f"{native_mlp}router/weight", "x e -> e x"),
        TensorRule(f"{mlp}gate.e_score_correction_bias", f"{native_mlp}router/bias", "x -> x"),
        *expert_rules(f"{mlp}experts."),
        *mlp_rules(f"{mlp}shared_experts.", f"{native_mlp}shared/"),
    ]


def numbered_mtp_rules(config: MaxTextConfig, rules: list[TensorRule]) -> list[TensorRule]:
    """Multi-token prediction layers are numbered after the decoder layers."""
    first, mtp_rules = config.num_decoder_layers, []
    for layer in range(config.mtp_num_layers):
        prefix = f"model.layers.{first + layer}."
        outer = {native: f"{prefix}{name}" for native, name in MULTI_TOKEN_NAMES.items()}
        mtp_rules += multi_token_rules(layer, rules, prefix, outer)
    return mtp_rules


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


def group_field(hf: str, key: str, default: int | None) -> Field:
    """A number of groups of experts: keys have -1 for none, config.json null or 1."""
    return Field(
        hf,
        key,
        default,
        to_native=lambda groups: groups or -1,
        to_hf=lambda groups: groups if groups > 0 else 1,
        kind=SIZE | NULL,
    )


LATENT_FIELDS = (
    Field("head_dim"),  # heads have three sizes of their own
    Field("q_lora_rank", "q_lora_rank", 1536, to_native=or_zero, to_hf=or_null, kind=SIZE | NULL),
    Field("kv_lora_rank", "kv_lora_rank", 512, kind=SIZE),
    Field("qk_nope_head_dim", "qk_nope_head_dim", 128, kind=COUNT),
    Field("qk_rope_head_dim", "qk_rope_head_dim", 64, kind=SIZE),
    Field("v_head_dim", "v_head_dim", 128, kind=SIZE),
    ATTENTION_BIAS,
    FieldGroup(rope_entry_fields(), read_attention, write_attention),
)


def expert_fields(
    *,
    num_experts: int,
    aliases: tuple[str, ...],
    per_token: int | None,
    shared: int,
    dim: int,
    scaling: float,
    groups: int | None,
    chosen_groups: int | None,
    num_dense: int,
) -> tuple[Field | FieldGroup, ...]:
    return (
        Field("n_routed_experts", "num_experts", num_experts, kind=SIZE, aliases=aliases),
        Field("num_experts_per_tok", "num_experts_per_tok", per_token),
        Field("n_shared_experts", "shared_experts", shared, to_native=or_zero, kind=COUNT | NULL),
        Field("moe_intermediate_size", "base_moe_mlp_dim", dim),
        Field("routed_scaling_factor", "routed_scaling_factor", scaling, kind=POSITIVE),
        group_field("n_group", "n_routing_groups", groups),
        group_field("topk_group", "topk_routing_group", chosen_groups),
        FieldGroup(
            (Field("first_k_dense_replace", default=num_dense, kind=COUNT),),
            read_dense_layers,
            write_dense_layers,
        ),
    )


def experts3(*aliases: str) -> tuple[Field | FieldGroup, ...]:
    """The experts of DeepSeek 3 and 3.2, of which transformers has one router."""
    return (
        *expert_fields(
            num_experts=256,
            aliases=aliases,
            per_token=8,
            shared=1,
            dim=2048,
            scaling=2.5,
            groups=8,
            chosen_groups=4,
            num_dense=3,
        ),
        FieldGroup(
            (
                Field("norm_topk_prob", default=True),
                Field("num_nextn_predict_layers", kind=COUNT | NULL),
            ),
            read_routing3,
            write_routing3,
        ),
        MTP_AFTER_NORMS,
        Field("scoring_func", supported=(None, "sigmoid")),
        Field("topk_method", supported=(None, "noaux_tc"), kind=TEXT | NULL),
        Field("moe_layer_freq", supported=(None, 1)),
    )


def mapping3(
    number: str, *fields: Field | FieldGroup, positions: int, version_number: int, **keys: object
) -> HfMapping:
    return HfMapping(
        architectures=(f"DeepseekV{number}ForCausalLM",),
        model_type=f"deepseek_v{number}",
        keys=dense_keys(
            "deepseek",
            attention_type="mla",
            routed_score_func="sigmoid",
            routed_bias=True,
            **keys,
        ),
        fields=(
            *dense_fields(
                vocab_size=129_280,
                hidden_size=7168,
                intermediate_size=18_432,
                num_hidden_layers=61,
                num_attention_heads=128,
                max_position_embeddings=positions,
            ),
            *LATENT_FIELDS,
            *fields,
        ),
        rules=deepseek_rules,
        matches=lambda config: version(config) == version_number,
        ignored=BUFFERS,
        ignored_in=ignored_layers,
    )


MAPPINGS = (
    HfMapping(
        architectures=("DeepseekV2ForCausalLM",),
        model_type="deepseek_v2",
        keys=dense_keys("deepseek", attention_type="mla", routed_score_func="softmax"),
        fields=(
            *dense_fields(
                vocab_size=102_400,
                hidden_size=4096,
                intermediate_size=11_008,
                num_hidden_layers=32,
                num_attention_heads=32,
                max_position_embeddings=2048,
            ),
            *LATENT_FIELDS,
            *expert_fields(
                num_experts=64,
                aliases=("num_experts",),
                per_token=None,
                shared=2,
                dim=1407,
                scaling=1.0,
                groups=None,
                chosen_groups=None,
                num_dense=0,
            ),
            FieldGroup(
                (Field("topk_method", default="greedy", kind=TEXT | NULL),),
                read_routing2,
                write_routing2,
            ),
            Field("scoring_func", supported=(None, "softmax"), kind=TEXT | NULL),
            Field("moe_layer_freq", supported=(None, 1)),
            Field("mlp_bias", supported=(None, False)),
        ),
        rules=deepseek_rules,
        matches=lambda config: version(config) == 2,
    ),
    mapping3(
        "3",
        *experts3("num_local_experts"),
        FieldGroup(
            (Field("rope_interleave", default=True, kind=BOOL | NULL),),
            write=lambda config, layers: {"rope_interleave": layers[0].attention.rope.interleave},
        ),
        positions=4096,
        version_number=3,
    ),
    mapping3(
        "32",
        *experts3("num_experts", "num_local_experts"),
        Field("index_n_heads", "indexer_n_heads", 64, kind=SIZE),
        Field("index_head_dim", "indexer_head_dim", 128, kind=SIZE),
        Field("index_topk", "indexer_topk", 2048, kind=SIZE),
        FieldGroup(
            (Field("mlp_layer_types", kind=per_layer(list_of(TEXT, "names") | NULL)),),
            read_mlp_types,
            write_mlp_types,
        ),
        positions=163_840,
        version_number=32,
        use_indexer=True,
    ),
)
