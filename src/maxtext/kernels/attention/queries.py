"""Work that goes query by query, done for a few queries at a time, so that its largest arrays never
exist as a whole.

Shapes: B batch, S query length.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

BLOCK = 128  # queries at a time

Tree = Any


def map_queries(function: Callable[[Tree], Array], arrays: Tree, block: int = BLOCK) -> Array:
    """function(arrays), where arrays are [B, S, ...] and so is the result, `block` queries at a
    time.

    A block takes every n-th query: where the sequence is split over devices, each has a part of
    every block.
    """
    length = jax.tree.leaves(arrays)[0].shape[1]
    steps = length // block
    if steps < 2:
        return function(arrays)
    whole = steps * block

    def split(array: Array) -> Array:
        return jnp.moveaxis(
            array[:, :whole].reshape(array.shape[0], block, steps, *array.shape[2:]), 2, 0
        )

    mapped = jnp.moveaxis(jax.lax.map(function, jax.tree.map(split, arrays)), 0, 2)
    mapped = mapped.reshape(mapped.shape[0], whole, *mapped.shape[3:])
    if whole == length:
        return mapped
    rest = function(jax.tree.map(lambda array: array[:, whole:], arrays))
    return jnp.concatenate([mapped, rest], axis=1)
