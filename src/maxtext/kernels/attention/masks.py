"""Dense masks of attention, queries that see no key, and computation by blocks of queries.

`dense_mask` and `dense_head_mask` are booleans from positions, segments and selections of keys. A
mask is [S, T] if all rows share it (an iota that XLA fuses into its consumer), [B, S, T] if
positions or segments differ by row, [B, 1 or H, S, T] with a selection of keys, and None if every
key is visible. `zero_fully_masked_queries` applies to queries that see no key.

`map_queries` maps over blocks of queries, which bounds the memory of arrays that are quadratic in
the length.

Shapes: B batch, S query length, T key length, H query heads.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from maxtext.common.types import Tree
from maxtext.kernels.attention.request import AttentionInputs, AttentionMask


def dense_mask(inputs: AttentionInputs) -> Array | None:
    """True where positions and segments let a query see a key; without the selection of keys."""
    by_position = position_mask(inputs)
    if inputs.q_segments is None or inputs.k_segments is None:
        return by_position
    q_segments = inputs.q_segments[:, :, None]
    same = (q_segments == inputs.k_segments[:, None, :]) & (q_segments != 0)
    return same if by_position is None else by_position & same


def dense_head_mask(inputs: AttentionInputs) -> Array | None:
    """True where a query sees a key, with the selection of keys: [S, T], [B, 1, S, T] or [B, H, S,
    T].
    """
    visible = dense_mask(inputs)
    if visible is not None and visible.ndim == 3:
        visible = visible[:, None]
    if inputs.selected is None:
        return visible
    return inputs.selected if visible is None else inputs.selected & visible


def position_mask(inputs: AttentionInputs) -> Array | None:
    mask = inputs.mask
    if not mask.causal:
        return None
    q = positions(inputs.q_positions, inputs.q.shape[1], mask)[..., :, None]
    k = positions(inputs.k_positions, inputs.k.shape[1], mask)[..., None, :]
    visible = k <= q
    if mask.window is not None:
        visible &= k > q - mask.window
    if mask.chunk is not None:
        visible &= q // mask.chunk == k // mask.chunk
    return visible


def positions(given: Array | None, length: int, mask: AttentionMask) -> Array:
    if given is not None:
        return given
    return (
        lax.iota(jnp.int32, length) if mask.order is None else jnp.asarray(mask.positions(length))
    )


def zero_fully_masked_queries(output: Array, inputs: AttentionInputs) -> Array:
    """Set to zero the [B, S, H, ...] output of every query that sees no key.

    A softmax over no key is undefined, and kernels differ in their result: an average of values, or
    worse. Zeroing the output also zeroes the gradient that enters and leaves the kernel.
    """
    visible = has_visible_key(inputs)
    if visible is None:
        return output
    batched = visible if visible.ndim > 1 else visible[None]
    return jnp.where(
        batched.reshape(batched.shape + (1,) * (output.ndim - batched.ndim)), output, 0
    )


def has_visible_key(inputs: AttentionInputs) -> Array | None:
    """True for queries that see a key: [B, S], [S], or with a selection [B, S, 1 or H].

    None if all queries do, whatever the values of the arrays are.
    """
    if inputs.selected is not None:
        visible = dense_head_mask(inputs)
        assert visible is not None
        return visible.any(axis=-1).swapaxes(1, 2)
    if inputs.is_self_attention:  # a token sees itself, unless it is padding
        return None if inputs.q_segments is None else inputs.q_segments != 0
    visible = dense_mask(inputs)
    return None if visible is None else visible.any(axis=-1)


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
