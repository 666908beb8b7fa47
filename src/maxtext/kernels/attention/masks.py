"""Boolean masks from positions, segments and scores, and the queries that see no key at all.

Shapes: B batch, S query length, T key length, H query heads. A mask is [S, T] when it is the same
for the whole batch (an iota that XLA fuses into its consumer), [B, S, T] when positions or segments
differ by row, [B, 1 or H, S, T] with a selection of keys, and None when everything is visible.
"""

import jax.numpy as jnp
from jax import Array, lax

from maxtext.kernels.attention.request import AttentionInputs, AttentionMask


def dense_mask(inputs: AttentionInputs) -> Array | None:
    """True where positions and segments let a query see a key; a selection of keys is not in it."""
    by_position = position_mask(inputs)
    if inputs.q_segments is None or inputs.k_segments is None:
        return by_position
    q_segments = inputs.q_segments[:, :, None]
    same = (q_segments == inputs.k_segments[:, None, :]) & (q_segments != 0)
    return same if by_position is None else by_position & same


def dense_head_mask(inputs: AttentionInputs) -> Array | None:
    """True where a query may see a key, for all reasons together: [S, T], [B, 1, S, T] or [B, H, S,
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

    A softmax over no key is undefined and each kernel makes something else of it: an average of
    values, or worse. Doing it at the output also stops the gradient: it reaches the kernel as
    zeros, and leaves it as zeros.
    """
    seeing = seeing_queries(inputs)
    if seeing is None:
        return output
    batched = seeing if seeing.ndim > 1 else seeing[None]
    return jnp.where(
        batched.reshape(batched.shape + (1,) * (output.ndim - batched.ndim)), output, 0
    )


def seeing_queries(inputs: AttentionInputs) -> Array | None:
    """True for queries that see some key: [B, S], [S], or with a selection [B, S, 1 or H].

    None when all do, for reasons known before any value is.
    """
    if inputs.selected is not None:
        visible = dense_head_mask(inputs)
        assert visible is not None
        return visible.any(axis=-1).swapaxes(1, 2)
    if inputs.is_self_attention:  # a token sees itself, unless it is padding
        return None if inputs.q_segments is None else inputs.q_segments != 0
    visible = dense_mask(inputs)
    return None if visible is None else visible.any(axis=-1)
