"""Groups of entries of config.json that depend on each other or on the layers, in both directions:
RoPE, the kinds of layers, and which layers have experts.
"""

import json
from collections.abc import Callable

from maxtext.common.errors import UserError
from maxtext.common.types import Json
from maxtext.configs.types import MaxTextConfig
from maxtext.hf.config_json import Field, FieldGroup, LayerSpecs, ModelSettings
from maxtext.hf.rope_parameters import (
    ROPE_DEFAULTS,
    rope_fields,
    rope_keys,
    rope_parameters,
    rope_parameters_by_kind,
)
from maxtext.hf.schema import Kind
from maxtext.layers.specs import LayerSpec, RopeSpec
from maxtext.models.common import mixer_kind

# layer_types -> kind of layer
LAYER_TYPES = {
    "full_attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunk",
    "linear_attention": "linear",
}

# Models with multi-token prediction layers, which folders have as transformers and vLLM run them.
MTP_AFTER_NORMS = FieldGroup(read=lambda entries: ModelSettings({}, {"mtp_reads_normed": True}))


def rope_entry_fields(**defaults: object) -> tuple[Field, ...]:
    """The entries of RoPE, with the defaults in which a family differs from most."""
    return tuple(
        Field(name, default=default) for name, default in (ROPE_DEFAULTS | defaults).items()
    )


def uniform_rope(
    *, interleave: bool = False, partial: bool = False, required: bool = True, **defaults: object
) -> FieldGroup:
    """RoPE that is the same in all layers that have it; `required`: one layer must.

    `partial`: heads of the family may rotate in part, and the fraction is written even if it is 1.
    """

    def read(entries: Json) -> ModelSettings:
        return rope_settings(
            rope_fields(entries, rope_parameters(entries), interleave=interleave, partial=partial)
        )

    def write(config: MaxTextConfig, layers: LayerSpecs) -> Json:
        rope = first_rope(layers)
        if rope is None and not required:
            return {"rope_parameters": None}
        fraction = {"partial_rotary_factor": rope.fraction} if rope and partial else {}
        return {"rope_parameters": fraction | rope_entry(rope)}

    return FieldGroup(rope_entry_fields(**defaults), read, write)


def rope_settings(fields: Json) -> ModelSettings:
    return ModelSettings(rope_keys(fields), {"rope": {"all": fields}})


def first_rope(layers: LayerSpecs) -> RopeSpec | None:
    ropes = (getattr(layer.attention, "rope", None) for layer in layers)
    return next((rope for rope in ropes if rope is not None), None)


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


def rope_entries(layers: LayerSpecs, default: Json | None = None) -> Json:
    """rope_parameters by layer_types, for full and sliding layers; of a kind that the model lacks
    `default`, or that of the first layer.
    """
    entries: Json = {}
    for spec, layer_type in zip(layers, layer_types_entry(layers), strict=True):
        entries.setdefault(layer_type, rope_entry(spec.attention.rope))
    default = default or next(iter(entries.values()))
    # transformers reads truncate next to the kinds of layers.
    truncate = {entry.pop("truncate") for entry in entries.values() if "truncate" in entry}
    return {
        **{kind: entries.get(kind, default) for kind in ("full_attention", "sliding_attention")},
        **({"truncate": False} if False in truncate else {}),
    }


def ropes_by_kind(entries: Json, local_theta: float) -> ModelSettings:
    """Settings of full and sliding layers with a RoPE each; the keys state that of full layers."""
    parameters = rope_parameters_by_kind(entries, local_theta)
    ropes = {LAYER_TYPES[kind]: rope_fields(entries, own) for kind, own in parameters.items()}
    return ModelSettings(rope_keys(ropes["full"]), {"rope": ropes})


def layer_types(rule: Callable[[int, Json], str], *fields: Field) -> FieldGroup:
    """The kinds of layers: layer_types, or else the family's rule for the index of a layer, which
    may depend on the entries `fields`.
    """
    return FieldGroup(
        (LAYER_TYPES_FIELD, *fields),
        lambda entries: ModelSettings({}, {"layer_kinds": layer_kinds(entries, rule)}),
    )


def layer_kinds(entries: Json, rule: Callable[[int, Json], str]) -> list[str]:
    """The kinds of layers, as listed or by the rule of the family."""
    listed = entries["layer_types"]
    if listed is None:
        return [rule(i, entries) for i in range(entries["num_hidden_layers"])]
    unknown = sorted(set(listed) - set(LAYER_TYPES))
    if unknown:
        raise UserError(
            f"config.json: layer_types has {', '.join(unknown)}: "
            f"supported are {', '.join(LAYER_TYPES)}"
        )
    return [LAYER_TYPES[name] for name in listed]


def layer_types_entry(layers: LayerSpecs) -> list[str]:
    hf_names = {kind: hf_name for hf_name, kind in LAYER_TYPES.items()}
    hf_names["unmasked"] = "full_attention"  # `config_differences` refuses it
    return [hf_names[mixer_kind(layer.attention)] for layer in layers]


LAYER_TYPES_FIELD = Field(
    "layer_types", from_layers=lambda config, layers: layer_types_entry(layers)
)


def every_nth(pattern: str | int, kind: str, others: str = "sliding") -> Callable[[int, Json], str]:
    """Layers n-1, 2n-1, … are of a kind; `pattern` is n, or the entry that states it."""

    def rule(layer: int, entries: Json) -> str:
        n = entries[pattern] if isinstance(pattern, str) else pattern
        if not isinstance(n, int) or n == 0:
            raise UserError(
                f"config.json: {pattern}={json.dumps(n)} needs layer_types, which list the kinds "
                "of layers"
            )
        return others if (layer + 1) % n else kind

    return rule


def listed_rope_layers(entries: Json) -> list[bool]:
    """The layers with RoPE: despite its name, no_rope_layers has a 1 for each of them."""
    count, interval = entries["num_hidden_layers"], entries["no_rope_layer_interval"]
    flags = entries["no_rope_layers"] or [(i + 1) % interval for i in range(count)]
    return [bool(flag) for flag in flags]


# The default of the class may be beyond a smaller vocabulary.
NO_PAD_TOKEN = Field("pad_token_id", from_layers=lambda config, layers: None)


def no_rope_layers_field(kind: Kind | None = None) -> Field:
    return Field(
        "no_rope_layers",
        from_layers=lambda config, layers: [
            int(layer.attention.rope is not None) for layer in layers
        ],
        kind=kind,
    )


def has_experts(layer: LayerSpec) -> bool:
    return hasattr(layer.mlp, "router")
