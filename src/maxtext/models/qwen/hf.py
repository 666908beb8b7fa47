"""Qwen 2.5, 3, 3 with experts, 3-Next and 3.5 in Hugging Face folders: the text models."""

from dataclasses import replace

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
    bool_field,
    dense_fields,
    dense_keys,
    window_size,
)
from maxtext.hf.layer_rules import (
    HF_LAYER,
    PRE_NORMS,
    attention_rules,
    dense_rules,
    expert_rules,
    in_layers,
    mlp_rules,
    multi_token_rules,
    norm_rules,
    outer_rules,
)
from maxtext.hf.rules import TensorRule
from maxtext.hf.schema import BOOL, COUNT, NULL, SIZE, list_of
from maxtext.models.hf_config import (
    LAYER_TYPES_FIELD,
    MTP_AFTER_NORMS,
    every_nth,
    has_experts,
    layer_kinds,
    layer_types,
    uniform_rope,
)


def used_window(entries: Json) -> int:
    """The window of a model that uses it, else 0."""
    return window_size(entries["sliding_window"]) if entries["use_sliding_window"] else 0


def read_windows(entries: Json) -> ModelSettings:
    window, last = used_window(entries), entries["max_window_layers"]
    kinds = layer_kinds(entries, lambda i, _: "sliding" if window and i >= last else "full")
    return ModelSettings({"sliding_window_size": window}, {"layer_kinds": kinds})


def read_window(entries: Json) -> ModelSettings:
    window = used_window(entries)
    kinds = ["sliding" if window else "full"] * entries["num_hidden_layers"]
    return ModelSettings({"sliding_window_size": window}, {"layer_kinds": kinds})


def read_experts(entries: Json) -> ModelSettings:
    step, dense_layers = entries["decoder_sparse_step"], entries["mlp_only_layers"] or []
    count = entries["num_hidden_layers"]
    sparse = [i not in dense_layers and (i + 1) % step == 0 for i in range(count)]
    return ModelSettings({}, {"moe_layers": sparse})


def shared_expert_dim(config: MaxTextConfig, layers: LayerSpecs) -> int:
    shared = [layer.mlp.shared for layer in layers if getattr(layer.mlp, "shared", None)]
    return shared[0].hidden_dim if shared else 0


def qwen_dense_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[TensorRule]:
    return dense_rules(config)


def qwen3_moe_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[TensorRule]:
    return dense_rules(config) + moe_rules()


def moe_rules() -> list[TensorRule]:
    mlp, native = f"{HF_LAYER}mlp.", "layers/{i}/mlp/"
    return [
        TensorRule(f"{mlp}gate.weight", f"{native}router/weight", "x e -> e x"),
        *expert_rules(f"{mlp}experts."),
        *mlp_rules(f"{mlp}shared_expert.", f"{native}shared/"),
        TensorRule(f"{mlp}shared_expert_gate.weight", f"{native}shared_gate/weight", "n e -> e n"),
    ]


def delta_net_rules(
    config: MaxTextConfig, layers: LayerSpecs, projections: list[TensorRule]
) -> list[TensorRule]:
    """`projections`: of a Gated DeltaNet, which differ between Qwen3-Next and 3.5."""
    net, attention, native = (
        f"{HF_LAYER}linear_attn.",
        f"{HF_LAYER}self_attn.",
        "layers/{i}/attention/",
    )
    channels = tuple(f"{native}conv_{name}" for name in ("query", "key", "value"))
    attends = [hasattr(layer.attention, "rope") for layer in layers]
    full_attention = [
        # A head's query and its gate are adjacent.
        TensorRule(
            f"{attention}q_proj.weight",
            (f"{native}query/weight", f"{native}output_gate/weight"),
            "(h w) e -> e h w",
            join="w",
        ),
        TensorRule(
            f"{attention}q_proj.bias",
            (f"{native}query/bias", f"{native}output_gate/bias"),
            "(h w) -> h w",
            join="w",
        ),
        *[
            rule
            for rule in attention_rules(config)
            if not any("q_proj" in name for name in rule.hf_names)
        ],
    ]
    linear_attention = [
        *projections,
        TensorRule(f"{net}conv1d.weight", channels, "(k w) 1 t -> t k w", join=0),
        TensorRule(f"{net}A_log", f"{native}log_rate", "(k g) -> k g"),
        TensorRule(f"{net}dt_bias", f"{native}step_bias", "(k g) -> k g"),
        TensorRule(f"{net}norm.weight", f"{native}norm/scale", "d -> d"),
        TensorRule(f"{net}out_proj.weight", f"{native}out/weight", "e (k w) -> k w e"),
    ]
    others = [*norm_rules(PRE_NORMS), *mlp_rules(), *moe_rules()]
    rules = [
        *outer_rules(),
        *others,
        *in_layers([i for i, attend in enumerate(attends) if attend], full_attention),
        *in_layers([i for i, attend in enumerate(attends) if not attend], linear_attention),
    ]
    if config.mtp_num_layers:
        rules += multi_token_rules(0, [*others, *full_attention], "mtp.layers.0.", MTP_NAMES)
    return rules


def qwen3_next_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[TensorRule]:
    net, native = f"{HF_LAYER}linear_attn.", "layers/{i}/attention/"
    projections = tuple(f"{native}{name}/weight" for name in ("query", "key", "value", "gate"))
    gates = (f"{native}beta/weight", f"{native}decay/weight")
    return delta_net_rules(
        config,
        layers,
        [
            TensorRule(f"{net}in_proj_qkvz.weight", projections, "(k w) e -> e k w", join="w"),
            TensorRule(f"{net}in_proj_ba.weight", gates, "(k w) e -> e k w", join="w"),
        ],
    )


def qwen3_5_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[TensorRule]:
    net, native = f"{HF_LAYER}linear_attn.", "layers/{i}/attention/"
    projections = tuple(f"{native}{name}/weight" for name in ("query", "key", "value"))
    return delta_net_rules(
        config,
        layers,
        [
            TensorRule(f"{net}in_proj_qkv.weight", projections, "(k w) e -> e k w", join=0),
            TensorRule(f"{net}in_proj_z.weight", f"{native}gate/weight", "(k w) e -> e k w"),
            TensorRule(f"{net}in_proj_b.weight", f"{native}beta/weight", "(k w) e -> e k w"),
            TensorRule(f"{net}in_proj_a.weight", f"{native}decay/weight", "(k w) e -> e k w"),
        ],
    )


WINDOW_FIELDS = (
    Field(
        "use_sliding_window",
        default=False,
        from_layers=lambda config, layers: config.sliding_window_size > 0,
        kind=BOOL | NULL,
    ),
    Field(
        "sliding_window",
        default=4096,
        from_layers=lambda config, layers: (
            config.sliding_window_size if config.sliding_window_size > 0 else None
        ),
    ),
    Field(
        "max_window_layers",
        default=28,
        from_layers=lambda config, layers: len(layers),
        kind=COUNT,
    ),
)
# Windows by layer_types, from max_window_layers on, or in all layers.
WINDOWS = FieldGroup(
    (*WINDOW_FIELDS, LAYER_TYPES_FIELD),
    read_windows,
)
WINDOW = FieldGroup(WINDOW_FIELDS, read_window)
SPARSE_LAYERS = FieldGroup(
    (
        Field("decoder_sparse_step", default=1, from_layers=lambda config, layers: 1, kind=SIZE),
        Field(
            "mlp_only_layers",
            from_layers=lambda config, layers: [
                i for i, layer in enumerate(layers) if not has_experts(layer)
            ],
            kind=list_of(COUNT, "whole numbers") | NULL,
        ),
    ),
    read_experts,
)


def expert_fields(
    num_experts: int, num_experts_per_tok: int, *, dim: int, aliases: tuple[str, ...] = ()
) -> tuple[Field, ...]:
    return (
        Field("num_experts", "num_experts", num_experts, aliases=aliases),
        Field("num_experts_per_tok", "num_experts_per_tok", num_experts_per_tok),
        Field("moe_intermediate_size", "base_moe_mlp_dim", dim),
    )


DELTA_NET_FIELDS = (
    ATTENTION_BIAS,
    MTP_AFTER_NORMS,
    # Gated DeltaNets also apply it to their convolutions and gates.
    replace(activation_field(), supported=("silu", "swish")),
    uniform_rope(partial=True, required=False, partial_rotary_factor=0.25),
    layer_types(
        every_nth("full_attention_interval", "full", others="linear"),
        Field("full_attention_interval", default=4, kind=SIZE),
    ),
    Field("linear_conv_kernel_dim", "gdn_conv_kernel_dim", 4, kind=SIZE),
    Field("linear_key_head_dim", "gdn_key_head_dim", 128, kind=SIZE),
    Field("linear_value_head_dim", "gdn_value_head_dim", 128, kind=SIZE),
    Field("linear_num_key_heads", "gdn_num_key_heads", 16, kind=SIZE),
    Field("linear_num_value_heads", "gdn_num_value_heads", 32, kind=SIZE),
)
SHARED_EXPERT = FieldGroup(
    (
        Field(
            "shared_expert_intermediate_size",
            default=512,
            from_layers=shared_expert_dim,
            kind=SIZE | NULL,
        ),
    ),
    lambda entries: ModelSettings(
        {}, {"shared_expert_dim": entries["shared_expert_intermediate_size"]}
    ),
)
MTP = (r"mtp\..*",)  # multi-token prediction layers, unless the model has some (mtp_num_layers)
MTP_NAMES = {
    "projection": "mtp.fc",
    "embedding_norm": "mtp.pre_fc_norm_embedding",
    "hidden_norm": "mtp.pre_fc_norm_hidden",
    "output_norm": "mtp.norm",
}

QWEN2 = HfMapping(
    architectures=("Qwen2ForCausalLM",),
    model_type="qwen2",
    keys=dense_keys("qwen2", attention_bias=True),
    fields=(
        *dense_fields(
            vocab_size=151_936,
            hidden_size=4096,
            intermediate_size=22_016,
            num_hidden_layers=32,
            num_attention_heads=32,
            max_position_embeddings=32_768,
            num_key_value_heads=32,
        ),
        uniform_rope(),
        WINDOWS,
    ),
    rules=qwen_dense_rules,
)
QWEN3 = HfMapping(
    architectures=("Qwen3ForCausalLM",),
    model_type="qwen3",
    keys=dense_keys("qwen3", use_qk_norm=True),
    fields=(
        *dense_fields(
            vocab_size=151_936,
            hidden_size=4096,
            intermediate_size=22_016,
            num_hidden_layers=32,
            num_attention_heads=32,
            max_position_embeddings=32_768,
            num_key_value_heads=32,
            head_dim=128,
        ),
        ATTENTION_BIAS,
        uniform_rope(),
        WINDOWS,
    ),
    rules=qwen_dense_rules,
)
QWEN3_MOE = HfMapping(
    architectures=("Qwen3MoeForCausalLM",),
    model_type="qwen3_moe",
    keys=dense_keys("qwen3_moe", use_qk_norm=True),
    fields=(
        *dense_fields(
            vocab_size=151_936,
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=24,
            num_attention_heads=32,
            max_position_embeddings=32_768,
            num_key_value_heads=4,
        ),
        ATTENTION_BIAS,
        uniform_rope(),
        WINDOW,
        *expert_fields(128, 8, dim=768, aliases=("num_local_experts",)),
        bool_field("norm_topk_prob", "norm_topk_prob"),
        SPARSE_LAYERS,
    ),
    rules=qwen3_moe_rules,
)
QWEN3_NEXT = HfMapping(
    architectures=("Qwen3NextForCausalLM",),
    model_type="qwen3_next",
    keys=dense_keys("qwen3_next", shared_experts=1),
    fields=(
        *dense_fields(
            vocab_size=151_936,
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=48,
            num_attention_heads=16,
            max_position_embeddings=32_768,
            num_key_value_heads=2,
            head_dim=256,
        ),
        *DELTA_NET_FIELDS,
        *expert_fields(512, 10, dim=512),
        SHARED_EXPERT,
        bool_field("norm_topk_prob", "norm_topk_prob", True),
        SPARSE_LAYERS,
    ),
    rules=qwen3_next_rules,
    ignored=MTP,
)
QWEN3_5_MOE = HfMapping(
    architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    model_type="qwen3_5_moe_text",
    keys=dense_keys("qwen3_5", shared_experts=1, norm_topk_prob=True),
    fields=(
        *dense_fields(
            vocab_size=248_320,
            hidden_size=2048,
            intermediate_size=512,
            num_hidden_layers=40,
            num_attention_heads=16,
            max_position_embeddings=32_768,
            num_key_value_heads=2,
            head_dim=256,
        ),
        *DELTA_NET_FIELDS,
        *expert_fields(256, 8, dim=512),
        SHARED_EXPERT,
    ),
    rules=qwen3_5_rules,
    matches=lambda config: config.num_experts > 1,
    ignored=MTP,
)
QWEN3_5 = HfMapping(
    architectures=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    model_type="qwen3_5_text",
    keys=dense_keys("qwen3_5"),
    fields=(
        *dense_fields(
            vocab_size=248_320,
            hidden_size=4096,
            intermediate_size=12_288,
            num_hidden_layers=32,
            num_attention_heads=16,
            max_position_embeddings=32_768,
            num_key_value_heads=4,
            head_dim=256,
        ),
        *DELTA_NET_FIELDS,
    ),
    rules=qwen3_5_rules,
    matches=lambda config: config.num_experts == 1,
    ignored=MTP,
)
