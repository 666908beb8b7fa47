"""RMS norm over the last dimension, in float32, with a custom backward pass.

    y = x / √(mean(x²) + epsilon) · scale

Autodiff would save the input and its normalised copy in float32. This saves the input in its own
dtype and one float32 for each row.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from maxtext.common.types import Tree


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def rms_norm(x: Array, scale: Array | None, epsilon: float, dtype: DTypeLike) -> Array:
    """x [..., E] / √(mean(x²) + epsilon) · scale [E], in `dtype`."""
    return forward(x, scale, epsilon, dtype)[0]


def forward(x: Array, scale: Array | None, epsilon: float, dtype: DTypeLike) -> tuple[Array, Tree]:
    x32 = x.astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + epsilon)
    return apply_scale(x32 * inverse_rms, scale).astype(dtype), (x, scale, inverse_rms)


def backward(
    epsilon: float, dtype: DTypeLike, residuals: Tree, dy: Array
) -> tuple[Array, Array | None]:
    x, scale, inverse_rms = residuals
    unit = x.astype(jnp.float32) * inverse_rms
    dy = dy.astype(jnp.float32)
    dunit = apply_scale(dy, scale)
    dx = inverse_rms * (dunit - unit * jnp.mean(dunit * unit, axis=-1, keepdims=True))
    dscale = (
        None
        if scale is None
        else jnp.sum(dy * unit, axis=tuple(range(x.ndim - 1))).astype(scale.dtype)
    )
    return dx.astype(x.dtype), dscale


rms_norm.defvjp(forward, backward)


def apply_scale(x: Array, scale: Array | None) -> Array:
    return x if scale is None else x * scale.astype(jnp.float32)
