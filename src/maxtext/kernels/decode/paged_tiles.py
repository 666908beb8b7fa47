"""Tiles of a paged KV cache, as the kernels for paged attention read them.

Shapes: R query rows, D head_dim, P blocks of block_size tokens, flattened to slots of one token.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike

from maxtext.kernels.attention.dot_product import MASK_VALUE

MIN_ROWS = 16  # of a tensor core matmul, in both dimensions: fewer query rows are padded
MAX_STAGES = 4  # of the software pipeline
SHARED_BYTES = 96 * 1024  # shared memory for all stages, which every supported GPU has

# Of each query row, over the tokens so far: the sum of values, not normalized, [R, D]; the largest
# logit [R]; the sum of softmax weights [R].
Partial = tuple[Array, Array, Array]


def tile_bytes(tile_size: int, head_dim: int, dtype: DTypeLike) -> int:
    """The bytes of a tile of keys and values."""
    return 2 * tile_size * head_dim * max(jnp.dtype(dtype).itemsize, 1)


def tile_and_stages(
    tile_size: int, block_size: int, head_dim: int, dtype: DTypeLike
) -> tuple[int, int]:
    """The tokens that a program reads at a time, a divisor of block_size, and the pipeline stages
    that fit in shared memory.
    """
    tile_size = math.gcd(max(pl.next_power_of_2(tile_size), MIN_ROWS), block_size)
    while tile_size > MIN_ROWS and tile_bytes(tile_size, head_dim, dtype) > SHARED_BYTES // 2:
        tile_size //= 2
    stages = SHARED_BYTES // tile_bytes(tile_size, head_dim, dtype)
    return tile_size, max(1, min(MAX_STAGES, stages))


def head_spec(first: int | None, array: Array, index: Callable[[Any], Any]) -> pl.BlockSpec:
    """The block of one head of an array with heads, or of the whole array without, for grids of
    rows, heads and more."""
    if array.ndim == 1:
        return pl.BlockSpec((first,), lambda b, k, *_: (index(b),))
    rest = array.shape[2:]
    return pl.BlockSpec((first, None, *rest), lambda b, k, *_: (index(b), k, *[0] * len(rest)))


def tile_slots(block_table_ref: Ref, tile: Array, tile_size: int, block_size: int) -> Array:
    """In a kernel: the slots [tile_size] of a tile, which is within one block or has whole blocks;
    those after the last block of the table are of that block."""
    positions = tile * tile_size + jnp.arange(tile_size)
    column = tile * tile_size // block_size if tile_size <= block_size else positions // block_size
    return (
        block_table_ref[jnp.minimum(column, block_table_ref.shape[0] - 1)] * block_size
        + positions % block_size
    )


def store_rows(ref: Ref, rows: Array, values: Array, valid: Array) -> None:
    """In a kernel: store values [R, D] or [R] in those rows of `ref` that are valid."""
    if values.ndim == 1:
        triton.store(ref.at[rows], values, mask=valid)
        return
    column = jnp.arange(values.shape[1])
    mask = valid[:, None] & (column >= 0)[None, :]
    triton.store(ref.at[rows[:, None], column[None, :]], values.astype(ref.dtype), mask=mask)


def soft_capped(logits: Array, soft_cap: float | None) -> Array:
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


def scaled(x: Array, refs: dict[str, Ref], name: str, at: Any) -> Array:
    """x times the scale of each token, which is its last dimension."""
    return x * refs[name + "_scale"][at] if name + "_scale" in refs else x


def add_tile(
    q: Array,
    pools: dict[str, Ref],
    slots: Array,
    visible: Array | None,
    partial: Partial,
    *,
    scale: float,
    soft_cap: float | None,
) -> Partial:
    """In a kernel: q [R, D] with a tile of keys and values at `slots`, of which those that are not
    `visible` have no weight."""
    context, largest, total = partial
    logits = triton.dot(q, pools["key"][slots, :].astype(q.dtype), trans_b=True) * scale
    logits = soft_capped(scaled(logits, pools, "key", slots), soft_cap)
    if visible is not None:
        logits = jnp.where(visible[None, :], logits, MASK_VALUE)
    new_max = jnp.maximum(largest, logits.max(axis=1))
    weights = jnp.exp(logits - new_max[:, None])
    if visible is not None:
        weights = jnp.where(visible[None, :], weights, 0)
    decay = jnp.exp(largest - new_max)
    total = total * decay + weights.sum(axis=1)
    weights = scaled(weights, pools, "value", slots).astype(q.dtype)
    context = context * decay[:, None] + triton.dot(
        weights, pools["value"][slots, :].astype(q.dtype)
    )
    return context, new_max, total


def add_partial(partial: Partial, other: Partial) -> Partial:
    """In a kernel: the partial result over the tokens of both."""
    context, largest, total = partial
    new_max = jnp.maximum(largest, other[1])
    decay, weight = jnp.exp(largest - new_max), jnp.exp(other[1] - new_max)
    context = context * decay[:, None] + other[0] * weight[:, None]
    return context, new_max, total * decay + other[2] * weight
