"""What all losses share: sums under a mask, in float32, and checks of options."""

from collections.abc import Collection

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

Scalar = Array | float  # a coefficient, which may be traced


def float32(x: ArrayLike) -> Array:
    return jnp.asarray(x, jnp.float32)


def constant(x: ArrayLike) -> Array:
    """`x` in float32, without a gradient."""
    return jax.lax.stop_gradient(float32(x))


def masked(x: ArrayLike, mask: Array) -> Array:
    """`x` in float32 where `mask` is nonzero, 0 elsewhere.

    A select, not a product: a nan or inf in a masked element reaches neither the loss nor, by way
    of 0 * inf, its gradient.
    """
    return jnp.where(mask != 0, float32(x), 0.0)


def masked_sum(x: Array, mask: Array, axis: int | None = None) -> Array:
    """Σ mask·x, over all axes or one."""
    return jnp.sum(masked(x, mask) * mask, axis)


def divisor(count: ArrayLike) -> Array:
    """max(count, 1), so that the mean over nothing is 0."""
    return jnp.maximum(float32(count), 1.0)


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Raise ValueError if an option has none of its values."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(choices)}")
