"""The global norm, and clipping of gradients by it.

The norm is the square root of the sum of squares over every leaf, in float32 whatever the
gradients' type: in bfloat16 a sum over millions of entries stops growing.
"""

from typing import Any

import jax
import jax.numpy as jnp


def global_norm(tree: Any) -> jax.Array:
    return jnp.sqrt(sum(map(sum_of_squares, jax.tree.leaves(tree)), jnp.float32(0)))


@jax.jit  # traced once for leaves of one shape, and called: a model has hundreds
def sum_of_squares(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(x.astype(jnp.float32)))


def clip_by_global_norm(grads: Any, threshold: float) -> tuple[Any, jax.Array, jax.Array]:
    """(gradients scaled down to a norm of at most `threshold`, raw norm, norm after); threshold 0:
    left as they are.

    Leaves keep their types. A norm that is not finite stays so afterwards, so that the caller can
    see it.
    """
    raw_norm = global_norm(grads)
    if threshold == 0:
        return grads, raw_norm, raw_norm
    scale = jnp.where(raw_norm > threshold, threshold / raw_norm, 1.0)
    clipped = jax.tree.map(
        lambda grad: (grad.astype(jnp.float32) * scale).astype(grad.dtype), grads
    )
    return clipped, raw_norm, raw_norm * scale
