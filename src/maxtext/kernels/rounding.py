"""Numbers of eight bits with scales, and products of them: what all products in low precision are made of."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

FP8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)  # of values, of gradients
SMALLEST = float(jnp.finfo(jnp.float32).tiny)  # scale, which rows of zeros have, too: so they count for nothing


class Rounded(NamedTuple):
    """Numbers of eight bits, and their scale: one, or one for each place along the dimensions that are not added up."""

    numbers: Array
    scale: Array


def rounded(x: Array, dtype: Any, axes: Sequence[int] | None = None) -> Rounded:
    """With one scale, or one for all along `axes`."""
    scale = scale_of(x, dtype, axes)
    x = x.astype(jnp.float32) / (scale if axes is None else jnp.expand_dims(scale, tuple(axes)))
    return Rounded((jnp.round(x) if jnp.issubdtype(dtype, jnp.integer) else x).astype(dtype), scale)


def scale_of(x: Array, dtype: Any, axes: Sequence[int] | None = None) -> Array:
    """That brings the largest magnitude, of all or along `axes`, within the format."""
    # No dimensions of size one are kept: with them, the compiler for GPUs of jax 0.11.2 ended with an internal error.
    largest = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=axes if axes is None else tuple(axes))
    if not jnp.issubdtype(dtype, jnp.integer):
        return scale_for(largest, dtype)
    scale = largest / 127
    return jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1.0, scale)  # what is not a number stays so


def scale_for(largest: Array, dtype: Any) -> Array:
    """The least power of two that brings a magnitude within fp8."""
    return jnp.maximum(power_of_two(largest / float(jnp.finfo(dtype).max)), SMALLEST)


def power_of_two(x: Array) -> Array:
    """The least that is not below x >= 0, of float32; what is not finite stays so."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    up = (bits + 0x007FFFFF) & 0x7F800000
    return jnp.where(x < jnp.inf, jax.lax.bitcast_convert_type(up, jnp.float32), x)


def by_rows(arrays: Sequence[Array], outer: int, dtype: Any) -> tuple[list[Array], Array]:
    """In fp8, with a scale for each place in the first dimensions, which they share."""
    scales = [scale_of(each, dtype, range(outer, each.ndim)) for each in arrays]
    scale = functools.reduce(jnp.maximum, scales)
    return [scaled(each.astype(jnp.float32), 1 / scale, dtype) for each in arrays], scale


def scale_of_all(arrays: Sequence[Array], dtype: Any) -> Array:
    return functools.reduce(jnp.maximum, [scale_of(each, dtype) for each in arrays])


def relative(scales: Array) -> tuple[Array, Array]:
    """To the largest, which is the second."""
    most = jnp.max(scales)
    most = jnp.where(most > 0, most, 1.0)
    return scales / most, most


def scaled(x: Array, scale: Array, dtype: Any) -> Array:
    """By one number, or one for each place in the first dimensions."""
    return (x * scale.astype(x.dtype).reshape(*scale.shape, *[1] * (x.ndim - scale.ndim))).astype(dtype)


def room(dtype: Any) -> Any:
    """The dtype of sums that are not scaled yet: float16's largest number is soon reached."""
    return jnp.float32 if jnp.dtype(dtype) == jnp.float16 else dtype


def contract(
    one: Array, other: Array, over: tuple[Sequence[int], Sequence[int]], dtype: Any, scale: Array | None = None
) -> Array:
    """The sum of products over dimensions of each. With one `scale` for all of it: written as here, the compiler for
    GPUs makes it, and the conversions, a part of the product in eight bits."""
    dimensions = ((tuple(over[0]), tuple(over[1])), ((), ()))
    if scale is not None:
        one, other = one.astype(dtype) * scale.astype(dtype), other.astype(dtype)
    return jax.lax.dot_general(one, other, dimensions, preferred_element_type=dtype)


def total(products: Sequence[Array]) -> Array:
    """With the later product first, the compiler for GPUs makes each addition a part of it."""
    return functools.reduce(lambda sum, each: each + sum, products)


def empty_like(x: Array) -> Array:
    return jnp.zeros((0, *x.shape), x.dtype)


def as_matrix(x: Array, lines: int) -> Array:
    """With the first dimensions as lines, and the others as columns."""
    return x.reshape(math.prod(x.shape[:lines]), -1)
