"""Whether a config.json says all of a model: it is read again, and the two are compared.

What counts is what is computed from the same weights: layers are compared by their specs, apart
from fields that choose how to compute it, and from those that only training knows.
"""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from maxtext.configs.types import MaxTextConfig
from maxtext.layers.gated_delta_net import GatedDeltaNetSpec
from maxtext.layers.rope import RopeSpec, frequencies
from maxtext.models.registry import layers

MANNER = {
    "backend", "blocks", "fused", "latent", "method", "capacity_factor", "buffer_factor", "custom_sort_vjp", "form",
    "float32", "float32_product", "float32_logits", "float32_sum", "random",
    "dropout_rate", "balance_weight", "report_load", "report_max_logits", "sparse_training", "loss_factor",
}  # fmt: skip
OUTSIDE_LAYERS = (
    "vocab_size", "trainable_position_size", "use_untrainable_positional_embedding", "logits_via_embedding",
    "final_logits_soft_cap", "mtp_num_layers",
)  # fmt: skip
HEAD = 128  # a size of heads to compare rotations at


def unsaid(config: MaxTextConfig, again: Any) -> list[str]:
    """What a configuration has otherwise than the one that was read again, in words; what many
    layers have, once.
    """
    found: dict[str, None] = {}
    for key in OUTSIDE_LAYERS:
        found |= dict.fromkeys(different(getattr(config, key), getattr(again, key), key))
    if config.logits_via_embedding and config.normalize_embedding_logits:
        found["normalize_embedding_logits=True"] = None
    ours, theirs = layers(config), layers(again)
    found |= dict.fromkeys(different(len(ours), len(theirs), "layers"))
    for one, other in zip(ours, theirs, strict=False):
        found |= dict.fromkeys(different(one, other, ""))
    return list(found)


def different(one: Any, other: Any, path: str) -> Iterator[str]:
    if isinstance(one, RopeSpec) and isinstance(other, RopeSpec):
        if not turn_alike(one, other):
            yield f"{path}={one}"
    elif is_dataclass(one) and type(one) is type(other):
        for field in fields(one):
            manner = field.name in MANNER or (
                isinstance(one, GatedDeltaNetSpec) and field.name == "chunk"
            )
            if not manner:
                name = f"{path}.{field.name}" if path else field.name
                yield from different(getattr(one, field.name), getattr(other, field.name), name)
    elif not same(one, other):
        yield f"no {path}" if one is None else path if is_dataclass(one) else f"{path}={one}"


def turn_alike(one: RopeSpec, other: RopeSpec) -> bool:
    return (
        one.interleave == other.interleave
        and one.rotated(HEAD) == other.rotated(HEAD)
        and math.isclose(one.magnitude, other.magnitude, rel_tol=1e-6)
        and np.allclose(frequencies(one, HEAD), frequencies(other, HEAD), rtol=1e-6, atol=0)
    )


def same(one: Any, other: Any) -> bool:
    """None, False and 0 all say that there is none."""
    if isinstance(one, float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-6)
    return one == other or (not one and not other)
