"""config.json to configuration keys: the record of a mapping, and the parts that most families
share. `models/hf_config.py` has the other direction, which reads layer specs.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from maxtext.common.errors import UserError
from maxtext.configs.types import MaxTextConfig
from maxtext.hf.rope_parameters import ROPE_DEFAULTS, rope_fields, rope_keys, rope_parameters
from maxtext.hf.rules import Rule
from maxtext.hf.schema import Kind

Json = dict[str, Any]
LayerSpecs = Sequence[Any]


@dataclass
class ModelSettings:
    """What a config.json states: configuration keys, and attributes that no key names."""

    keys: Json
    hf_attributes: Json = field(default_factory=dict)  # fields of configs.types.Architecture


# Entries that transformers reads for models of every family, with the values that are supported.
SUPPORTED: Mapping[str, tuple[Any, ...]] = {"is_causal": (True,), "per_layer_config": (None, {})}


@dataclass(frozen=True)
class HfMapping:
    """How models of one `model_type` are read from a Hugging Face folder and written to it.

    Functions that take a configuration also take the specs of its layers.
    """

    architectures: tuple[str, ...]  # the first is written; the others hold the same text model
    model_type: str
    read: Callable[[Json], ModelSettings]  # of `entries`
    # The entries of config.json except architectures, model_type and dtype.
    write: Callable[[MaxTextConfig, LayerSpecs], Json]
    rules: Callable[[MaxTextConfig, LayerSpecs], list[Rule]]
    # The entries of config.json that the model depends on, with the values of transformers'
    # configuration class for those that are left out. Folders of models with images rely on these:
    # their text_config has only what differs.
    defaults: Mapping[str, Any]
    # Further entries that transformers reads, with the values that are supported.
    supported: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # Second name of an entry -> the entry; of two names that are given, the later one here counts.
    aliases: Mapping[str, str] = field(default_factory=dict)
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

    def entries(self, text_config: Json) -> Json:
        """The entries that `defaults` names, as transformers' configuration class has them.

        What the class does not read is left out, as it would act in no model of transformers.
        Raises UserError for values that are not supported.
        """
        stated = dict(text_config)
        for alias, name in self.aliases.items():
            if alias in stated:
                stated[name] = stated.pop(alias)
        entries = {name: stated.get(name, default) for name, default in self.defaults.items()}
        general = {name: values for name, values in SUPPORTED.items() if name not in entries}
        for name, values in (general | dict(self.supported)).items():
            value = entries.get(name, stated.get(name, values[0]))
            if value not in values:
                expected = " or ".join(json.dumps(value) for value in values if value is not None)
                raise UserError(
                    f"config.json: {name}={json.dumps(value)} is not supported, only {expected}"
                )
        return entries


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
    """Defaults of a family: entries that nearly all have, and those of RoPE, with `defaults`."""
    return {
        **ROPE_DEFAULTS,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        "max_position_embeddings": max_position_embeddings,
        "num_key_value_heads": None,
        "head_dim": None,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
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
    hidden_act = stated.get("hidden_activation") or stated["hidden_act"]
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


def uniform_rope(
    entries: Json, *, interleave: bool = False, partial: bool = False
) -> ModelSettings:
    """The settings of a model whose layers all have the same RoPE."""
    fields = rope_fields(entries, rope_parameters(entries), interleave=interleave, partial=partial)
    return ModelSettings(rope_keys(fields), {"rope": {"all": fields}})


def window_size(entries: Json) -> int:
    """sliding_window, with 0 for null."""
    if entries["sliding_window"] == 0:
        raise UserError(
            "config.json: sliding_window=0 leaves no token to attend to; null states that there is "
            "no window"
        )
    return entries["sliding_window"] or 0
