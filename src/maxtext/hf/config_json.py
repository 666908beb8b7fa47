"""Entries of config.json and the configuration keys that state the same, in both directions: the
record of a mapping, and the fields that most families share. `models/hf_config.py` has the groups
of entries that depend on the layers.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from functools import cached_property
from typing import Any

from maxtext.common.errors import UserError
from maxtext.common.types import Json
from maxtext.configs.types import MaxTextConfig
from maxtext.hf.rules import TensorRule
from maxtext.hf.schema import Kind

LayerSpecs = Sequence[Any]
ABSENT = object()  # of `Field.from_layers`: the entry is left out


@dataclass
class ModelSettings:
    """The content of a config.json: configuration keys, and attributes that no key names."""

    keys: Json
    hf_attributes: Json = dataclass_field(
        default_factory=dict
    )  # fields of configs.types.Architecture


@dataclass(frozen=True)
class Field:
    """An entry of config.json that the model depends on, and the key that states the same.

    Without `key`, a FieldGroup reads the entry; it also writes it, unless `from_layers` does.
    "architecture.<name>" is an attribute that no key names. Of two keys that an entry sets, the
    last one is written.
    """

    hf: str
    key: str | tuple[str, ...] = ()
    # That of transformers' configuration class, for an entry that is left out. Folders of models
    # with images rely on these: their text_config has only what differs.
    default: object = None
    null: Callable[[Json], object] | None = None  # what null stands for, from the entries before it
    to_native: Callable[[Any], object] | None = None  # None: as it is, which must not be null
    to_hf: Callable[[Any], object] = lambda value: value
    # What is written without a key, from the configuration and the specs of its layers
    from_layers: "Callable[[MaxTextConfig, LayerSpecs], object] | None" = None
    kind: Kind | None = None  # the values that are accepted, unless schema.TEXT_FIELDS has it
    supported: tuple[object, ...] = ()  # all others are refused; without `default`, the first is it
    aliases: tuple[str, ...] = ()  # second names; if several are given, the last one here counts

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,) if isinstance(self.key, str) else self.key

    def value(self, stated: Json, entries: Json) -> Any:
        """The value in `stated`, or else the default.

        Raises UserError if it is not supported, and KeyError if it is null and must not be.
        """
        default = self.default
        if default is None and self.supported:
            default = self.supported[0]
        value = stated.get(self.hf, default)
        if value is None and self.null is not None:
            value = self.null(entries)
        if value is None and self.key and self.to_native is None:
            raise KeyError(self.hf)
        if self.supported and value not in self.supported:
            expected = " or ".join(json.dumps(item) for item in self.supported if item is not None)
            raise UserError(
                f"config.json: {self.hf}={json.dumps(value)} is not supported, only {expected}"
            )
        return value

    def native_value(self, value: object) -> object:
        return value if self.to_native is None else self.to_native(value)

    def hf_value(self, config: MaxTextConfig) -> Any:
        value: Any = config
        for name in self.keys[-1].split("."):
            value = getattr(value, name.removeprefix("base_"))  # the derived size
        return self.to_hf(value)


@dataclass(frozen=True)
class FieldGroup:
    """Entries that are read and written together, where a value depends on several of them or on
    the layers.
    """

    fields: tuple[Field, ...] = ()
    read: Callable[[Json], ModelSettings] = lambda entries: ModelSettings({})
    write: Callable[[MaxTextConfig, LayerSpecs], Json] = lambda config, layers: {}


# Entries that transformers reads for models of every family.
EVERY_FAMILY = (
    Field("is_causal", supported=(True,)),
    Field("per_layer_config", supported=(None, {})),
)


@dataclass(frozen=True)
class HfMapping:
    """How models of one `model_type` are read from a Hugging Face folder and written to it.

    Functions that take a configuration also take the specs of its layers.
    """

    architectures: tuple[str, ...]  # the first is written; the others hold the same text model
    model_type: str
    keys: Mapping[str, object]  # the keys that are the same in all models of the family
    # The entries of config.json except architectures, model_type and dtype. Of two with the same
    # name the later one counts; groups override fields, and later groups earlier ones.
    fields: tuple[Field | FieldGroup, ...]
    rules: Callable[[MaxTextConfig, LayerSpecs], list[TensorRule]]
    matches: Callable[[MaxTextConfig], bool] = lambda config: True  # among the family's mappings
    ignored: tuple[str, ...] = ()  # tensors that transformers does not load either, as regexes
    ignored_in: Callable[[MaxTextConfig], tuple[str, ...]] = lambda config: ()
    base_prefix: str = "model."  # of tensors in folders of the model with its head
    embedding: str = "model.embed_tokens.weight"  # the tensor that a tied head shares
    # (part of tensor names, the same part in the module names of transformers 5), where they differ
    module_renaming: tuple[str, str] = ("", "")
    # The class has experts as [X, in, out] and does not say so: PEFT takes inputs for outputs.
    peft_swaps_factors: bool = False

    @cached_property
    def groups(self) -> tuple[FieldGroup, ...]:
        return tuple(item for item in self.fields if isinstance(item, FieldGroup))

    @cached_property
    def entries(self) -> dict[str, Field]:
        """Every entry that acts, by its name."""
        entries = {item.hf: item for item in EVERY_FAMILY}
        for item in self.fields:
            fields = item.fields if isinstance(item, FieldGroup) else (item,)
            entries |= {field.hf: field for field in fields}
        return entries

    def read(self, text_config: Json) -> ModelSettings:
        """The settings of a config.json.

        What transformers' configuration class does not read is left out, as it would act in no
        model of transformers. Raises UserError for values that are not supported, and KeyError for
        null where the model needs a value.
        """
        stated = dict(text_config)
        for field in self.entries.values():
            for alias in field.aliases:
                if alias in stated:
                    stated[field.hf] = stated.pop(alias)
        entries: Json = {}
        for name, field in self.entries.items():
            entries[name] = field.value(stated, entries)
        settings = ModelSettings(dict(self.keys))
        for name, field in self.entries.items():
            for key in field.keys:
                attribute = key.removeprefix("architecture.")
                part = settings.keys if attribute == key else settings.hf_attributes
                part[attribute] = field.native_value(entries[name])
        for group in self.groups:
            own = group.read(entries)
            settings.keys |= own.keys
            settings.hf_attributes |= own.hf_attributes
        return settings

    def write(self, config: MaxTextConfig, layers: LayerSpecs) -> Json:
        """The entries of a configuration, except architectures, model_type and dtype."""
        entries: Json = {}
        for name, field in self.entries.items():
            if field.from_layers is not None:
                value = field.from_layers(config, layers)
                entries |= {} if value is ABSENT else {name: value}
            elif field.keys:
                entries[name] = field.hf_value(config)
        for group in self.groups:
            entries |= group.write(config, layers)
        return entries


# HF name -> name in mlp_activations; of several HF names the first is written.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
    "gelu": "gelu_exact",
    "relu": "relu",
}


def native_activation(name: str | None) -> str:
    if name not in ACTIVATIONS:
        supported = ", ".join(ACTIVATIONS)
        raise UserError(
            f"config.json: the activation {name!r} is not supported: use one of {supported}"
        )
    return ACTIVATIONS[name]


def hf_activation(mlp_activations: Sequence[str]) -> str:
    for hf_name, native_name in ACTIVATIONS.items():
        if native_name == mlp_activations[0]:
            return hf_name
    supported = ", ".join(dict.fromkeys(ACTIVATIONS.values()))
    raise UserError(
        f"mlp_activations={mlp_activations} has no name in a Hugging Face config.json; "
        f"these have: {supported}"
    )


def optional(value: object) -> object:
    """`to_native` of an entry whose null means the same in its key."""
    return value


def or_zero(value: object) -> object:
    return value or 0


def or_null(value: object) -> object:
    """`to_hf` of an entry that states by null that there is none."""
    return value or None


def bool_field(hf: str, key: str, default: bool = False) -> Field:
    """An entry of true or false; null is false."""
    return Field(hf, key, default, to_native=bool)


def activation_field(hf: str = "hidden_act", default: str = "silu") -> Field:
    return Field(
        hf,
        "mlp_activations",
        default,
        to_native=lambda name: [native_activation(name), "linear"],
        to_hf=hf_activation,
    )


def window_field(default: int | None, to_hf: Callable[[Any], object] = optional) -> Field:
    return Field(
        "sliding_window", "sliding_window_size", default, to_native=window_size, to_hf=to_hf
    )


def window_size(sliding_window: int | None) -> int:
    """The window, with 0 for null."""
    if sliding_window == 0:
        raise UserError(
            "config.json: sliding_window=0 leaves no token to attend to; null states that there is "
            "no window"
        )
    return sliding_window or 0


ATTENTION_BIAS = bool_field("attention_bias", "attention_bias")
MLP_BIAS = bool_field("mlp_bias", "mlp_bias")
EXPERT_DIMS = ("base_mlp_dim", "base_moe_mlp_dim")  # of families whose layers all have experts


def dense_keys(decoder_block: str, **keys: Any) -> Json:
    """Keys of a family with `dense_fields`, unless its fields set them; `keys` of its own."""
    return {
        "decoder_block": decoder_block,
        "normalize_embedding_logits": False,
        "attention_bias": False,
        "mlp_bias": False,
        "enable_dropout": False,
        **keys,
    }


def dense_fields(
    *,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    max_position_embeddings: int,
    num_key_value_heads: int | None = None,
    head_dim: int | None = None,
    hidden_act: str = "silu",
    rms_norm_eps: float | None = 1e-6,  # None: the family has another entry for it
    tie_word_embeddings: bool = False,
    mlp_dims: tuple[str, ...] = ("base_mlp_dim",),
) -> tuple[Field, ...]:
    """The fields that nearly all families have, with a family's defaults.

    `mlp_dims`: the keys that intermediate_size states.
    """
    epsilon = Field("rms_norm_eps", "normalization_layer_epsilon", rms_norm_eps)
    return (
        Field("vocab_size", "vocab_size", vocab_size),
        Field("hidden_size", "base_emb_dim", hidden_size),
        Field("intermediate_size", mlp_dims, intermediate_size),
        Field("num_hidden_layers", "base_num_decoder_layers", num_hidden_layers),
        Field("num_attention_heads", "base_num_query_heads", num_attention_heads),
        Field(
            "num_key_value_heads",
            "base_num_kv_heads",
            num_key_value_heads,
            null=lambda entries: entries["num_attention_heads"],
        ),
        Field(
            "head_dim",
            "head_dim",
            head_dim,
            null=lambda entries: entries["hidden_size"] // entries["num_attention_heads"],
        ),
        activation_field("hidden_act", hidden_act),
        *((epsilon,) if rms_norm_eps is not None else ()),
        Field("max_position_embeddings", "max_position_embeddings", max_position_embeddings),
        bool_field("tie_word_embeddings", "logits_via_embedding", tie_word_embeddings),
    )
