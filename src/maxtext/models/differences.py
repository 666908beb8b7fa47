"""Whether two configurations describe models that compute the same from the same weights.

Layers are compared by their specs, except for fields that choose how a result is computed and for
those that only training uses (`layers.specs.IMPLEMENTATION`).
"""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import numpy as np

from maxtext.configs.types import MaxTextConfig
from maxtext.layers.rope import frequencies
from maxtext.layers.specs import RopeSpec
from maxtext.models.registry import layers

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
    """What `config` has and `second` has not, in words; what many layers have, once."""
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
