"""Llama 2 to 4 in Hugging Face folders."""

from maxtext.configs.types import MaxTextConfig
from maxtext.hf.config_json import (
    HfMapping,
    Json,
    ModelSettings,
    dense_keys,
    layer_kinds,
    size_defaults,
    uniform_rope,
)
from maxtext.hf.layer_rules import (
    HF_LAYER,
    PRE_NORMS,
    attention_rules,
    dense_rules,
    mlp_rules,
    norm_rules,
    outer_rules,
    stacked_expert_rules,
)
from maxtext.hf.rules import Rule
from maxtext.hf.schema import COUNT, NULL, POSITIVE, SIZE, SWITCH, all_of, list_of, per_layer
from maxtext.models.hf_config import (
    LayerSpecs,
    dense_entries,
    first_rope_entry,
    has_experts,
    layer_types,
    rope_entry,
)


def read_llama(hf_config: Json) -> ModelSettings:
    rope = uniform_rope(hf_config)
    return ModelSettings(dense_keys(hf_config, "llama2") | rope.keys, rope.hf_attributes)


def write_llama(config: MaxTextConfig, layers: LayerSpecs) -> Json:
    return dense_entries(config, layers) | {
        "mlp_bias": config.mlp_bias,
        "rope_parameters": first_rope_entry(layers),
    }


def llama_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[Rule]:
    return dense_rules(config)


def read_llama4(hf_config: Json) -> ModelSettings:
    rope = uniform_rope(hf_config, interleave=True)
    count, step = hf_config["num_hidden_layers"], hf_config["interleave_moe_layer_step"]
    interval = hf_config["no_rope_layer_interval"]
    # Despite its name, no_rope_layers has a 1 for each layer with RoPE.
    flags = hf_config["no_rope_layers"] or [(i + 1) % interval for i in range(count)]
    rope_layers = [bool(flag) for flag in flags]
    moe_layers = hf_config["moe_layers"]
    if moe_layers is None:
        moe_layers = [i for i in range(count) if (i + 1) % step == 0]
    keys = dense_keys(hf_config, "llama4")
    keys |= {
        "base_mlp_dim": hf_config["intermediate_size_mlp"],
        "base_moe_mlp_dim": hf_config["intermediate_size"],
        "num_experts": hf_config["num_local_experts"],
        "num_experts_per_tok": hf_config["num_experts_per_tok"],
        "shared_experts": 1,
        "use_qk_norm": hf_config["use_qk_norm"],
        "nope_layer_interval": interval,
        "interleave_moe_layer_step": step,
        "temperature_tuning": bool(hf_config["attn_temperature_tuning"]),
        "chunk_attn_window_size": hf_config["attention_chunk_size"] or 0,
    }
    hf_attributes = {
        "rope_layers": rope_layers,
        "moe_layers": [i in moe_layers for i in range(count)],
        "layer_kinds": layer_kinds(hf_config, lambda i: "chunk" if rope_layers[i] else "full"),
        "temperature_scale": hf_config["attn_scale"],
        "temperature_length": hf_config["floor_scale"],
    }
    return ModelSettings(keys | rope.keys, hf_attributes | rope.hf_attributes)


def write_llama4(config: MaxTextConfig, layers: LayerSpecs) -> Json:
    ropes = [spec.attention.rope for spec in layers]
    rope = next((rope for rope in ropes if rope is not None), None)
    return dense_entries(config, layers) | {
        "intermediate_size": config.moe_mlp_dim,
        "intermediate_size_mlp": config.mlp_dim,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "use_qk_norm": config.use_qk_norm,
        "no_rope_layers": [int(rope is not None) for rope in ropes],
        "moe_layers": [i for i, spec in enumerate(layers) if has_experts(spec)],
        "layer_types": layer_types(layers),
        "attention_chunk_size": config.chunk_attn_window_size,
        "attn_temperature_tuning": config.temperature_tuning,
        "attn_scale": config.architecture.temperature_scale,
        "floor_scale": config.architecture.temperature_length,
        "rope_parameters": rope_entry(rope) if rope else None,
    }


def llama4_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[Rule]:
    hf, native = f"{HF_LAYER}feed_forward.", "layers/{i}/mlp/"
    return [
        *outer_rules(),
        *norm_rules(PRE_NORMS),
        *attention_rules(config),
        *mlp_rules(hf),
        Rule(f"{hf}router.weight", f"{native}router/weight", "x e -> e x"),
        *mlp_rules(f"{hf}shared_expert.", f"{native}shared/"),
        *stacked_expert_rules(f"{hf}experts.", native, "x e (b m) -> b x e m", "x m e -> x m e"),
    ]


LLAMA = HfMapping(
    architectures=("LlamaForCausalLM",),
    model_type="llama",
    read=read_llama,
    write=write_llama,
    rules=llama_rules,
    ignored=(r".*rotary_emb\.inv_freq",),
    defaults=size_defaults(
        vocab_size=32_000,
        hidden_size=4096,
        intermediate_size=11_008,
        num_hidden_layers=32,
        num_attention_heads=32,
        max_position_embeddings=2048,
        attention_bias=False,
        mlp_bias=False,
    ),
)
LLAMA4 = HfMapping(
    architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    model_type="llama4_text",
    read=read_llama4,
    write=write_llama4,
    rules=llama4_rules,
    peft_swaps_factors=True,
    defaults=size_defaults(
        vocab_size=202_048,
        hidden_size=5120,
        intermediate_size=8192,
        num_hidden_layers=48,
        num_attention_heads=40,
        max_position_embeddings=131_072,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        intermediate_size_mlp=16_384,
        num_local_experts=16,
        num_experts_per_tok=1,
        attention_bias=False,
        moe_layers=None,
        no_rope_layers=None,
        layer_types=None,
        interleave_moe_layer_step=1,
        no_rope_layer_interval=4,
        use_qk_norm=True,
        attention_chunk_size=8192,
        attn_temperature_tuning=True,
        attn_scale=0.1,
        floor_scale=8192,
    ),
    fields={
        **all_of(SIZE, "intermediate_size_mlp", "interleave_moe_layer_step", "floor_scale"),
        **all_of(SIZE, "no_rope_layer_interval"),
        **all_of(COUNT | NULL, "attention_chunk_size"),
        **all_of(POSITIVE, "attn_scale"),
        **all_of(SWITCH | COUNT | NULL, "attn_temperature_tuning"),  # published as 4, too
        **all_of(list_of(COUNT, "whole numbers") | NULL, "moe_layers"),
        "no_rope_layers": per_layer(list_of(COUNT, "whole numbers") | NULL),
    },
)
