"""What the JSON files of a Hugging Face folder may hold: each is checked once, before anything
reads it.

A field that is absent is not checked here: a family's reader knows which it needs. Messages name
the file and its own field, as a person finds it there.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxtext.common.errors import ConfigError
from maxtext.common.files import read_json_object

Json = dict[str, Any]
INT32_MAX = 2**31 - 1
MOST_LAYERS = 10_000
LAYER_KINDS = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention")


@dataclass(frozen=True)
class Kind:
    """A kind of value: what messages call it, and its test."""

    name: str
    admits: Callable[[Any], bool]

    def __or__(self, other: "Kind") -> "Kind":
        return Kind(
            f"{self.name} or {other.name}", lambda value: self.admits(value) or other.admits(value)
        )


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def integer(low: int, high: int = INT32_MAX) -> Kind:
    return Kind(
        f"a whole number from {low:,} to {high:,}", lambda v: is_integer(v) and low <= v <= high
    )


def number(low: float, high: float = 3.4e38) -> Kind:
    """Above `low`, up to `high`."""

    def admits(value: Any) -> bool:
        return (
            (is_integer(value) or isinstance(value, float))
            and math.isfinite(value)
            and low < value <= high
        )

    return Kind(f"a number above {low:g}" + (f", up to {high:g}" if high < 3e38 else ""), admits)


def list_of(kind: Kind, plural: str) -> Kind:
    return Kind(
        f"a list of {plural}",
        lambda v: isinstance(v, list) and all(kind.admits(item) for item in v),
    )


NULL = Kind("null", lambda value: value is None)
SWITCH = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("text", lambda value: isinstance(value, str))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
SIZE, COUNT, LAYERS = integer(1), integer(0), integer(1, MOST_LAYERS)
POSITIVE, FRACTION, ANY_NUMBER = number(0), number(0, 1), number(-3.4e38)
TOKENS = integer(-1) | list_of(integer(0), "token ids") | NULL  # some files write -1 for none


def each(kind: Kind, *names: str) -> dict[str, Kind]:
    return dict.fromkeys(names, kind)


# Of config.json, or of text_config in it.
TEXT_FIELDS = {
    **each(SIZE, "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings",
           "intermediate_size_mlp", "interleave_moe_layer_step", "no_rope_layer_interval", "num_local_experts",
           "query_pre_attn_scalar", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim",
           "linear_num_key_heads", "linear_num_value_heads", "decoder_sparse_step", "full_attention_interval",
           "sliding_window_pattern", "n_routed_experts", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim",
           "index_n_heads", "index_head_dim", "index_topk", "global_head_dim", "n_embd", "n_head", "n_positions",
           "floor_scale"),
    **each(LAYERS, "num_hidden_layers", "n_layer"),
    **each(COUNT, "first_k_dense_replace", "max_window_layers", "qk_nope_head_dim"),
    **each(SIZE | NULL, "num_key_value_heads", "head_dim", "num_experts", "num_experts_per_tok",
           "moe_intermediate_size", "top_k_experts", "num_global_key_value_heads", "n_group", "topk_group", "n_inner",
           "shared_expert_intermediate_size"),
    **each(COUNT | NULL, "sliding_window", "attention_chunk_size", "q_lora_rank", "n_shared_experts",
           "num_nextn_predict_layers", "hidden_size_per_layer_input", "num_kv_shared_layers"),
    **each(POSITIVE, "rms_norm_eps", "layer_norm_epsilon", "routed_scaling_factor", "attn_scale"),
    **each(POSITIVE | NULL, "rope_theta", "rope_local_base_freq", "attn_logit_softcapping", "final_logit_softcapping",
           "swiglu_limit"),
    **each(FRACTION | NULL, "partial_rotary_factor"),
    **each(SWITCH | NULL, "tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "norm_topk_prob",
           "use_qk_norm", "rope_interleave", "attention_k_eq_v", "enable_moe_block"),
    **each(SWITCH | COUNT | NULL, "attn_temperature_tuning"),  # published as 4, too
    **each(TEXT | NULL, "hidden_act", "hidden_activation", "activation_function", "topk_method", "scoring_func"),
    **each(list_of(TEXT, "names") | NULL, "layer_types", "mlp_layer_types"),
    **each(list_of(COUNT, "whole numbers") | NULL, "no_rope_layers", "moe_layers", "mlp_only_layers"),
    **each(OBJECT | NULL, "rope_parameters", "rope_scaling", "per_layer_config"),
    "eos_token_id": TOKENS,
}  # fmt: skip
TOP_FIELDS = {
    "architectures": list_of(TEXT, "names") | NULL,
    "model_type": TEXT | NULL,
    "text_config": OBJECT | NULL,
    "quantization_config": OBJECT | NULL,
    **each(TEXT | NULL, "torch_dtype", "dtype"),
}
ROPE_FIELDS = {
    **each(TEXT | NULL, "rope_type", "type"),
    **each(POSITIVE | NULL, "rope_theta", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
           "attention_factor", "mscale", "mscale_all_dim"),
    "factor": number(0, 1e9) | NULL,
    "original_max_position_embeddings": SIZE | NULL,
    "partial_rotary_factor": FRACTION | NULL,
    "truncate": SWITCH | NULL,
}  # fmt: skip
GENERATION_FIELDS = {"eos_token_id": TOKENS}
LAYER_FIELDS = each(SIZE | NULL, "head_dim", "num_key_value_heads")  # of per_layer_config


def read_config(folder: Path) -> Json:
    """config.json of a Hugging Face folder, checked. Raises ConfigError with every wrong field."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has no config.json: it is not a Hugging Face folder")
    hf = read_json_object(path)
    problems = wrong_fields(hf, TOP_FIELDS)
    text = hf.get("text_config")
    if isinstance(text, dict):
        problems += wrong_text(text, "text_config.") + wrong_fields(hf, {"eos_token_id": TOKENS})
        problems += wrong_fields(hf, each(SWITCH | NULL, "tie_word_embeddings"))
    elif text is None:
        problems += wrong_text(hf)
    refuse(path, problems)
    return hf


def check_generation_config(path: Path) -> Json:
    """generation_config.json, checked."""
    generation = read_json_object(path)
    refuse(path, wrong_fields(generation, GENERATION_FIELDS))
    return generation


def wrong_text(text: Json, prefix: str = "") -> list[str]:
    """What is wrong with the fields that describe a text model."""
    problems = wrong_fields(text, TEXT_FIELDS, prefix)
    if not problems:
        problems = (
            wrong_ropes(text, prefix) + wrong_layers(text, prefix) + wrong_relations(text, prefix)
        )
    return problems


def wrong_ropes(text: Json, prefix: str) -> list[str]:
    """rope_parameters and rope_scaling hold one object's fields, or an object for each kind of
    layer.
    """
    problems = []
    for name in ("rope_parameters", "rope_scaling"):
        rope = text.get(name) or {}
        kinds = [kind for kind in LAYER_KINDS if kind in rope]
        problems += wrong_fields(rope, {**ROPE_FIELDS, **each(OBJECT, *kinds)}, f"{prefix}{name}.")
        for kind in kinds:
            if isinstance(rope[kind], dict):
                problems += wrong_fields(rope[kind], ROPE_FIELDS, f"{prefix}{name}.{kind}.")
    return problems


def wrong_layers(text: Json, prefix: str) -> list[str]:
    """Lists with an entry a layer, and per_layer_config."""
    problems = []
    count = text.get("num_hidden_layers")
    for name in ("layer_types", "no_rope_layers", "mlp_layer_types"):
        if text.get(name) and count is not None and len(text[name]) != count:
            problems.append(
                f"{prefix}{name} has {len(text[name])} entries, and num_hidden_layers is {count}"
            )
    for number_text, layer in (text.get("per_layer_config") or {}).items():
        name = f"{prefix}per_layer_config.{number_text}"
        if not number_text.isdecimal() or len(number_text) > 9 or not isinstance(layer, dict):
            problems.append(
                f"{name} is {shown(layer)}, expected a number of a layer with an object"
            )
        else:
            problems += wrong_fields(layer, LAYER_FIELDS, f"{name}.")
    return problems


def wrong_relations(text: Json, prefix: str) -> list[str]:
    """Sizes that must divide each other."""
    problems = []
    for whole, part in (
        ("num_attention_heads", "num_key_value_heads"),
        ("num_attention_heads", "num_global_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ):
        if text.get(whole) and text.get(part) and text[whole] % text[part]:
            problems.append(
                f"{prefix}{whole}={text[whole]} is not a multiple of {part}={text[part]}"
            )
    return problems


def wrong_fields(
    values: Mapping[str, Any], kinds: Mapping[str, Kind], prefix: str = ""
) -> list[str]:
    return [
        f"{prefix}{name} is {shown(values[name])}, expected {kind.name}"
        for name, kind in kinds.items()
        if name in values and not kind.admits(values[name])
    ]


def shown(value: Any) -> str:
    """A value as JSON, shortened."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:50]}…"


def refuse(path: Path, problems: list[str]) -> None:
    if problems:
        raise ConfigError(*(f"{path}: {problem}" for problem in problems))
