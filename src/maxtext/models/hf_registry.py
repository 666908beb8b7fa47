"""The Hugging Face mapping of a folder or a configuration, config.json in both directions, and the
comparison of configurations.

`mapping_of` chooses by the architecture in a config.json, `mapping_for` by the configuration of a
model. `model_layer` reads a config.json, and `hf_config` writes one.

`config_differences` tells whether two configurations describe models that compute the same from the
same weights. Layers are compared by their specs, except for fields that choose how a result is
computed and for those that only training uses (`layers.specs.IMPLEMENTATION`).
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import numpy as np

from maxtext.common.errors import ConfigError, UserError
from maxtext.common.types import Json
from maxtext.configs.derive import Devices
from maxtext.configs.provenance import Layer, Setting, Source
from maxtext.configs.sources import from_python
from maxtext.configs.types import MaxTextConfig
from maxtext.hf import schema
from maxtext.hf.config_json import HfMapping
from maxtext.hf.quantized import quantized_format
from maxtext.hf.rules import TensorRule
from maxtext.layers.rope import frequencies
from maxtext.layers.specs import RopeSpec
from maxtext.models.configuration import load
from maxtext.models.registry import FAMILIES, family, layers

MODEL_KEYS = (
    "vocab_size",
    "trainable_position_size",
    "use_untrainable_positional_embedding",
    "logits_via_embedding",
    "final_logits_soft_cap",
    "mtp_num_layers",
    "num_labels",
)
HEAD_DIM = 128  # at which RoPE frequencies are compared


def config_differences(config: MaxTextConfig, second: MaxTextConfig) -> list[str]:
    """Settings of `config` that `second` lacks, in words; a setting of many layers, once."""
    differences: dict[str, None] = {}
    for key in MODEL_KEYS:
        differences |= dict.fromkeys(
            value_differences(getattr(config, key), getattr(second, key), key)
        )
    if config.logits_via_embedding and config.normalize_embedding_logits:
        differences["normalize_embedding_logits=True"] = None
    differences |= dict.fromkeys(
        value_differences(
            config.architecture.logit_scale, second.architecture.logit_scale, "logit_scale"
        )
    )
    specs, second_specs = layers(config), layers(second)
    differences |= dict.fromkeys(value_differences(len(specs), len(second_specs), "layers"))
    for spec, second_spec in zip(specs, second_specs, strict=False):
        differences |= dict.fromkeys(value_differences(spec, second_spec, ""))
    return list(differences)


def value_differences(value: object, second: object, path: str) -> Iterator[str]:
    if isinstance(value, RopeSpec) and isinstance(second, RopeSpec):
        if not same_rope(value, second):
            yield f"{path}={value}"
    elif is_dataclass(value) and type(value) is type(second):
        for field in fields(value):
            if field.metadata.get("affects_output", True):
                name = f"{path}.{field.name}" if path else field.name
                yield from value_differences(
                    getattr(value, field.name), getattr(second, field.name), name
                )
    elif not same_value(value, second):
        yield f"no {path}" if value is None else path if is_dataclass(value) else f"{path}={value}"


def same_rope(spec: RopeSpec, second: RopeSpec) -> bool:
    if "longrope" in (spec.kind, second.kind):  # whose factors are for one size of heads
        return spec == second
    return (
        spec.interleave == second.interleave
        and spec.rotated(HEAD_DIM) == second.rotated(HEAD_DIM)
        and math.isclose(spec.magnitude, second.magnitude, rel_tol=1e-6)
        and np.allclose(
            frequencies(spec, HEAD_DIM), frequencies(second, HEAD_DIM), rtol=1e-6, atol=0
        )
    )


def same_value(value: object, second: object) -> bool:
    """None, False and 0 all state that there is none."""
    if isinstance(value, float) and isinstance(second, int | float):
        return math.isclose(value, second, rel_tol=1e-6)
    return value == second or (not value and not second)


MAPPINGS: tuple[HfMapping, ...] = tuple(
    mapping for member in FAMILIES.values() for mapping in member.hf
)
KINDS = {
    name: field.kind
    for mapping in MAPPINGS
    for name, field in mapping.entries.items()
    if field.kind is not None
}

# Reward models are transformers' classifiers with one label.
CLASSIFIER, SCORE, NATIVE_HEAD = "ForSequenceClassification", "score.weight", "head/weight"
CLASSIFIER_PREFIXES = {  # of names that are not those of the language model
    "GPT2LMHeadModel": "GPT2",
    "Gemma3ForCausalLM": "Gemma3Text",
    "Qwen3_5ForCausalLM": "Qwen3_5Text",
}
WITHOUT_CLASSIFIER = (
    "CohereForCausalLM",
    "Cohere2ForCausalLM",
    "DeepseekV32ForCausalLM",
    "Ernie4_5ForCausalLM",
    "Gemma4ForCausalLM",
    "Glm4MoeForCausalLM",
    "Llama4ForCausalLM",
    "MiniMaxM2ForCausalLM",
    "Qwen3_5MoeForCausalLM",
)

# Prefixes of tensor names in folders of multimodal models -> prefixes that rules use.
PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
# Tensors of such folders that are no part of the text model.
MULTIMODAL_TENSORS = (
    r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector)\..*",
    r"(model\.)?(audio_tower|embed_vision|embed_audio)\..*",
)


def read_config(folder: Path) -> Json:
    """config.json of a Hugging Face folder, checked. Raises ConfigError with every wrong field."""
    return schema.read_config(folder, KINDS)


def is_classifier(hf_config: Json) -> bool:
    return any(name.endswith(CLASSIFIER) for name in hf_config.get("architectures") or [])


def num_labels(hf_config: Json, source: str) -> int:
    """The outputs of the head of a classifier, 0 for a language model. Raises UserError if there
    are several: only reward models are supported."""
    if not is_classifier(hf_config):
        return 0
    count = len(hf_config.get("id2label") or ()) or hf_config.get("num_labels") or 2
    if count != 1:
        raise UserError(
            f"{source}: {hf_config['architectures'][0]} has {count} labels, and only reward "
            "models, which have one, are supported"
        )
    return 1


def classifier_name(mapping: HfMapping) -> str | None:
    """The class of transformers that holds a reward model; None if the family has none."""
    name = mapping.architectures[0]
    if name in WITHOUT_CLASSIFIER:
        return None
    return CLASSIFIER_PREFIXES.get(name, name.removesuffix("ForCausalLM")) + CLASSIFIER


def classifier_entries(mapping: HfMapping) -> Json:
    """The entries of config.json that make a model a reward model. Raises UserError if transformers
    has no class for it."""
    name = classifier_name(mapping)
    if name is None:
        raise UserError(
            f"transformers has no class for a reward model of {mapping.architectures[0]}: write a "
            "native folder"
        )
    return {"architectures": [name], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def mapping_of(hf_config: Json, source: str) -> HfMapping:
    """The mapping of a config.json. Raises UserError if its architecture is unknown."""
    architectures = hf_config.get("architectures") or []
    model_type = hf_config.get("model_type")
    of_type = next(
        (
            mapping
            for mapping in MAPPINGS
            if model_type in (mapping.model_type, mapping.model_type.removesuffix("_text"))
        ),
        None,
    )
    for mapping in MAPPINGS:
        if any(name in mapping.architectures for name in architectures):
            if of_type not in (None, mapping):
                raise UserError(
                    f"{source}: architectures is {', '.join(architectures)} and model_type is "
                    f"{model_type}, another family's: correct the wrong one"
                )
            return mapping
    if of_type and (not architectures or is_classifier(hf_config)):
        return of_type
    supported = ", ".join(mapping.architectures[0] for mapping in MAPPINGS)
    raise UserError(
        f"{source}: the architecture {', '.join(architectures) or model_type} is not known; these "
        f"are: {supported}"
    )


def mapping_for(config: MaxTextConfig) -> HfMapping:
    """The mapping that writes a configuration. Raises UserError if there is none."""
    for mapping in family(config).hf:
        if mapping.matches(config):
            return mapping
    supported = ", ".join(sorted(name for name, member in FAMILIES.items() if member.hf))
    raise UserError(
        f"decoder_block={config.decoder_block.value} has no Hugging Face architecture; these have: "
        f"{supported}"
    )


def rules(mapping: HfMapping, config: MaxTextConfig) -> list[TensorRule]:
    """The tensor rules of a model. The head of a reward model is `score.weight`."""
    rules = mapping.rules(config, layers(config))
    if not config.num_labels:
        return rules
    score = TensorRule(SCORE, NATIVE_HEAD, "v e -> e v")
    return [*(rule for rule in rules if NATIVE_HEAD not in rule.native_names), score]


def model_layer(hf_config: Json, source: str) -> Layer:
    """The settings that a config.json states, as a layer in place of a model's YAML file.

    Raises UserError if an entry is missing or not supported.
    """
    mapping = mapping_of(hf_config, source)
    quantized_format(hf_config, source)  # refuses formats that are not supported
    return read_settings(mapping, hf_config, source)


def read_settings(mapping: HfMapping, hf_config: Json, source: str) -> Layer:
    """`model_layer` for a config.json whose mapping is known."""
    text_config = hf_config if hf_config.get("text_config") is None else hf_config["text_config"]
    if "tie_word_embeddings" in hf_config and text_config is not hf_config:
        text_config = {"tie_word_embeddings": hf_config["tie_word_embeddings"]} | text_config
    try:
        settings = mapping.read(text_config)
    except KeyError as error:
        raise UserError(
            f"{source}: {error.args[0]} is missing, and {mapping.architectures[0]} needs it"
        ) from error
    origin = Source("model", source)
    layer = {key: Setting(value, origin) for key, value in settings.keys.items()}
    if labels := num_labels(hf_config, source):
        layer["num_labels"] = Setting(labels, origin)
    hf_attributes = {
        name: value for name, value in settings.hf_attributes.items() if value is not None
    }
    if hf_attributes:
        layer["architecture"] = Setting(hf_attributes, origin)
    return layer


def check_model(layer: Layer, source: str) -> None:
    """Raise ConfigError, naming the config.json, for entries that no model can combine."""
    positions = layer.get("trainable_position_size")
    keys = {"max_target_length": positions.value} if positions is not None else {}
    try:
        load(None, from_python(keys), environ={}, devices=Devices(1), model=layer)
    except ConfigError as error:
        raise ConfigError(
            *(
                f"{source} describes a model that cannot be built: {problem}"
                for problem in error.problems
            )
        ) from error


def canonical_names(names: Iterable[str], mapping: HfMapping) -> dict[str, str]:
    """The tensor names that rules use -> the names in a folder."""
    names = list(names)
    prefixes = (mapping.base_prefix, "model.", "language_model.")
    without_head = not any(name.startswith(prefixes) for name in names)
    canonical = {}
    for name in names:
        rule_name = next(
            (new + name[len(old) :] for old, new in PREFIXES.items() if name.startswith(old)), name
        )
        if without_head and not rule_name.startswith("lm_head."):
            rule_name = mapping.base_prefix + rule_name
        canonical[rule_name] = name
    return canonical


def text_prefixes(tensor_names: Collection[str]) -> tuple[str, str]:
    """(old, new): how the modules of a text model begin, and how they begin in transformers' model
    of a folder with these tensors, which is multimodal if it has vision or audio parts.
    """
    parts = re.compile("|".join(MULTIMODAL_TENSORS))
    if not any(parts.fullmatch(name) for name in tensor_names):
        return "", ""
    if any(name.startswith("vision_model.") for name in tensor_names):  # holds a whole text model
        return "", "language_model."
    return "model.", "model.language_model."


def refuse_multimodal(names: Iterable[str]) -> None:
    """Raise ConfigError if tensors of these names are vision or audio parts, which are read from no
    folder.
    """
    tensors = sorted(
        name for name in names if any(re.fullmatch(pattern, name) for pattern in MULTIMODAL_TENSORS)
    )
    if tensors:
        raise ConfigError(
            f"the folder that the weights came from had {len(tensors)} vision or audio tensors, "
            f"such as {tensors[0]}, which would be lost: pass text_only=True (--text-only on the "
            "command line) to write the text model alone"
        )


def ignored_tensors(mapping: HfMapping, config: MaxTextConfig) -> tuple[str, ...]:
    """Tensors that a folder may have and the model does not, as regular expressions."""
    tied = (r"lm_head\.weight",) if config.logits_via_embedding or config.num_labels else ()
    return (*mapping.ignored, *mapping.ignored_in(config), *MULTIMODAL_TENSORS, *tied)


def hf_config(config: MaxTextConfig, dtype: str) -> Json:
    """The config.json of a configuration. Raises UserError if it cannot express all of it."""
    mapping = mapping_for(config)
    entries = {
        "architectures": [mapping.architectures[0]],
        "model_type": mapping.model_type,
        "dtype": dtype,
        # A null states that there is none, where an absent entry would have transformers' default.
        **mapping.write(config, layers(config)),
        **(classifier_entries(mapping) if config.num_labels else {}),
    }
    overrides = from_python({"max_target_length": config.max_target_length})
    layer = model_layer(entries, "config.json")
    read_back = load(None, overrides, environ={}, devices=Devices(1), model=layer)
    differences = config_differences(config, read_back)
    if differences:
        raise UserError(
            f"a config.json of {mapping.architectures[0]} cannot say: {', '.join(differences)}"
        )
    return entries
