"""Attention as two einsums and a softmax, for every platform and request, and its statistics.

`run` is the reference of the other back ends. Logits are [B, K, G, S, T], without G if it is 1, so
this back end uses the most memory. Keys and values are never repeated.

Precision: matmuls accumulate in float32. The product of queries and keys is rounded to the dtype of
the inputs, unless float32_logits keeps it in float32, or float32_product casts queries and keys to
float32 first (with the same result on hardware that multiplies bfloat16 exactly). Scale, soft cap,
mask, softmax and sinks are always float32. The weights are rounded to the dtype of the values for
the second matmul.

`max_logits` and `mean_weights` are statistics without a gradient. Both recompute the product of
queries and keys, whatever back end attends, for a block of queries at a time: the logits of all
queries never exist at once.

Shapes: B batch, S query length, T key length, H query heads, K key/value heads, G = H / K, D head
dim, Dv head dim of values.
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array

from maxtext.kernels.attention.masks import (
    dense_head_mask,
    map_queries,
    positions,
    zero_fully_masked_queries,
)
from maxtext.kernels.attention.request import AttentionInputs, AttentionRequest, validate_inputs

MASK_VALUE = -1e30  # finite, so that fully masked rows have a finite softmax and gradient


def unsupported_reason(request: AttentionRequest) -> str | None:
    del request
    return None


def run(inputs: AttentionInputs) -> Array:
    batch, q_length, q_heads, _ = inputs.q.shape
    k_heads, v_head_dim = inputs.v.shape[2:]
    logits = masked_logits(inputs)
    weights = jax.nn.softmax(logits, axis=-1)
    if inputs.sinks is not None:
        # A sink s adds e^s to the denominator: every weight is multiplied by sum / (sum + e^s) =
        # sigmoid(log sum - s).
        sinks = inputs.sinks.astype(jnp.float32).reshape(*logits.shape[1:-2], 1, 1)
        weights *= jax.nn.sigmoid(jax.nn.logsumexp(logits, axis=-1, keepdims=True) - sinks)
    weights = weights.astype(inputs.v.dtype)
    if q_heads == k_heads:
        output = jnp.einsum("bkst,btkv->bskv", weights, inputs.v)
    else:
        output = jnp.einsum("bkgst,btkv->bskgv", weights, inputs.v).reshape(
            batch, q_length, q_heads, v_head_dim
        )
    output = output.astype(inputs.q.dtype)
    return zero_fully_masked_queries(output, inputs)


def masked_logits(inputs: AttentionInputs) -> Array:
    """The logits that enter the softmax, in float32: [B, K, S, T], or [B, K, G, S, T] if query
    heads share keys.
    """
    batch, q_length, q_heads, head_dim = inputs.q.shape
    k_heads = inputs.k.shape[2]
    groups = q_heads // k_heads
    q, k = inputs.q, inputs.k
    if inputs.float32_product:
        q, k = q.astype(jnp.float32), k.astype(jnp.float32)

    logits_dtype = jnp.float32 if inputs.float32_logits else q.dtype
    if groups == 1:  # on CPUs a dimension of size 1 makes the softmax much slower
        logits = jnp.einsum("bskd,btkd->bkst", q, k, preferred_element_type=logits_dtype)
    else:
        q = q.reshape(batch, q_length, k_heads, groups, head_dim)
        logits = jnp.einsum("bskgd,btkd->bkgst", q, k, preferred_element_type=logits_dtype)
    logits = logits.astype(jnp.float32) * inputs.scale
    if inputs.soft_cap is not None:
        logits = inputs.soft_cap * jnp.tanh(logits / inputs.soft_cap)
    visible = dense_head_mask(inputs)
    if visible is None:
        return logits
    if visible.ndim == 4 and groups > 1:
        heads = (1, 1) if visible.shape[1] == 1 else (k_heads, groups)
        visible = visible.reshape(visible.shape[0], *heads, *visible.shape[2:])
    return jnp.where(visible, logits, MASK_VALUE)


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
