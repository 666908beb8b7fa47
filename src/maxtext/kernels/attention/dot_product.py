"""Attention as two einsums and a softmax, for every platform and request: the reference of the
other back ends.

Shapes: B batch, S query length, T key length, H query heads, K key/value heads, G = H / K, D head
dim, Dv head dim of values. Logits are [B, K, G, S, T], without G if it is 1, so this back end uses
the most memory. Keys and values are never repeated.

Precision: matmuls accumulate in float32. The product of queries and keys is rounded to the dtype of
the inputs, unless float32_logits keeps it in float32, or float32_product casts queries and keys to
float32 first (with the same result on hardware that multiplies bfloat16 exactly). Scale, soft cap,
mask, softmax and sinks are always float32. The weights are rounded to the dtype of the values for
the second matmul.
"""

import jax
import jax.numpy as jnp
from jax import Array

from maxtext.kernels.attention.masks import dense_head_mask, zero_fully_masked_queries
from maxtext.kernels.attention.request import AttentionInputs, AttentionRequest

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
