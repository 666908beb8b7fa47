"""RMS normalisation over the last dimension, in float32, with a gradient of its own.

Autodiff would keep the input, and the input divided by its size, in float32 for the backward pass. This keeps the input
as it came and one number a row.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def rms_norm(x: Array, scale: Array | None, epsilon: float, dtype: Any) -> Array:
    """x [..., E] over its root mean square, times `scale` [E], in `dtype`."""
    return forward(x, scale, epsilon, dtype)[0]


def forward(x: Array, scale: Array | None, epsilon: float, dtype: Any) -> tuple[Array, Any]:
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    return times(wide * inverse, scale).astype(dtype), (x, scale, inverse)


def backward(epsilon: float, dtype: Any, kept: Any, gradient: Array) -> tuple[Array, Array | None]:
    x, scale, inverse = kept
    unit = x.astype(jnp.float32) * inverse
    gradient = gradient.astype(jnp.float32)
    of_unit = times(gradient, scale)
    of_x = inverse * (of_unit - unit * jnp.mean(of_unit * unit, axis=-1, keepdims=True))
    of_scale = None if scale is None else jnp.sum(gradient * unit, axis=tuple(range(x.ndim - 1))).astype(scale.dtype)
    return of_x.astype(x.dtype), of_scale


rms_norm.defvjp(forward, backward)


def times(x: Array, scale: Array | None) -> Array:
    return x if scale is None else x * scale.astype(jnp.float32)
