"""Dynamic quantization to fp8 and int8, and matmuls of quantized operands.

    x ≈ qvalue · scale
    fp8     scale = the least power of two with amax(|x|) / scale <= the largest fp8 value
    int8    scale = amax(|x|) / 127

A scale covers a tensor, or its elements along some axes. Scaling by a power of two is exact, so fp8
matmuls may be scaled before or after they are rounded.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

E4M3 = jnp.float8_e4m3fn  # activations and weights: more precision
E5M2 = jnp.float8_e5m2  # gradients: more range
MIN_SCALE = float(jnp.finfo(jnp.float32).tiny)  # also of rows of zeros


class QuantizedTensor(NamedTuple):
    """`scale` has the dimensions that were not reduced, or none."""

    qvalue: Array
    scale: Array


def quantize(x: Array, dtype: DTypeLike, axes: Sequence[int] | None = None) -> QuantizedTensor:
    """x with one scale, or one for the elements along `axes`."""
    scale = amax_scale(x, dtype, axes)
    x = x.astype(jnp.float32) / (scale if axes is None else jnp.expand_dims(scale, tuple(axes)))
    return QuantizedTensor(
        (jnp.round(x) if jnp.issubdtype(dtype, jnp.integer) else x).astype(dtype), scale
    )


def amax_scale(x: Array, dtype: DTypeLike, axes: Sequence[int] | None = None) -> Array:
    """The scale for amax(|x|), over all elements or along `axes`."""
    # The reduced dimensions are dropped: with keepdims, XLA:GPU of jax 0.11.2 failed with an
    # internal error.
    amax = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=axes if axes is None else tuple(axes))
    if not jnp.issubdtype(dtype, jnp.integer):
        return scale_from_amax(amax, dtype)
    scale = amax / 127
    return jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1.0, scale)  # NaN stays NaN


def scale_from_amax(amax: Array, dtype: DTypeLike) -> Array:
    """The least power of two with amax / scale <= the largest value of fp8 `dtype`."""
    return jnp.maximum(ceil_power_of_two(amax / float(jnp.finfo(dtype).max)), MIN_SCALE)


def ceil_power_of_two(x: Array) -> Array:
    """The least power of two that is not below x >= 0, in float32; infinity and NaN stay as they
    are.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    rounded_up = (bits + 0x007FFFFF) & 0x7F800000
    return jnp.where(x < jnp.inf, jax.lax.bitcast_convert_type(rounded_up, jnp.float32), x)


def quantize_rows(
    arrays: Sequence[Array], row_dims: int, dtype: DTypeLike
) -> tuple[list[Array], Array]:
    """The arrays, which share their first `row_dims` dimensions, in fp8, and one scale for each
    index into these dimensions.
    """
    scales = [amax_scale(x, dtype, range(row_dims, x.ndim)) for x in arrays]
    scale = functools.reduce(jnp.maximum, scales)
    return [rescale(x.astype(jnp.float32), 1 / scale, dtype) for x in arrays], scale


def shared_scale(arrays: Sequence[Array], dtype: DTypeLike) -> Array:
    """One scale for all arrays."""
    return functools.reduce(jnp.maximum, [amax_scale(x, dtype) for x in arrays])


def relative_scales(scales: Array) -> tuple[Array, Array]:
    """(scales / their maximum, the maximum)."""
    largest = jnp.max(scales)
    largest = jnp.where(largest > 0, largest, 1.0)
    return scales / largest, largest


def rescale(x: Array, scale: Array, dtype: DTypeLike) -> Array:
    """x · scale in `dtype`; the dimensions of `scale` are the first ones of x."""
    return (x * scale.astype(x.dtype).reshape(*scale.shape, *[1] * (x.ndim - scale.ndim))).astype(
        dtype
    )


def accum_dtype(dtype: DTypeLike) -> DTypeLike:
    """The dtype of unscaled products, which would overflow float16."""
    return jnp.float32 if jnp.dtype(dtype) == jnp.float16 else dtype


def contract(
    lhs: Array,
    rhs: Array,
    axes: tuple[Sequence[int], Sequence[int]],
    dtype: DTypeLike,
    scale: Array | None = None,
) -> Array:
    """The contraction of both operands over `axes`, times `scale`, a scalar. XLA:GPU fuses the
    conversions and the scaling, written like this, into the fp8 matmul."""
    dimensions = ((tuple(axes[0]), tuple(axes[1])), ((), ()))
    if scale is not None:
        lhs, rhs = lhs.astype(dtype) * scale.astype(dtype), rhs.astype(dtype)
    return jax.lax.dot_general(lhs, rhs, dimensions, preferred_element_type=dtype)


def sum_products(products: Sequence[Array]) -> Array:
    """The sum of products, with the later operand first: XLA:GPU then fuses each addition into the
    epilogue of a matmul.
    """
    return functools.reduce(lambda total, product: product + total, products)


def shape_residual(x: Array) -> Array:
    """An empty array that carries x's shape (after a leading 0) and dtype to the backward pass."""
    return jnp.zeros((0, *x.shape), x.dtype)


def flatten_2d(x: Array, row_dims: int) -> Array:
    """[rows, columns]: the first `row_dims` dimensions are rows."""
    return x.reshape(math.prod(x.shape[:row_dims]), -1)
