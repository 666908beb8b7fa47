"""The fields of the JSON files of a Hugging Face folder: each file is checked once, before anything
reads it.

Absent fields are not checked here: a family's reader knows which it needs. Messages name the file
and the field as it is spelled there.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from maxtext.common.errors import ConfigError
from maxtext.common.files import read_json_object
from maxtext.common.types import Json

INT32_MAX = 2**31 - 1
MAX_LAYERS = 10_000
LAYER_KINDS = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention")


@dataclass(frozen=True)
class Kind:
    """A kind of value: its name in messages, and the predicate that accepts it."""

    name: str
    accepts: Callable[[Any], bool]
    per_layer: bool = False  # a list that has one entry for each layer

    def __or__(self, second: "Kind") -> "Kind":
        return Kind(
            f"{self.name} or {second.name}",
            lambda value: self.accepts(value) or second.accepts(value),
        )


Fields = Mapping[str, Kind]


def is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def integer(low: int, high: int = INT32_MAX) -> Kind:
    return Kind(
        f"a whole number from {low:,} to {high:,}", lambda v: is_integer(v) and low <= v <= high
    )


def number(low: float, high: float = 3.4e38) -> Kind:
    """Above `low`, up to `high`."""

    def accepts(value: Any) -> bool:
        return (
            (is_integer(value) or isinstance(value, float))
            and math.isfinite(value)
            and low < value <= high
        )

    return Kind(f"a number above {low:g}" + (f", up to {high:g}" if high < 3e38 else ""), accepts)


def list_of(kind: Kind, plural: str) -> Kind:
    return Kind(
        f"a list of {plural}",
        lambda v: isinstance(v, list) and all(kind.accepts(item) for item in v),
    )


def per_layer(kind: Kind) -> Kind:
    return replace(kind, per_layer=True)


NULL = Kind("null", lambda value: value is None)
ZERO = Kind("0", lambda value: not isinstance(value, bool) and value == 0)
BOOL = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("text", lambda value: isinstance(value, str))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
SIZE, COUNT, LAYERS = integer(1), integer(0), integer(1, MAX_LAYERS)
POSITIVE, FRACTION, ANY_NUMBER = number(0), number(0, 1), number(-3.4e38)
TOKENS = integer(-1) | list_of(integer(0), "token ids") | NULL  # some files write -1 for none


def all_of(kind: Kind, *names: str) -> dict[str, Kind]:
    return dict.fromkeys(names, kind)


# Fields of config.json, or of text_config in it, that several families have; a family adds its own
# (`Field.kind`).
TEXT_FIELDS = {
    **all_of(SIZE, "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"),
    **all_of(SIZE, "max_position_embeddings", "num_local_experts"),
    **all_of(LAYERS, "num_hidden_layers"),
    **all_of(SIZE | NULL, "num_key_value_heads", "head_dim", "num_experts", "num_experts_per_tok"),
    **all_of(SIZE | NULL, "moe_intermediate_size"),
    **all_of(COUNT | NULL, "sliding_window"),
    **all_of(POSITIVE, "rms_norm_eps"),
    **all_of(POSITIVE | NULL, "rope_theta"),
    **all_of(FRACTION | NULL, "partial_rotary_factor"),
    **all_of(BOOL | NULL, "tie_word_embeddings", "attention_bias", "mlp_bias", "norm_topk_prob"),
    **all_of(BOOL | NULL, "use_qk_norm"),
    **all_of(TEXT | NULL, "hidden_act", "hidden_activation"),
    "layer_types": per_layer(list_of(TEXT, "names") | NULL),
    **all_of(OBJECT | NULL, "rope_parameters", "rope_scaling"),
    "eos_token_id": TOKENS,
}
TOP_FIELDS = {
    "architectures": list_of(TEXT, "names") | NULL,
    "model_type": TEXT | NULL,
    "text_config": OBJECT | NULL,
    "quantization_config": OBJECT | NULL,
    **all_of(TEXT | NULL, "torch_dtype", "dtype"),
}
ROPE_FIELDS = {
    **all_of(TEXT | NULL, "rope_type", "type"),
    **all_of(POSITIVE | NULL, "rope_theta", "low_freq_factor", "high_freq_factor", "beta_fast",
             "beta_slow", "attention_factor"),
    **all_of(POSITIVE | ZERO | NULL, "mscale", "mscale_all_dim"),  # 0 is as null
    "factor": number(0, 1e9) | NULL,
    "original_max_position_embeddings": SIZE | NULL,
    "partial_rotary_factor": FRACTION | NULL,
    "truncate": BOOL | NULL,
    **all_of(list_of(POSITIVE, "numbers") | NULL, "short_factor", "long_factor"),
}  # fmt: skip
GENERATION_FIELDS = {"eos_token_id": TOKENS}
LAYER_FIELDS = all_of(SIZE | NULL, "head_dim", "num_key_value_heads")  # of per_layer_config


def read_config(folder: Path, family_fields: Fields) -> Json:
    """config.json of a Hugging Face folder, checked. Raises ConfigError with every wrong field.

    `family_fields`: the fields that families have beyond TEXT_FIELDS.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has no config.json: it is not a Hugging Face folder")
    hf_config = read_json_object(path)
    fields = TEXT_FIELDS | dict(family_fields)
    problems = field_problems(hf_config, TOP_FIELDS)
    text = hf_config.get("text_config")
    if isinstance(text, dict):
        problems += text_problems(text, fields, "text_config.") + field_problems(
            hf_config, {"eos_token_id": TOKENS}
        )
        problems += field_problems(hf_config, all_of(BOOL | NULL, "tie_word_embeddings"))
    elif text is None:
        problems += text_problems(hf_config, fields)
    refuse(path, problems)
    return hf_config


def check_generation_config(path: Path) -> Json:
    """generation_config.json, checked."""
    generation = read_json_object(path)
    refuse(path, field_problems(generation, GENERATION_FIELDS))
    return generation


def text_problems(text: Json, fields: Fields, prefix: str = "") -> list[str]:
    """Problems of the fields that describe a text model."""
    problems = field_problems(text, fields, prefix)
    if not problems:
        problems = (
            rope_problems(text, prefix)
            + layer_problems(text, fields, prefix)
            + divisibility_problems(text, prefix)
        )
    return problems


def rope_problems(text: Json, prefix: str) -> list[str]:
    """rope_parameters and rope_scaling hold one object's fields, or an object for each kind of
    layer.
    """
    problems = []
    for name in ("rope_parameters", "rope_scaling"):
        rope = text.get(name) or {}
        kinds = [kind for kind in LAYER_KINDS if kind in rope]
        problems += field_problems(
            rope, {**ROPE_FIELDS, **all_of(OBJECT | NULL, *kinds)}, f"{prefix}{name}."
        )
        for kind in kinds:
            if isinstance(rope[kind], dict):
                problems += field_problems(rope[kind], ROPE_FIELDS, f"{prefix}{name}.{kind}.")
    return problems


def layer_problems(text: Json, fields: Fields, prefix: str) -> list[str]:
    """Lists with an entry a layer, and per_layer_config."""
    problems = []
    count = text.get("num_hidden_layers")
    for name in (name for name, kind in fields.items() if kind.per_layer):
        if text.get(name) and count is not None and len(text[name]) != count:
            problems.append(
                f"{prefix}{name} has {len(text[name])} entries, and num_hidden_layers is {count}"
            )
    for number_text, layer in (text.get("per_layer_config") or {}).items():
        name = f"{prefix}per_layer_config.{number_text}"
        if not number_text.isdecimal() or len(number_text) > 9 or not isinstance(layer, dict):
            problems.append(
                f"{name} is {as_json(layer)}, expected a number of a layer with an object"
            )
        else:
            problems += field_problems(layer, LAYER_FIELDS, f"{name}.")
    return problems


def divisibility_problems(text: Json, prefix: str) -> list[str]:
    """Sizes that must divide each other."""
    problems = []
    for multiple, divisor in (
        ("num_attention_heads", "num_key_value_heads"),
        ("num_attention_heads", "num_global_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ):
        if text.get(multiple) and text.get(divisor) and text[multiple] % text[divisor]:
            problems.append(
                f"{prefix}{multiple}={text[multiple]} is not a multiple of "
                f"{divisor}={text[divisor]}"
            )
    return problems


def field_problems(values: Json, fields: Fields, prefix: str = "") -> list[str]:
    return [
        f"{prefix}{name} is {as_json(values[name])}, expected {kind.name}"
        for name, kind in fields.items()
        if name in values and not kind.accepts(values[name])
    ]


def as_json(value: object) -> str:
    """A value as JSON, shortened."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:50]}…"


def refuse(path: Path, problems: list[str]) -> None:
    if problems:
        raise ConfigError(*(f"{path}: {problem}" for problem in problems))
