"""What attention does inside, for those who ask: its largest logits, and how it weighs the keys. No
gradient.

Shapes: B batch, S query length, T key length, H query heads. Both repeat the product of queries and
keys beside the back end that attends, whichever that is, a block of queries at a time: the memory
of all logits is never taken.
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array

from maxtext.kernels.attention.checks import validate_inputs
from maxtext.kernels.attention.dot_product import MASK_VALUE, masked_logits
from maxtext.kernels.attention.masks import dense_head_mask, positions
from maxtext.kernels.attention.queries import map_queries
from maxtext.kernels.attention.request import AttentionInputs


def max_logits(inputs: AttentionInputs) -> Array:
    """[H], the largest logit of each head as it enters the softmax, over all rows, queries and the
    keys that they see; minus infinity where nothing is seen."""

    def largest(part: AttentionInputs) -> Array:
        return by_head(masked_logits(part), part).max(axis=-1).swapaxes(1, 2)

    found = by_block(largest, inputs).max(axis=(0, 1))
    return jnp.where(found > MASK_VALUE, found, -jnp.inf)


def mean_weights(inputs: AttentionInputs) -> Array:
    """[B, S, T], the softmax over the visible keys, averaged over heads; a query that sees nothing
    weighs nothing.

    Each head's weights have the sum 1, so this is the sum over heads divided by its own sum. Sinks
    are left out.
    """

    def weights(part: AttentionInputs) -> Array:
        found = by_head(jax.nn.softmax(masked_logits(part), axis=-1), part)
        visible = dense_head_mask(part)
        return (found if visible is None else jnp.where(visible, found, 0)).mean(axis=1)

    return by_block(weights, inputs)


def by_head(array: Array, inputs: AttentionInputs) -> Array:
    """[B, K, G, S, T] or [B, K, S, T] as [B, H, S, T]."""
    return array.reshape(array.shape[0], inputs.q.shape[2], *array.shape[-2:])


def by_block(function: Callable[[AttentionInputs], Array], inputs: AttentionInputs) -> Array:
    """function(inputs), [B, S, ...], computed for some of the queries and all keys at a time."""
    inputs = validate_inputs(
        replace(inputs, q=jax.lax.stop_gradient(inputs.q), k=jax.lax.stop_gradient(inputs.k))
    )
    # A block does not know its place in the row, so the index that absent positions mean is written
    # out.
    q_positions = jnp.broadcast_to(
        positions(inputs.q_positions, inputs.q.shape[1], inputs.mask), inputs.q.shape[:2]
    )
    selected = None if inputs.selected is None else inputs.selected.swapaxes(1, 2)

    def part(arrays: tuple[Array, Array, Array | None, Array | None]) -> Array:
        q, q_positions, q_segments, selected = arrays
        selected = None if selected is None else selected.swapaxes(1, 2)
        return function(
            replace(inputs, q=q, q_positions=q_positions, q_segments=q_segments, selected=selected)
        )

    return map_queries(part, (inputs.q, q_positions, inputs.q_segments, selected))
