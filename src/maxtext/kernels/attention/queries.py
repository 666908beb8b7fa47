"""Map over blocks of queries, to bound the memory of arrays that are quadratic in the length.

Shapes: B batch, S query length.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from maxtext.common.types import Tree

BLOCK = 128


def map_queries(function: Callable[[Tree], Array], arrays: Tree, block: int = BLOCK) -> Array:
    """function(arrays) for arrays [B, S, ...] and a result [B, S, ...], `block` queries at a time.

    A block takes every n-th query: if the sequence is sharded, each device has a part of every
    block.
    """
    length = jax.tree.leaves(arrays)[0].shape[1]
    num_blocks = length // block
    if num_blocks < 2:
        return function(arrays)
    mapped_length = num_blocks * block

    def split(array: Array) -> Array:
        return jnp.moveaxis(
            array[:, :mapped_length].reshape(array.shape[0], block, num_blocks, *array.shape[2:]),
            2,
            0,
        )

    mapped = jnp.moveaxis(jax.lax.map(function, jax.tree.map(split, arrays)), 0, 2)
    mapped = mapped.reshape(mapped.shape[0], mapped_length, *mapped.shape[3:])
    if mapped_length == length:
        return mapped
    rest = function(jax.tree.map(lambda array: array[:, mapped_length:], arrays))
    return jnp.concatenate([mapped, rest], axis=1)
