"""Entries of config.json from a configuration and the specs of its layers: the parts that most
families share. `hf/config_json.py` has the other direction.
"""

from collections.abc import Sequence
from typing import Any

from maxtext.common.errors import UserError
from maxtext.configs.types import MaxTextConfig
from maxtext.hf.config_json import LAYER_TYPES, Json, hf_activation
from maxtext.layers.specs import RopeSpec

LayerSpecs = Sequence[Any]


def dense_entries(config: MaxTextConfig, layers: LayerSpecs, hidden_act: str | None = None) -> Json:
    """The entries that nearly all families state alike; `hidden_act` overrides mlp_activations."""
    return {
        "hidden_size": config.emb_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": len(layers),
        "num_attention_heads": config.num_query_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "hidden_act": hidden_act or hf_activation(config),
        "rms_norm_eps": config.normalization_layer_epsilon,
        "tie_word_embeddings": config.logits_via_embedding,
        "attention_bias": config.attention_bias,
        "max_position_embeddings": config.max_position_embeddings,
    }


def rope_entry(spec: RopeSpec | None) -> Json:
    """rope_parameters of a RopeSpec. Raises UserError if config.json cannot express it."""
    if spec is None:
        raise UserError(
            "a model without rotary positions cannot be expressed in a Hugging Face config.json of "
            "this family"
        )
    if spec.min_timescale != 1:
        raise UserError(
            "rope_min_timescale other than 1 cannot be expressed in a Hugging Face config.json"
        )
    parameters: Json = {"rope_type": "default", "rope_theta": float(spec.max_timescale)}
    if spec.proportional:
        parameters |= {"rope_type": "proportional", "factor": spec.linear_factor}
    elif spec.linear_factor != 1:
        parameters |= {"rope_type": "linear", "factor": spec.linear_factor}
    if spec.fraction != 1 or spec.proportional:
        parameters["partial_rotary_factor"] = spec.fraction
    if spec.kind in ("llama3.1", "yarn"):
        parameters |= {
            "factor": float(spec.factor),
            "original_max_position_embeddings": spec.original_length,
        }
    if spec.kind == "llama3.1":
        parameters |= {
            "rope_type": "llama3",
            "low_freq_factor": spec.low_frequency_factor,
            "high_freq_factor": spec.high_frequency_factor,
        }
    if spec.kind == "yarn":
        parameters |= {
            "rope_type": "yarn",
            "beta_fast": spec.beta_fast,
            "beta_slow": spec.beta_slow,
            "truncate": spec.truncate,
            "attention_factor": spec.magnitude,
        }
    if spec.kind == "longrope":
        parameters |= {
            "rope_type": "longrope",
            "factor": spec.factor,
            "original_max_position_embeddings": spec.original_length,
            "attention_factor": spec.magnitude,
            "short_factor": list(spec.short_factors),
            "long_factor": list(spec.long_factors),
        }
    return parameters


def first_rope_entry(layers: LayerSpecs) -> Json:
    """rope_parameters of a model whose layers all have the same RoPE."""
    return rope_entry(layers[0].attention.rope)


def rope_entries(layers: LayerSpecs, default: Json | None = None) -> Json:
    """rope_parameters by layer_types, for full and sliding layers; of a kind that the model lacks
    `default`, or that of the first layer.
    """
    entries: Json = {}
    for spec, layer_type in zip(layers, layer_types(layers), strict=True):
        entries.setdefault(layer_type, rope_entry(spec.attention.rope))
    default = default or next(iter(entries.values()))
    # transformers reads truncate beside the kinds of layers.
    truncate = {entry.pop("truncate") for entry in entries.values() if "truncate" in entry}
    return {
        **{kind: entries.get(kind, default) for kind in ("full_attention", "sliding_attention")},
        **({"truncate": False} if False in truncate else {}),
    }


def layer_types(layers: LayerSpecs) -> list[str]:
    """layer_types of the mixers."""
    hf_names = {kind: hf_name for hf_name, kind in LAYER_TYPES.items()}
    return [hf_names[layer_kind(spec.attention)] for spec in layers]


def layer_kind(mixer: Any) -> str:
    mask = getattr(mixer, "mask", None)
    if mask is None:
        return "linear"
    if mask.window:
        return "sliding"
    return "chunk" if mask.chunk else "full"


def has_experts(spec: Any) -> bool:
    return hasattr(spec.mlp, "router")
