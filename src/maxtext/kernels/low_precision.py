"""Products in eight bits for training, forward and backward, with scales of the moment.

`fp8`: values as e4m3, gradients as e5m2, which reaches further; one scale for a tensor, the least power of two that
brings its largest magnitude within the format's own. All three products of a kernel are in eight bits, and what is kept
for the backward pass is, too. Since a power of two changes no digit, a product is written in its own dtype and scaled
where it is read, instead of in float32.

`int8`: a scale for each row and each column, so that one large number does not flatten all others. The sum runs along
other dimensions in each product, so tensors are rounded anew for each; the gradient of the kernel, whose sum over all
tokens suffers most, stays in the dtype of the inputs.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

FP8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)  # of values, of gradients


class Rounded(NamedTuple):
    """Numbers of eight bits, and their scale: one, or one for each place along the dimensions that are not added up."""

    numbers: Array
    scale: Array


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def product(x: Array, kernel: Array, rank: int, recipe: str, dtype: Any) -> Array:
    """x [..., inputs] times a kernel [inputs, outputs], in `dtype`; `rank`: how many dimensions inputs have."""
    return forward(x, kernel, rank, recipe, dtype)[0]


def forward(x: Array, kernel: Array, rank: int, recipe: str, dtype: Any) -> tuple[Array, Any]:
    outer, inputs = range(x.ndim - rank), range(rank)
    over = (range(len(outer), x.ndim), inputs)
    if recipe == "int8":
        return times(rounded(x, jnp.int8, over[0]), rounded(kernel, jnp.int8, inputs), over, dtype), (x, kernel)
    values, kernels = rounded(x, FP8[0]), rounded(kernel, FP8[0])
    # Arrays without elements carry the dtypes that gradients must have.
    return times(values, kernels, over, dtype), (values, kernels, empty_like(x), empty_like(kernel))


def backward(rank: int, recipe: str, dtype: Any, kept: Any, gradient: Array) -> tuple[Array, Array]:
    if recipe == "int8":
        x, kernel = kept
    else:
        values, kernels, x, kernel = kept
    outer = range((x if recipe == "int8" else values.numbers).ndim - rank)
    outputs = range(len(outer), gradient.ndim)
    of_kernels = range(rank, rank + len(outputs))
    if recipe == "int8":
        of_x = times(
            rounded(gradient, jnp.int8, outputs), rounded(kernel, jnp.int8, of_kernels), (outputs, of_kernels), x.dtype
        )
        of_kernel = contract(x, gradient.astype(x.dtype), (outer, outer), jnp.float32).astype(kernel.dtype)
    else:
        gradients = rounded(gradient, FP8[1])
        of_x = times(gradients, kernels, (outputs, of_kernels), x.dtype)
        of_kernel = times(values, gradients, (outer, outer), kernel.dtype)
    return of_x, of_kernel


product.defvjp(forward, backward)


def rounded(x: Array, dtype: Any, axes: Sequence[int] | None = None) -> Rounded:
    """With one scale, or one for all along `axes`."""
    integers = jnp.issubdtype(dtype, jnp.integer)
    largest = 127.0 if integers else float(jnp.finfo(dtype).max)
    x = x.astype(jnp.float32)
    axes = tuple(range(x.ndim) if axes is None else axes)
    # No dimensions of size one are kept: with them, the compiler for GPUs of jax 0.11.2 ended with an internal error.
    scale = jnp.max(jnp.abs(x), axis=axes) / largest
    scale = scale if integers else power_of_two(scale)
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1.0, scale)  # what is not a number stays so
    x = x / (jnp.expand_dims(scale, axes) if scale.ndim else scale)
    return Rounded((jnp.round(x) if integers else x).astype(dtype), scale)


def power_of_two(x: Array) -> Array:
    """The least that is not below x >= 0, of float32; what is not finite stays so."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    up = (bits + 0x007FFFFF) & 0x7F800000
    return jnp.where(jnp.isfinite(x), jax.lax.bitcast_convert_type(up, jnp.float32), x)


def times(one: Rounded, other: Rounded, over: tuple[Sequence[int], Sequence[int]], dtype: Any) -> Array:
    """Added up over dimensions of each, and scaled."""
    if one.numbers.dtype != jnp.int8:
        kept = jnp.float32 if jnp.dtype(dtype) == jnp.float16 else dtype  # whose largest number is soon reached
        return (contract(one.numbers, other.numbers, over, kept) * (one.scale * other.scale).astype(kept)).astype(dtype)
    sums = contract(one.numbers, other.numbers, over, jnp.int32).astype(jnp.float32)
    left = one.scale.reshape(*one.scale.shape, *[1] * other.scale.ndim)
    return (sums * (left * other.scale)).astype(dtype)


def contract(one: Array, other: Array, over: tuple[Sequence[int], Sequence[int]], dtype: Any) -> Array:
    dimensions = ((tuple(over[0]), tuple(over[1])), ((), ()))
    return jax.lax.dot_general(one, other, dimensions, preferred_element_type=dtype)


def empty_like(x: Array) -> Array:
    return jnp.zeros((0,), x.dtype)
