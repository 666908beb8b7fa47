"""Clipping of gradients by their global norm, and of attention weights by their logits (QK-clip).

`clip_by_global_norm` scales gradients. `global_norm` is the square root of the sum of squares over
all leaves, in float32 for any dtype of the gradients: in bfloat16 a sum over millions of entries
stops growing.

`clip_mla` is QK-clip for multi-head latent attention (Kimi K2): after an update, it scales down the
heads whose attention logits are too large.

Shapes: R rank of the latent, H heads, N head size without RoPE, P with RoPE, V value size, L
layers.
"""

import jax
import jax.numpy as jnp

from maxtext.common.types import Tree


def global_norm(tree: Tree) -> jax.Array:
    return jnp.sqrt(sum(map(sum_of_squares, jax.tree.leaves(tree)), jnp.float32(0)))


@jax.jit  # traced once per shape: a model has hundreds of leaves
def sum_of_squares(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(x.astype(jnp.float32)))


def clip_by_global_norm(grads: Tree, threshold: float) -> tuple[Tree, jax.Array, jax.Array]:
    """(gradients with a norm of at most `threshold`, raw norm, norm after clipping).

    A threshold of 0 disables clipping. Leaves keep their dtypes. A non-finite norm stays
    non-finite, so that the caller can detect it.
    """
    raw_norm = global_norm(grads)
    if threshold == 0:
        return grads, raw_norm, raw_norm
    scale = jnp.where(raw_norm > threshold, threshold / raw_norm, 1.0)
    clipped = jax.tree.map(
        lambda grad: (grad.astype(jnp.float32) * scale).astype(grad.dtype), grads
    )
    return clipped, raw_norm, raw_norm * scale


def clip_mla(
    weights: Tree,
    max_logits: jax.Array,
    threshold: float,
    nope_dim: int,
    layers_axis: int | None = None,
) -> Tree:
    """The weights of an MLA layer, scaled so that no head's largest logit exceeds `threshold`.

    max_logits [H] is the largest scaled logit of each head in the step. With s = min(1, threshold /
    max_logits), the logits are multiplied by s: the part without RoPE by √s in the queries
    (`query_b`, or `query`) and √s in the keys (`kv_b`), the part with RoPE by s in the queries
    alone, because all heads share its keys. Values and other weights stay the same, and so do heads
    with an infinite or NaN logit, which does not say how much too large the weights are.

    `layers_axis`: the dimension of stacked layers, if any; then max_logits is [L, H].
    """
    # Not by min(1, ratio): a largest logit may be negative, or -inf in a batch of padding.
    exceeds = (max_logits > threshold) & jnp.isfinite(max_logits)
    scale = jnp.where(exceeds, threshold / max_logits, 1.0)[..., :, None]
    query = "query_b" if "query_b" in weights else "query"

    def scale_heads(name: str, nope_scale: jax.Array, rest_scale: jax.Array) -> Tree:
        weight = weights[name]["weight"]
        if layers_axis is not None:
            weight = jnp.moveaxis(weight, layers_axis, 0)  # [(L,) R, H, N + rest]
        is_nope = jnp.arange(weight.shape[-1]) < nope_dim
        factors = jnp.where(is_nope, nope_scale, rest_scale)  # [(L,) H, N + rest]
        clipped = (weight * factors[..., None, :, :]).astype(weight.dtype)
        if layers_axis is not None:
            clipped = jnp.moveaxis(clipped, 0, layers_axis)
        return weights[name] | {"weight": clipped}

    return weights | {
        query: scale_heads(query, jnp.sqrt(scale), scale),
        "kv_b": scale_heads("kv_b", jnp.sqrt(scale), jnp.ones_like(scale)),
    }
