"""Qwen 2.5, 3, 3 with experts, 3-Next and 3.5 in Hugging Face folders: the text models."""

from maxtext.configs.types import MaxTextConfig
from maxtext.hf.config_json import (
    HfMapping,
    Json,
    ModelSettings,
    dense_keys,
    layer_kinds,
    size_defaults,
    uniform_rope,
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
    norm_rules,
    outer_rules,
)
from maxtext.hf.rules import Rule
from maxtext.hf.schema import COUNT, NULL, SIZE, SWITCH, all_of, list_of
from maxtext.models.hf_config import (
    LayerSpecs,
    dense_entries,
    first_rope_entry,
    has_experts,
    layer_types,
    rope_entry,
)


def sliding_window(hf_config: Json) -> int:
    """The window of a model that uses it, else 0."""
    return window_size(hf_config) if hf_config["use_sliding_window"] else 0


def read_shared(hf_config: Json, block: str) -> ModelSettings:
    rope = uniform_rope(hf_config)
    keys = dense_keys(hf_config, block) | rope.keys
    return ModelSettings(
        keys | {"sliding_window_size": sliding_window(hf_config)}, rope.hf_attributes
    )


def read_dense(hf_config: Json, block: str) -> ModelSettings:
    settings = read_shared(hf_config, block)
    last = hf_config["max_window_layers"]
    settings.hf_attributes["layer_kinds"] = layer_kinds(
        hf_config, lambda i: "sliding" if sliding_window(hf_config) and i >= last else "full"
    )
    return settings


def read_qwen2(hf_config: Json) -> ModelSettings:
    settings = read_dense(hf_config, "qwen2")
    settings.keys["attention_bias"] = True
    return settings


def write_qwen2(config: MaxTextConfig, layers: LayerSpecs) -> Json:
    entries = write_qwen3(config, layers)
    del entries["attention_bias"]
    return entries


def read_qwen3(hf_config: Json) -> ModelSettings:
    settings = read_dense(hf_config, "qwen3")
    settings.keys["use_qk_norm"] = True
    return settings


def write_qwen3(config: MaxTextConfig, layers: LayerSpecs) -> Json:
    slides = config.sliding_window_size > 0
    return dense_entries(config, layers) | {
        "rope_parameters": first_rope_entry(layers),
        "layer_types": layer_types(layers),
        "use_sliding_window": slides,
        "sliding_window": config.sliding_window_size if slides else None,
        "max_window_layers": len(layers),
    }


def expert_keys(hf_config: Json) -> Json:
    return {
        "base_moe_mlp_dim": hf_config["moe_intermediate_size"],
        "num_experts": hf_config["num_experts"],
        "num_experts_per_tok": hf_config["num_experts_per_tok"],
        "norm_topk_prob": hf_config.get("norm_topk_prob", True),
    }


def sparse_layers(hf_config: Json) -> list[bool]:
    step = hf_config.get("decoder_sparse_step", 1)
    dense_layers = hf_config.get("mlp_only_layers") or []
    return [
        i not in dense_layers and (i + 1) % step == 0 for i in range(hf_config["num_hidden_layers"])
    ]


def read_qwen3_moe(hf_config: Json) -> ModelSettings:
    settings = read_shared(hf_config, "qwen3_moe")
    settings.keys |= expert_keys(hf_config) | {"use_qk_norm": True}
    kind = "sliding" if sliding_window(hf_config) else "full"
    settings.hf_attributes |= {
        "layer_kinds": [kind] * hf_config["num_hidden_layers"],
        "moe_layers": sparse_layers(hf_config),
    }
    return settings


def write_experts(config: MaxTextConfig, layers: LayerSpecs) -> Json:
    return {
        "moe_intermediate_size": config.moe_mlp_dim,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "norm_topk_prob": config.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, layer in enumerate(layers) if not has_experts(layer)],
    }


def write_qwen3_moe(config: MaxTextConfig, layers: LayerSpecs) -> Json:
    entries = write_qwen3(config, layers) | write_experts(config, layers)
    del entries["layer_types"]
    return entries


def qwen_dense_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[Rule]:
    return dense_rules(config)


def qwen3_moe_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[Rule]:
    return dense_rules(config) + moe_rules()


def moe_rules() -> list[Rule]:
    mlp, native = f"{HF_LAYER}mlp.", "layers/{i}/mlp/"
    return [
        Rule(f"{mlp}gate.weight", f"{native}router/weight", "x e -> e x"),
        *expert_rules(f"{mlp}experts."),
        *mlp_rules(f"{mlp}shared_expert.", f"{native}shared/"),
        Rule(f"{mlp}shared_expert_gate.weight", f"{native}shared_gate/weight", "n e -> e n"),
    ]


def read_delta_net(hf_config: Json, block: str) -> ModelSettings:
    rope = uniform_rope(hf_config, partial=True)
    keys = dense_keys(hf_config, block) | rope.keys
    keys |= {
        "gdn_conv_kernel_dim": hf_config["linear_conv_kernel_dim"],
        "gdn_key_head_dim": hf_config["linear_key_head_dim"],
        "gdn_value_head_dim": hf_config["linear_value_head_dim"],
        "gdn_num_key_heads": hf_config["linear_num_key_heads"],
        "gdn_num_value_heads": hf_config["linear_num_value_heads"],
    }
    interval = hf_config["full_attention_interval"]
    return ModelSettings(
        keys,
        {
            "layer_kinds": layer_kinds(
                hf_config, lambda i: "linear" if (i + 1) % interval else "full"
            )
        }
        | rope.hf_attributes,
    )


def read_delta_net_moe(hf_config: Json, block: str) -> ModelSettings:
    settings = read_delta_net(hf_config, block)
    settings.keys |= expert_keys(hf_config) | {"shared_experts": 1}
    settings.hf_attributes |= {
        "shared_expert_dim": hf_config["shared_expert_intermediate_size"],
        "moe_layers": sparse_layers(hf_config),
    }
    return settings


def write_delta_net(config: MaxTextConfig, layers: LayerSpecs) -> Json:
    attending = next(
        (layer.attention for layer in layers if hasattr(layer.attention, "rope")), None
    )
    return dense_entries(config, layers) | {
        "linear_conv_kernel_dim": config.gdn_conv_kernel_dim,
        "linear_key_head_dim": config.gdn_key_head_dim,
        "linear_value_head_dim": config.gdn_value_head_dim,
        "linear_num_key_heads": config.gdn_num_key_heads,
        "linear_num_value_heads": config.gdn_num_value_heads,
        "layer_types": layer_types(layers),
        # Without partial_rotary_factor, a quarter of each head would rotate.
        "rope_parameters": {"partial_rotary_factor": attending.rope.fraction}
        | rope_entry(attending.rope)
        if attending
        else None,
    }


def write_delta_net_moe(config: MaxTextConfig, layers: LayerSpecs) -> Json:
    shared = [layer.mlp.shared for layer in layers if getattr(layer.mlp, "shared", None)]
    return (
        write_delta_net(config, layers)
        | write_experts(config, layers)
        | {"shared_expert_intermediate_size": shared[0].hidden_dim if shared else 0}
    )


def delta_net_rules(
    config: MaxTextConfig, layers: LayerSpecs, projections: list[Rule]
) -> list[Rule]:
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
        Rule(
            f"{attention}q_proj.weight",
            (f"{native}query/weight", f"{native}output_gate/weight"),
            "(h w) e -> e h w",
            join="w",
        ),
        Rule(
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
        Rule(f"{net}conv1d.weight", channels, "(k w) 1 t -> t k w", join=0),
        Rule(f"{net}A_log", f"{native}log_rate", "(k g) -> k g"),
        Rule(f"{net}dt_bias", f"{native}step_bias", "(k g) -> k g"),
        Rule(f"{net}norm.weight", f"{native}norm/scale", "d -> d"),
        Rule(f"{net}out_proj.weight", f"{native}out/weight", "e (k w) -> k w e"),
    ]
    return [
        *outer_rules(),
        *norm_rules(PRE_NORMS),
        *in_layers([i for i, attend in enumerate(attends) if attend], full_attention),
        *in_layers([i for i, attend in enumerate(attends) if not attend], linear_attention),
        *mlp_rules(),
        *moe_rules(),
    ]


def qwen3_next_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[Rule]:
    net, native = f"{HF_LAYER}linear_attn.", "layers/{i}/attention/"
    projections = tuple(f"{native}{name}/weight" for name in ("query", "key", "value", "gate"))
    gates = (f"{native}beta/weight", f"{native}decay/weight")
    return delta_net_rules(
        config,
        layers,
        [
            Rule(f"{net}in_proj_qkvz.weight", projections, "(k w) e -> e k w", join="w"),
            Rule(f"{net}in_proj_ba.weight", gates, "(k w) e -> e k w", join="w"),
        ],
    )


def qwen3_5_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[Rule]:
    net, native = f"{HF_LAYER}linear_attn.", "layers/{i}/attention/"
    projections = tuple(f"{native}{name}/weight" for name in ("query", "key", "value"))
    return delta_net_rules(
        config,
        layers,
        [
            Rule(f"{net}in_proj_qkv.weight", projections, "(k w) e -> e k w", join=0),
            Rule(f"{net}in_proj_z.weight", f"{native}gate/weight", "(k w) e -> e k w"),
            Rule(f"{net}in_proj_b.weight", f"{native}beta/weight", "(k w) e -> e k w"),
            Rule(f"{net}in_proj_a.weight", f"{native}decay/weight", "(k w) e -> e k w"),
        ],
    )


DELTA_NET_DEFAULTS = {
    "attention_bias": False,
    "layer_types": None,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
DENSE_FIELDS = {
    **all_of(COUNT, "max_window_layers"),
    **all_of(SWITCH | NULL, "use_sliding_window"),
}
MOE_FIELDS = {
    **all_of(SIZE, "decoder_sparse_step"),
    **all_of(list_of(COUNT, "whole numbers") | NULL, "mlp_only_layers"),
}
DELTA_NET_FIELDS = {
    **all_of(SIZE, "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
    **all_of(SIZE, "linear_num_key_heads", "linear_num_value_heads", "full_attention_interval"),
    **all_of(SIZE | NULL, "shared_expert_intermediate_size"),
}
# Gated DeltaNets apply it to their convolutions and gates, too.
DELTA_NET_SUPPORTED = {"hidden_act": ("silu", "swish")}
MTP = (r"mtp\..*",)  # multi-token prediction layers, which transformers does not load either

QWEN2 = HfMapping(
    architectures=("Qwen2ForCausalLM",),
    model_type="qwen2",
    read=read_qwen2,
    write=write_qwen2,
    rules=qwen_dense_rules,
    defaults=size_defaults(
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=22_016,
        num_hidden_layers=32,
        num_attention_heads=32,
        max_position_embeddings=32_768,
        num_key_value_heads=32,
        use_sliding_window=False,
        sliding_window=4096,
        max_window_layers=28,
        layer_types=None,
    ),
    fields=DENSE_FIELDS,
)
QWEN3 = HfMapping(
    architectures=("Qwen3ForCausalLM",),
    model_type="qwen3",
    read=read_qwen3,
    write=write_qwen3,
    rules=qwen_dense_rules,
    defaults=size_defaults(
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=22_016,
        num_hidden_layers=32,
        num_attention_heads=32,
        max_position_embeddings=32_768,
        num_key_value_heads=32,
        head_dim=128,
        attention_bias=False,
        use_sliding_window=False,
        sliding_window=4096,
        max_window_layers=28,
        layer_types=None,
    ),
)
QWEN3_MOE = HfMapping(
    architectures=("Qwen3MoeForCausalLM",),
    model_type="qwen3_moe",
    read=read_qwen3_moe,
    write=write_qwen3_moe,
    rules=qwen3_moe_rules,
    defaults=size_defaults(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=24,
        num_attention_heads=32,
        max_position_embeddings=32_768,
        num_key_value_heads=4,
        attention_bias=False,
        use_sliding_window=False,
        sliding_window=4096,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=False,
        decoder_sparse_step=1,
        mlp_only_layers=None,
    ),
    aliases={"num_local_experts": "num_experts"},
    fields=MOE_FIELDS,
)
QWEN3_NEXT = HfMapping(
    architectures=("Qwen3NextForCausalLM",),
    model_type="qwen3_next",
    read=lambda hf_config: read_delta_net_moe(hf_config, "qwen3_next"),
    write=write_delta_net_moe,
    rules=qwen3_next_rules,
    ignored=MTP,
    supported=DELTA_NET_SUPPORTED,
    defaults=size_defaults(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=48,
        num_attention_heads=16,
        max_position_embeddings=32_768,
        **DELTA_NET_DEFAULTS,
        num_key_value_heads=2,
        num_experts=512,
        num_experts_per_tok=10,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=None,
    ),
    fields=DELTA_NET_FIELDS,
)
QWEN3_5_MOE = HfMapping(
    architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    model_type="qwen3_5_moe_text",
    read=lambda hf_config: read_delta_net_moe(hf_config, "qwen3_5"),
    write=write_delta_net_moe,
    rules=qwen3_5_rules,
    matches=lambda config: config.num_experts > 1,
    ignored=MTP,
    supported=DELTA_NET_SUPPORTED,
    defaults=size_defaults(
        vocab_size=248_320,
        hidden_size=2048,
        intermediate_size=512,
        num_hidden_layers=40,
        num_attention_heads=16,
        max_position_embeddings=32_768,
        **DELTA_NET_DEFAULTS,
        num_key_value_heads=2,
        num_experts=256,
        num_experts_per_tok=8,
    ),
)
QWEN3_5 = HfMapping(
    architectures=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    model_type="qwen3_5_text",
    read=lambda hf_config: read_delta_net(hf_config, "qwen3_5"),
    write=write_delta_net,
    rules=qwen3_5_rules,
    matches=lambda config: config.num_experts == 1,
    ignored=MTP,
    supported=DELTA_NET_SUPPORTED,
    defaults=size_defaults(
        vocab_size=248_320,
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=32,
        num_attention_heads=16,
        max_position_embeddings=32_768,
        **DELTA_NET_DEFAULTS,
        num_key_value_heads=4,
    ),
)
