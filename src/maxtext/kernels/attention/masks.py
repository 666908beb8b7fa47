"""Boolean masks from positions and segments, and the queries that see no key at all.

Shapes: B batch, S query length, T key length. A mask is [S, T] when it is the same for the whole batch (an iota that
XLA fuses into its consumer), [B, S, T] when positions or segments differ by row, and None when everything is visible.
"""

import jax.numpy as jnp
from jax import Array, lax

from maxtext.kernels.attention.request import Inputs


def mask(inputs: Inputs) -> Array | None:
    """True where a query may see a key."""
    by_position = position_mask(inputs)
    if inputs.q_segments is None or inputs.k_segments is None:
        return by_position
    q_segments = inputs.q_segments[:, :, None]
    same = (q_segments == inputs.k_segments[:, None, :]) & (q_segments != 0)
    return same if by_position is None else by_position & same


def position_mask(inputs: Inputs) -> Array | None:
    visibility = inputs.visibility
    if not visibility.causal:
        return None
    q = positions(inputs.q_positions, inputs.q.shape[1])[..., :, None]
    k = positions(inputs.k_positions, inputs.k.shape[1])[..., None, :]
    visible = k <= q
    if visibility.window is not None:
        visible &= k > q - visibility.window
    if visibility.chunk is not None:
        visible &= q // visibility.chunk == k // visibility.chunk
    return visible


def positions(given: Array | None, length: int) -> Array:
    return lax.iota(jnp.int32, length) if given is None else given


def hide_blind_queries(output: Array, inputs: Inputs) -> Array:
    """Set to zero the [B, S, ...] output of every query that sees no key.

    A softmax over no key is undefined and each kernel makes something else of it: an average of values, or worse. Doing
    it at the output also stops the gradient: it reaches the kernel as zeros, and leaves it as zeros.
    """
    seeing = seeing_queries(inputs)
    if seeing is None:
        return output
    return jnp.where(seeing.reshape(seeing.shape + (1,) * (output.ndim - 2)), output, 0)


def seeing_queries(inputs: Inputs) -> Array | None:
    """[B, S] or [S], True for queries that see some key; None when all do, for reasons known before any value is."""
    if inputs.is_self_attention:  # a token sees itself, unless it is padding
        return None if inputs.q_segments is None else inputs.q_segments != 0
    visible = mask(inputs)
    return None if visible is None else visible.any(axis=-1)
