"""Products in eight bits for training, forward and backward, with scales of the moment.

`fp8`: values as e4m3, gradients as e5m2, which reaches further; one scale for a tensor, the least power of two that
brings its largest magnitude within the format's own. All three products of a kernel are in eight bits, and what is kept
for the backward pass is, too. Since a power of two changes no digit, a product is written in its own dtype and scaled
where it is read, instead of in float32. NVIDIA's products in fp8 add up along the last dimension of both operands, and
each tensor is in two products that add up along different ones; so there it is rounded and turned in one pass.

`int8`: a scale for each row and each column, so that one large number does not flatten all others. The sum runs along
other dimensions in each product, so tensors are rounded anew for each; the gradient of the kernel, whose sum over all
tokens suffers most, stays in the dtype of the inputs.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from maxtext.common.log import say_once
from maxtext.kernels.attention import gpu_capability

TILE = 128  # numbers of each dimension that are turned at a time
FP8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)  # of values, of gradients
LAST = ((1,), (1,))  # dimensions of two matrices


class Rounded(NamedTuple):
    """Numbers of eight bits, and their scale: one, or one for each place along the dimensions that are not added up."""

    numbers: Array
    scale: Array


Kernels = tuple[Array, ...]


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def products(x: Array, kernels: Kernels, rank: int, recipe: str, dtype: Any, platform: str | None = None) -> Kernels:
    """x [..., inputs] times each kernel [inputs, outputs], in `dtype`; `rank`: how many dimensions inputs have.
    `platform`: of the one device that computes it; None: there are several, or any will do."""
    return forward(x, kernels, rank, recipe, dtype, platform)[0]


def forward(
    x: Array, kernels: Kernels, rank: int, recipe: str, dtype: Any, platform: str | None
) -> tuple[Kernels, Any]:
    outer, inputs = range(x.ndim - rank), range(rank)
    over = (range(len(outer), x.ndim), inputs)
    if recipe == "int8":
        whole = rounded(x, jnp.int8, over[0])
        return tuple(times(whole, rounded(each, jnp.int8, inputs), over, dtype) for each in kernels), (x, kernels)
    empty = empty_like(x), tuple(map(empty_like, kernels))  # for the shapes and dtypes that gradients must have
    if turnable(x.shape, [each.shape for each in kernels], rank, platform):
        numbers, turned = both_ways(as_matrix(x, len(outer)), FP8[0])
        ways = [both_ways(as_matrix(each, rank), FP8[0]) for each in kernels]
        found = [times(numbers, way[1], LAST, dtype) for way in ways]
        shapes = [(*x.shape[: len(outer)], *each.shape[rank:]) for each in kernels]
        kept = (turned, [way[0] for way in ways], *empty)
        return tuple(y.reshape(shape) for y, shape in zip(found, shapes, strict=True)), kept
    values, roughly = rounded(x, FP8[0]), [rounded(each, FP8[0]) for each in kernels]
    return tuple(times(values, each, over, dtype) for each in roughly), (values, roughly, *empty)


def backward(
    rank: int, recipe: str, dtype: Any, platform: str | None, kept: Any, gradients: Kernels
) -> tuple[Array, Kernels]:
    back = back_int8(rank, *kept) if recipe == "int8" else back_fp8(rank, platform, *kept)
    of_x, of_kernels = zip(*map(back, range(len(gradients)), gradients), strict=True)
    return sum(of_x[1:], of_x[0]), of_kernels


Back = Callable[[int, Array], tuple[Array, Array]]  # of a kernel's number and its gradient: that of x, and its own


def back_int8(rank: int, x: Array, kernels: Kernels) -> Back:
    outer = range(x.ndim - rank)

    def back(number: int, gradient: Array) -> tuple[Array, Array]:
        kernel, over = kernels[number], outputs_of(gradient, len(outer), rank)
        rough = rounded(gradient, jnp.int8, over[0]), rounded(kernel, jnp.int8, over[1])
        whole = contract(x, gradient.astype(x.dtype), (outer, outer), jnp.float32)
        return times(*rough, over, x.dtype), whole.astype(kernel.dtype)

    return back


def back_fp8(
    rank: int, platform: str | None, values: Rounded, kernels: list[Rounded], x: Array, empty: Kernels
) -> Back:
    x_shape, shapes = x.shape[1:], [each.shape[1:] for each in empty]
    outer = range(len(x_shape) - rank)
    turn = turnable(x_shape, shapes, rank, platform)

    def back(number: int, gradient: Array) -> tuple[Array, Array]:
        kernel, dtype = kernels[number], empty[number].dtype
        if turn:
            numbers, turned = both_ways(as_matrix(gradient, len(outer)), FP8[1])
            of_x = times(numbers, kernel, LAST, x.dtype).reshape(x_shape)
            return of_x, times(values, turned, LAST, dtype).reshape(shapes[number])
        numbers = rounded(gradient, FP8[1])
        of_x = times(numbers, kernel, outputs_of(gradient, len(outer), rank), x.dtype)
        return of_x, times(values, numbers, (outer, outer), dtype)

    return back


def outputs_of(gradient: Array, outer: int, rank: int) -> tuple[Sequence[int], Sequence[int]]:
    """Their dimensions in a product's gradient, and in its kernel."""
    return range(outer, gradient.ndim), range(rank, rank + gradient.ndim - outer)


products.defvjp(forward, backward)


def rounded(x: Array, dtype: Any, axes: Sequence[int] | None = None) -> Rounded:
    """With one scale, or one for all along `axes`."""
    scale = scale_of(x, dtype, axes)
    x = x.astype(jnp.float32) / (scale if axes is None else jnp.expand_dims(scale, tuple(axes)))
    return Rounded((jnp.round(x) if jnp.issubdtype(dtype, jnp.integer) else x).astype(dtype), scale)


def scale_of(x: Array, dtype: Any, axes: Sequence[int] | None = None) -> Array:
    """That brings the largest magnitude, of all or along `axes`, within the format."""
    integers = jnp.issubdtype(dtype, jnp.integer)
    largest = 127.0 if integers else float(jnp.finfo(dtype).max)
    # No dimensions of size one are kept: with them, the compiler for GPUs of jax 0.11.2 ended with an internal error.
    scale = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=axes if axes is None else tuple(axes)) / largest
    scale = scale if integers else power_of_two(scale)
    return jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1.0, scale)  # what is not a number stays so


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
    return jnp.zeros((0, *x.shape), x.dtype)


def as_matrix(x: Array, lines: int) -> Array:
    """With the first dimensions as lines, and the others as columns."""
    return x.reshape(math.prod(x.shape[:lines]), -1)


def turnable(x: tuple[int, ...], kernels: Sequence[tuple[int, ...]], rank: int, platform: str | None) -> bool:
    """Whether tensors of these shapes are turned with `both_ways`: it has whole tiles, and instructions of its own to
    round with, which NVIDIA's GPUs have from compute capability 8.9 on."""
    parts = [x[: len(x) - rank], *(part for each in kernels for part in (each[:rank], each[rank:]))]
    number = (gpu_capability() or "9.0").split(".")  # not known when compiling for a machine that is not here
    able = platform == "gpu" and all(map(str.isdigit, number)) and tuple(map(int, number)) >= (8, 9)
    whole = not any(math.prod(sizes) % TILE for sizes in parts)
    if platform == "gpu":
        say_once(f"tensors in fp8 are rounded by {'a kernel of ours' if able and whole else 'the compiler'}")
    return able and whole


def both_ways(x: Array, dtype: Any, interpret: bool = False) -> tuple[Rounded, Rounded]:
    """A matrix in eight bits, with one scale, and the same with lines and columns exchanged."""
    lines, columns = x.shape
    scale = scale_of(x, dtype)

    def turn(x: Any, factor: Any, numbers: Any, turned: Any) -> None:
        some = (x[...].astype(jnp.float32) * factor[0]).astype(dtype)
        numbers[...] = some
        turned[...] = some.T

    numbers, turned = pl.pallas_call(
        turn,
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape in ((lines, columns), (columns, lines))],
        grid=(lines // TILE, columns // TILE),
        in_specs=[pl.BlockSpec((TILE, TILE), lambda i, j: (i, j)), pl.BlockSpec((1,), lambda i, j: (0,))],
        out_specs=[pl.BlockSpec((TILE, TILE), lambda i, j: (i, j)), pl.BlockSpec((TILE, TILE), lambda i, j: (j, i))],
        compiler_params=triton.CompilerParams(num_warps=8),
        interpret=interpret,
        name="rounded_both_ways",
    )(x, 1 / scale.reshape(1))
    return Rounded(numbers, scale), Rounded(turned, scale)
