"""RoPE in config.json: its older and newer entries, brought into one form as transformers'
`modeling_rope_utils.py` does, and the fields of a RopeSpec that compute the same.

Older files have rope_theta, rope_scaling and partial_rotary_factor; newer ones have
rope_parameters, for all layers or by kind of layer, and may have the older entries as well.
"""

import math
from typing import Any

from maxtext.common.errors import UserError
from maxtext.common.types import Json

# The entries of RoPE, with the defaults of most of transformers' configuration classes.
ROPE_DEFAULTS: Json = {
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": None,
    "original_max_position_embeddings": None,
}
KINDS = ("full_attention", "sliding_attention")
SCALED_BY_LENGTH = ("llama3", "yarn", "longrope")


def rope_parameters(entries: Json) -> Json:
    """RoPE parameters of a model whose layers all have the same RoPE.

    rope_scaling, unless it is empty, replaces rope_parameters, and the entries next to them
    fill what is left out. Raises UserError for parameters by kind of layer.
    """
    parameters = dict(entries["rope_scaling"] or entries["rope_parameters"] or {})
    nested = [name for name, value in parameters.items() if isinstance(value, dict)]
    if nested:
        raise UserError(
            f"config.json: rope_parameters has {', '.join(nested)}, and all layers of this family "
            "have the same RoPE: give its parameters without kinds of layers"
        )
    length = entries["original_max_position_embeddings"]
    if length is not None:  # overrides the length in rope_parameters
        parameters["original_max_position_embeddings"] = length
    return completed(parameters, entries, entries["rope_theta"])


def rope_parameters_by_kind(entries: Json, local_theta: float) -> dict[str, Json]:
    """RoPE parameters of full and sliding layers; rope_scaling is added to those of full layers."""
    given = entries["rope_parameters"] or {}
    full, sliding = (dict(given.get(kind) or {"rope_type": "default"}) for kind in KINDS)
    full |= entries["rope_scaling"] or {}
    parameters = {
        "full_attention": completed(full, entries, entries["rope_theta"]),
        "sliding_attention": completed(sliding, entries, local_theta),
    }
    return {kind: with_outer_truncate(own, given) for kind, own in parameters.items()}


def with_outer_truncate(parameters: Json, outer: Json) -> Json:
    """transformers reads YaRN's truncate next to the kinds of layers, not in them."""
    return parameters | {"truncate": outer.get("truncate", True)}


def completed(parameters: Json, entries: Json, theta: float | None) -> Json:
    """The parameters with a type, a base, a rotated fraction and the original length."""
    parameters = {"rope_type": parameters.get("type", "default"), "rope_theta": theta} | parameters
    if entries["partial_rotary_factor"] is not None:
        parameters.setdefault("partial_rotary_factor", entries["partial_rotary_factor"])
    parameters.setdefault("original_max_position_embeddings", entries["max_position_embeddings"])
    return parameters


def required(parameters: Json, name: str) -> Any:
    if parameters.get(name) is None:
        raise UserError(
            f"config.json: the RoPE parameters of type {parameters['rope_type']!r} have no {name}"
        )
    return parameters[name]


def rope_fields(
    entries: Json, parameters: Json, *, interleave: bool = False, partial: bool = False
) -> Json:
    """The fields of a RopeSpec that compute what transformers does with complete parameters.

    `partial`: heads of the family may rotate in part; in others transformers ignores
    partial_rotary_factor with the default type and fails with most other types.
    """
    rope_type = parameters["rope_type"]
    if rope_type == "mrope":  # the three positions of a text token are the same
        rope_type = "default"
    fraction = required({"partial_rotary_factor": 1.0} | parameters, "partial_rotary_factor")
    if rope_type == "default" and not partial:
        fraction = 1.0
    head_dim = rotary_head_dim(entries)
    if rope_type != "proportional" and not partial and int(head_dim * fraction) != head_dim:
        raise UserError(
            f"config.json: partial_rotary_factor={fraction} is not supported: heads of this family "
            "rotate as a whole"
        )
    fields: Json = {
        "max_timescale": float(required(parameters, "rope_theta")),
        "fraction": float(fraction),
        "interleave": interleave,
    }
    if rope_type == "linear":
        fields["linear_factor"] = float(required(parameters, "factor"))
    elif rope_type == "proportional":
        factor = required({"factor": 1.0} | parameters, "factor")
        fields |= {"proportional": True, "linear_factor": float(factor)}
    elif rope_type == "llama3":
        fields |= {
            "kind": "llama3.1",
            "factor": float(required(parameters, "factor")),
            "original_length": parameters["original_max_position_embeddings"],
            "low_frequency_factor": float(required(parameters, "low_freq_factor")),
            "high_frequency_factor": float(required(parameters, "high_freq_factor")),
        }
    elif rope_type == "yarn":
        fields |= yarn_fields(entries, parameters)
    elif rope_type == "longrope":
        fields |= longrope_fields(entries, parameters, fraction)
    elif rope_type != "default":
        raise UserError(
            f"config.json: rope_type={rope_type!r} is not supported: default, linear, llama3, "
            "yarn, longrope and proportional are"
        )
    return fields


def rotary_head_dim(entries: Json) -> int:
    return (
        entries.get("qk_rope_head_dim")
        or entries.get("head_dim")
        or entries["hidden_size"] // entries["num_attention_heads"]
    )


def stretch(entries: Json, parameters: Json) -> float:
    """The factor; null stands for the longest sequence over the original length."""
    if parameters.get("factor") is not None:
        return float(parameters["factor"])
    length = required(parameters, "original_max_position_embeddings")
    return float(entries["max_position_embeddings"] / length)


def yarn_fields(entries: Json, parameters: Json) -> Json:
    if "factor" not in parameters:
        required(parameters, "factor")
    factor = stretch(entries, parameters)
    return {
        "kind": "yarn",
        "factor": factor,
        "original_length": required(parameters, "original_max_position_embeddings"),
        "beta_fast": float(parameters.get("beta_fast") or 32),
        "beta_slow": float(parameters.get("beta_slow") or 1),
        "truncate": bool(parameters.get("truncate", True)),
        "attention_factor": yarn_attention_factor(parameters, factor),
    }


def longrope_fields(entries: Json, parameters: Json, fraction: float) -> Json:
    original = required(parameters, "original_max_position_embeddings")
    factor = stretch(entries, parameters)
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        scale = math.log(factor) / math.log(original) if factor > 1 else 0.0
        attention_factor = math.sqrt(1 + scale)
    pairs = int(rotary_head_dim(entries) * fraction) // 2
    for name in ("short_factor", "long_factor"):
        if len(required(parameters, name)) != pairs:
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
