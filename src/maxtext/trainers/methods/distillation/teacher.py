"""The teacher of distillation: its configuration, its weights in their shards, and its features.

`pop_features` takes the features, which are the outputs of the attention of each layer, from the
auxiliary outputs of a model.

Shapes: L layers, B batch, S sequence, D features.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from maxtext.checkpoint.open import model_param_infos, open_checkpoint
from maxtext.checkpoint.weights import load_weights
from maxtext.common.errors import ConfigError, as_config_error
from maxtext.common.types import Tree
from maxtext.configs import ledger, serialize, types
from maxtext.configs.derive import Devices
from maxtext.configs.load import base_values
from maxtext.configs.provenance import Setting, Source
from maxtext.configs.types import DerivedValues, MaxTextConfig
from maxtext.layers.inputs import ATTENTION_OUTPUT
from maxtext.layers.parameters import Template
from maxtext.models.configuration import load
from maxtext.models.transformer import build_context
from maxtext.sharding import AxisRules
from maxtext.tokenizers.load import open_tokenizer

# Keys of a run that only its student has.
STUDENT_KEYS = {
    *types.Distillation.model_fields,
    *types.GeneralizedDistillation.model_fields,
    *types.Adapters.model_fields,
    *DerivedValues.model_fields,
    "model_name",
    "load_parameters_path",
    "load_full_state_path",
    "tokenizer_path",
    "tokenizer_type",
    "trainable_parameters_mask",
    "weight_dtype",
}


def teacher_config(config: MaxTextConfig, rules: AxisRules) -> MaxTextConfig:
    """The configuration of the teacher: the keys that the user sets for the run, and over them
    teacher_overrides. A folder at its load_parameters_path defines its model, unless
    teacher_overrides sets model_name.

    Raises ConfigError if the vocabularies of teacher and student differ.
    """
    overrides = config.teacher_overrides
    common = {
        key: Setting(serialize.plain(getattr(config, key)), config.source(key))
        for key in serialize.KEYS_IN_ORDER
        if key not in STUDENT_KEYS | config.student_overrides.keys() and config.source(key).is_user
    }
    source = Source(config.source("teacher_overrides").kind, "teacher_overrides")
    own = {key: Setting(value, source) for key, value in overrides.items()}
    path = overrides.get("load_parameters_path")
    has_name = overrides.get("model_name", "default") != "default"
    with as_config_error():
        checkpoint = open_checkpoint(path) if path and not has_name else None
    platform = build_context(config, rules).platform
    teacher = load(
        None,
        common | own,
        environ={},
        devices=Devices(
            rules.mesh.size, slices=math.prod(config.dcn_parallelism), platform=platform
        ),
        model=checkpoint.model_layer if checkpoint else None,
    )
    ledger.refuse_unsupported_model(teacher, base_values())
    check_same_vocabulary(config, teacher)
    return teacher


def check_same_vocabulary(config: MaxTextConfig, teacher: MaxTextConfig) -> None:
    """Raise ConfigError if the two models give token ids different meanings. A model without a
    tokenizer of its own is compared by vocab_size alone."""
    if config.vocab_size != teacher.vocab_size:
        raise ConfigError(
            f"the teacher has vocab_size={teacher.vocab_size} and the student "
            f"{config.vocab_size}: distillation compares probabilities of the same tokens, so "
            "choose models with one tokenizer"
        )
    path, teacher_path = config.tokenizer_path, teacher.tokenizer_path
    if not path or not teacher_path or path == teacher_path:
        return
    student_tokens, teacher_tokens = (
        [tokenizer.id_to_token(token) for token in range(tokenizer.vocab_size)]
        for tokenizer in (
            open_tokenizer(path, access_token=config.hf_access_token),
            open_tokenizer(teacher_path, access_token=config.hf_access_token),
        )
    )
    pairs = zip(student_tokens, teacher_tokens, strict=False)
    difference = next(((i, *pair) for i, pair in enumerate(pairs) if pair[0] != pair[1]), None)
    if difference is not None:
        index, token, teacher_token = difference
        raise ConfigError(
            f"the teacher has another tokenizer than the student: token {index} is "
            f"{teacher_token!r} in {teacher_path} and {token!r} in {path}; distillation compares "
            "probabilities of the same tokens, so choose models with one tokenizer"
        )


def read_teacher_weights(config: MaxTextConfig, template: Template, shardings: Tree) -> Tree:
    """The weights of the teacher, read straight into their shards."""
    path = config.load_parameters_path
    if not path:
        raise ConfigError(
            "the teacher has no weights: set teacher_overrides.load_parameters_path to its folder"
        )
    param_infos = model_param_infos(template, config)
    source = open_checkpoint(path).weights(config, param_infos)
    return load_weights(source, param_infos, template, shardings)


def check_features(config: MaxTextConfig, teacher: MaxTextConfig) -> None:
    """Raise ConfigError if the features of student and teacher cannot be compared."""
    if config.emb_dim != teacher.emb_dim:
        raise ConfigError(
            f"distill_beta={config.distill_beta} compares outputs of attention, which have "
            f"{config.emb_dim} features in the student and {teacher.emb_dim} in the teacher: set "
            "distill_beta=0, or choose models of the same emb_dim"
        )
    layers = {"student": config.num_decoder_layers, "teacher": teacher.num_decoder_layers}
    indices = config.distill_layer_indices
    if indices is None and layers["student"] != layers["teacher"]:
        raise ConfigError(
            f"the student has {layers['student']} layers and the teacher {layers['teacher']}: "
            "distill_layer_indices must say which layers distill_beta compares"
        )
    for index in indices or ():
        for name, count in layers.items():
            if index >= count:
                raise ConfigError(
                    f"distill_layer_indices has {index}, and the {name} has layers 0 to {count - 1}"
                )


def pop_features(layer_aux: dict, indices: Sequence[int] | None) -> tuple[dict, jax.Array]:
    """The auxiliary outputs of the layers without the features, and the features [L, B, S, D] of
    the layers at `indices` (None: of all). Raises ConfigError if a layer reports none."""
    stacks: dict[int, dict[str, dict[int, dict]]] = layer_aux["layers"]
    rest, features = {}, []
    for number, stack in stacks.items():
        blocks = stack["blocks"]
        if not all(ATTENTION_OUTPUT in aux for aux in blocks.values()):
            raise ConfigError(
                "distill_beta compares outputs of attention, and some layers have none or "
                "fuse it into other operations (quantization=fp8): set distill_beta=0"
            )
        # [repeats, indices in the pattern, B, S, D], in the order of the layers
        outputs = jnp.stack([aux[ATTENTION_OUTPUT] for aux in blocks.values()], axis=1)
        features.append(outputs.reshape(-1, *outputs.shape[2:]))
        rest[number] = {
            "blocks": {
                index: {name: value for name, value in aux.items() if name != ATTENTION_OUTPUT}
                for index, aux in blocks.items()
            }
        }
    all_layers = jnp.concatenate(features)
    selected = all_layers if indices is None else all_layers[jnp.array(indices)]
    return layer_aux | {"layers": rest}, selected
