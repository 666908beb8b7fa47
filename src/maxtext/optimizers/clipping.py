"""The global norm of gradients, and clipping by it.

The norm is the square root of the sum of squares over all leaves, in float32 for any dtype of the
gradients: in bfloat16 a sum over millions of entries stops growing.
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
