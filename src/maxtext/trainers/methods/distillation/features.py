"""Features of distillation: the outputs of the attention of each layer.

Shapes: L layers, B batch, S sequence, D features.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from maxtext.common.errors import ConfigError
from maxtext.configs.types import MaxTextConfig
from maxtext.layers.aux_names import ATTENTION_OUTPUT


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
    stacks: dict[int, Any] = layer_aux["layers"]
    rest, features = {}, []
    for number, stack in stacks.items():
        blocks: dict[int, dict] = stack["blocks"]
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
