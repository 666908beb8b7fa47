"""config.json to configuration keys: the record of a mapping, and the parts that most families
share. `models/hf_config.py` has the other direction, which reads layer specs.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from maxtext.common.errors import UserError
from maxtext.configs.types import MaxTextConfig
from maxtext.hf.rules import Rule
from maxtext.hf.schema import Kind

Json = dict[str, Any]
LayerSpecs = Sequence[Any]


@dataclass
class ModelSettings:
    """What a config.json states: configuration keys, and attributes that no key names."""

    keys: Json
    hf_attributes: Json = field(default_factory=dict)  # fields of configs.types.Architecture


@dataclass(frozen=True)
class HfMapping:
    """How models of one `model_type` are read from a Hugging Face folder and written to it.

    Functions that take a configuration also take the specs of its layers.
    """

    architectures: tuple[str, ...]  # the first is written; the others hold the same text model
    model_type: str
    read: Callable[[Json], ModelSettings]  # of a config.json over `defaults`
    # The entries of config.json except architectures, model_type and dtype.
    write: Callable[[MaxTextConfig, LayerSpecs], Json]
    rules: Callable[[MaxTextConfig, LayerSpecs], list[Rule]]
    # The values of transformers' configuration class for entries that a config.json leaves out.
    # Folders of models with images rely on them: their text_config has only what differs.
    defaults: Mapping[str, Any]
    fields: Mapping[str, Kind] = field(default_factory=dict)  # of config.json, beyond TEXT_FIELDS
    matches: Callable[[MaxTextConfig], bool] = lambda config: True  # among the family's mappings
    ignored: tuple[str, ...] = ()  # tensors that transformers does not load either, as regexes
    ignored_in: Callable[[MaxTextConfig], tuple[str, ...]] = lambda config: ()
    base_prefix: str = "model."  # of tensors in folders of the model with its head
    embedding: str = "model.embed_tokens.weight"  # the tensor that a tied head shares
    # (part of tensor names, the same part in the module names of transformers 5), where they differ
    module_renaming: tuple[str, str] = ("", "")
    # The class has experts as [X, in, out] and does not say so: PEFT takes inputs for outputs.
    peft_swaps_factors: bool = False


def size_defaults(
    *,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    max_position_embeddings: int,
    **defaults: Any,
) -> Json:
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": 1e-6,
        **defaults,
    }


# HF name -> name in mlp_activations; of several HF names the first is written.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
    "gelu": "gelu_exact",
    "relu": "relu",
}
# layer_types -> kind of layer
LAYER_TYPES = {
    "full_attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunk",
    "linear_attention": "linear",
}


def native_activation(name: str) -> str:
    if name not in ACTIVATIONS:
        supported = ", ".join(ACTIVATIONS)
        raise UserError(
            f"config.json: the activation {name!r} is not supported: use one of {supported}"
        )
    return ACTIVATIONS[name]


def hf_activation(config: MaxTextConfig) -> str:
    for hf_name, native_name in ACTIVATIONS.items():
        if native_name == config.mlp_activations[0]:
            return hf_name
    supported = ", ".join(dict.fromkeys(ACTIVATIONS.values()))
    raise UserError(
        f"mlp_activations={config.mlp_activations} has no name in a Hugging Face config.json; "
        f"these have: {supported}"
    )


def require(hf_config: Json, **values: Any) -> None:
    """Raise UserError if an entry has a value other than the only supported one; absent and null
    entries have the supported value.
    """
    for name, value in values.items():
        if hf_config.get(name) not in (value, None):
            raise UserError(
                f"config.json: {name}={hf_config[name]!r} is not supported, only {value!r}"
            )


def layer_kinds(hf_config: Json, default: Callable[[int], str] | None = None) -> list[str] | None:
    """The kinds of layers, as listed or by the rule of the family."""
    layer_types = hf_config.get("layer_types")
    if layer_types is None:
        return [default(i) for i in range(hf_config["num_hidden_layers"])] if default else None
    unknown = sorted(set(layer_types) - set(LAYER_TYPES))
    if unknown:
        raise UserError(
            f"config.json: layer_types has {', '.join(unknown)}: "
            f"supported are {', '.join(LAYER_TYPES)}"
        )
    return [LAYER_TYPES[name] for name in layer_types]


def dense_keys(hf_config: Json, decoder_block: str, epsilon: str = "rms_norm_eps") -> Json:
    """Keys that nearly all families state alike; `epsilon` is the entry of the norms' epsilon."""
    stated = {name: value for name, value in hf_config.items() if value is not None}
    heads = stated["num_attention_heads"]
    hidden_act = stated.get("hidden_act") or stated.get("hidden_activation") or "silu"
    return {
        "decoder_block": decoder_block,
        "base_emb_dim": stated["hidden_size"],
        "base_num_query_heads": heads,
        "base_num_kv_heads": stated.get("num_key_value_heads", heads),
        "head_dim": stated.get("head_dim", stated["hidden_size"] // heads),
        "base_mlp_dim": stated["intermediate_size"],
        "base_num_decoder_layers": stated["num_hidden_layers"],
        "vocab_size": stated["vocab_size"],
        "mlp_activations": [native_activation(hidden_act), "linear"],
        "normalization_layer_epsilon": stated[epsilon],
        "logits_via_embedding": stated.get("tie_word_embeddings", False),
        "normalize_embedding_logits": False,
        "attention_bias": stated.get("attention_bias", False),
        "mlp_bias": stated.get("mlp_bias", False),
        "max_position_embeddings": stated["max_position_embeddings"],
        "enable_dropout": False,
    }


def rope_parameters(hf_config: Json) -> Json:
    """RoPE parameters in the newer form, of one kind of layer or by kind."""
    if hf_config.get("rope_parameters"):
        return hf_config["rope_parameters"]
    scaling = dict(hf_config.get("rope_scaling") or {})
    scaling.setdefault("rope_type", scaling.pop("type", "default"))
    return scaling | {"rope_theta": hf_config.get("rope_theta", 10_000.0)}


def rope_fields(
    hf_config: Json, parameters: Json, fraction: float = 1.0, interleave: bool = False
) -> Json:
    """The fields of a RopeSpec that compute what transformers does with these parameters."""
    rope_type = parameters.get("rope_type", "default")
    if rope_type == "mrope":  # the three positions of a text token are the same
        rope_type = "default"
    theta = parameters.get("rope_theta") or hf_config.get("rope_theta") or 10_000.0
    fields: Json = {
        "max_timescale": float(theta),
        "fraction": float(
            parameters.get("partial_rotary_factor")
            or hf_config.get("partial_rotary_factor")
            or fraction
        ),
        "interleave": interleave,
    }
    original = parameters.get("original_max_position_embeddings") or hf_config.get(
        "max_position_embeddings"
    )
    if rope_type == "linear":
        fields["linear_factor"] = float(parameters["factor"])
    elif rope_type == "proportional":
        fields |= {"proportional": True, "linear_factor": float(parameters.get("factor", 1.0))}
    elif rope_type == "llama3":
        fields |= {
            "kind": "llama3.1",
            "factor": float(parameters["factor"]),
            "original_length": original,
            "low_frequency_factor": float(parameters["low_freq_factor"]),
            "high_frequency_factor": float(parameters["high_freq_factor"]),
        }
    elif rope_type == "yarn":
        factor = float(parameters.get("factor") or hf_config["max_position_embeddings"] / original)
        fields |= {
            "kind": "yarn",
            "factor": factor,
            "original_length": original,
            "beta_fast": float(parameters.get("beta_fast") or 32),
            "beta_slow": float(parameters.get("beta_slow") or 1),
            "truncate": bool(parameters.get("truncate", True)),
            "attention_factor": yarn_attention_factor(parameters, factor),
        }
    elif rope_type == "longrope":
        fields |= longrope_fields(hf_config, parameters, fields["fraction"])
    elif rope_type != "default":
        raise UserError(
            f"config.json: rope_type={rope_type!r} is not supported: default, linear, llama3, "
            "yarn, longrope and proportional are"
        )
    return fields


def longrope_fields(hf_config: Json, parameters: Json, fraction: float) -> Json:
    original = (
        hf_config.get("original_max_position_embeddings")
        or parameters.get("original_max_position_embeddings")
        or hf_config["max_position_embeddings"]
    )
    factor = float(parameters.get("factor") or hf_config["max_position_embeddings"] / original)
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        scale = math.log(factor) / math.log(original) if factor > 1 else 0.0
        attention_factor = math.sqrt(1 + scale)
    head_dim = hf_config.get("head_dim") or (
        hf_config["hidden_size"] // hf_config["num_attention_heads"]
    )
    pairs = int(head_dim * fraction) // 2
    for name in ("short_factor", "long_factor"):
        if len(parameters[name]) != pairs:
            raise UserError(
                f"config.json: {name} has {len(parameters[name])} entries, and {pairs} pairs of a "
                "head's dimensions are rotated"
            )
    return {
        "kind": "longrope",
        "factor": factor,
        "original_length": original,
        "short_factors": [float(value) for value in parameters["short_factor"]],
        "long_factors": [float(value) for value in parameters["long_factor"]],
        "attention_factor": float(attention_factor),
    }


def yarn_attention_factor(parameters: Json, factor: float) -> float:
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return yarn_temperature(factor, mscale) / yarn_temperature(factor, mscale_all_dim)
    return yarn_temperature(factor)


def yarn_temperature(factor: float, scale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def rope_keys(fields: Json) -> Json:
    """The keys that state the same as RopeSpec fields, as far as the keys' types can."""
    keys: Json = {"rope_type": "default", "partial_rotary_factor": fields["fraction"]}
    if fields["max_timescale"].is_integer():
        keys["rope_max_timescale"] = int(fields["max_timescale"])
    if fields.get("linear_factor", 1.0) != 1.0:
        keys["rope_linear_scaling_factor"] = fields["linear_factor"]
    if fields.get("kind") in ("llama3.1", "yarn"):
        keys["rope_type"] = fields["kind"]
        keys["original_max_position_embeddings"] = int(fields["original_length"])
        if fields["factor"].is_integer():
            keys["rope_factor"] = int(fields["factor"])
    return keys


def uniform_rope(hf_config: Json, fraction: float = 1.0, interleave: bool = False) -> ModelSettings:
    """The settings of a model whose layers all have the same RoPE."""
    fields = rope_fields(hf_config, rope_parameters(hf_config), fraction, interleave)
    return ModelSettings(rope_keys(fields), {"rope": {"all": fields}})
