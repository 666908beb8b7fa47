"""Statistics of attention: its largest logits and its mean weights. They have no gradient.

Both recompute the product of queries and keys, whatever back end attends, for a block of queries at
a time: the logits of all queries never exist at once.

Shapes: B batch, S query length, T key length, H query heads.
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
    """[H]: the largest logit of each head that enters the softmax, over all rows, queries and their
    visible keys; minus infinity if no key is visible."""

    def max_over_keys(block: AttentionInputs) -> Array:
        return merge_heads(masked_logits(block), block).max(axis=-1).swapaxes(1, 2)

    largest = map_query_blocks(max_over_keys, inputs).max(axis=(0, 1))
    return jnp.where(largest > MASK_VALUE, largest, -jnp.inf)


def mean_weights(inputs: AttentionInputs) -> Array:
    """[B, S, T]: the softmax over the visible keys, averaged over heads; zeros for a query that
    sees no key. Sinks are left out.
    """

    def weights(block: AttentionInputs) -> Array:
        probs = merge_heads(jax.nn.softmax(masked_logits(block), axis=-1), block)
        visible = dense_head_mask(block)
        return (probs if visible is None else jnp.where(visible, probs, 0)).mean(axis=1)

    return map_query_blocks(weights, inputs)


def merge_heads(array: Array, inputs: AttentionInputs) -> Array:
    """[B, K, G, S, T] or [B, K, S, T] as [B, H, S, T]."""
    return array.reshape(array.shape[0], inputs.q.shape[2], *array.shape[-2:])


def map_query_blocks(
    function: Callable[[AttentionInputs], Array], inputs: AttentionInputs
) -> Array:
    """function(inputs), [B, S, ...], computed for a block of queries and all keys at a time."""
    inputs = validate_inputs(
        replace(inputs, q=jax.lax.stop_gradient(inputs.q), k=jax.lax.stop_gradient(inputs.k))
    )
    # A block does not know its queries' indices, so default positions are made explicit.
    q_positions = jnp.broadcast_to(
        positions(inputs.q_positions, inputs.q.shape[1], inputs.mask), inputs.q.shape[:2]
    )
    selected = None if inputs.selected is None else inputs.selected.swapaxes(1, 2)

    def run_block(arrays: tuple[Array, Array, Array | None, Array | None]) -> Array:
        q, q_positions, q_segments, selected = arrays
        selected = None if selected is None else selected.swapaxes(1, 2)
        return function(
            replace(inputs, q=q, q_positions=q_positions, q_segments=q_segments, selected=selected)
        )

    return map_queries(run_block, (inputs.q, q_positions, inputs.q_segments, selected))
