"""Functions of logits, computed for a part of the tokens of each row at a time.

The logits of a batch, [B, S, V], may not fit in memory. Arrays [B, S, ...] are split along the
sequence into tiles [B, S / tiles, ...]. With more than one tile the backward pass recomputes each.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def map_tiles(function: Callable[..., Any], tiles: int, *arrays: jax.Array) -> Any:
    """function(*arrays), whose results are [B, S, ...]."""
    if tiles == 1:
        return function(*arrays)
    leading = arrays[0].shape[:2]
    return jax.tree.map(
        lambda result: result.swapaxes(0, 1).reshape(*leading, *result.shape[3:]),
        run_tiles(function, tiles, arrays),
    )


def sum_tiles(function: Callable[..., Any], tiles: int, *arrays: jax.Array) -> Any:
    """function(*arrays), whose results are scalars, sums over all tokens."""
    if tiles == 1:
        return function(*arrays)
    return jax.tree.map(jnp.sum, run_tiles(function, tiles, arrays))


def run_tiles(function: Callable[..., Any], tiles: int, arrays: tuple[jax.Array, ...]) -> Any:
    """The results of all tiles, stacked."""
    parts = tuple(split_sequence(array, tiles) for array in arrays)
    return jax.lax.map(jax.checkpoint(lambda part: function(*part)), parts)


def split_sequence(x: jax.Array, tiles: int) -> jax.Array:
    """[B, S, ...] to [tiles, B, S / tiles, ...]."""
    batch, length, *rest = x.shape
    return x.reshape(batch, tiles, length // tiles, *rest).swapaxes(0, 1)
