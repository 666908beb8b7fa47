"""Clipping of gradients by their global norm.

The norm is the square root of the sum of squares over every leaf, in float32 whatever the gradients' type: in bfloat16
a sum over millions of entries stops growing.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def clip_by_global_norm(grads: Any, threshold: float) -> tuple[Any, jax.Array, jax.Array]:
    """(gradients scaled down to a norm of at most `threshold`, raw norm, norm after); threshold 0: left as they are.

    Leaves keep their types. A norm that is not finite stays so afterwards, so that the caller can see it.
    """
    raw_norm = optax.tree.norm(optax.tree.cast(grads, jnp.float32))
    if threshold == 0:
        return grads, raw_norm, raw_norm
    scale = jnp.where(raw_norm > threshold, threshold / raw_norm, 1.0)
    clipped = jax.tree.map(lambda grad: (grad.astype(jnp.float32) * scale).astype(grad.dtype), grads)
    return clipped, raw_norm, raw_norm * scale
