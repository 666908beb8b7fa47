"""Products in eight bits for training, forward and backward, with scales of the moment.

`fp8`: values as e4m3, gradients as e5m2, which reaches further; a scale for each token and one for the kernels that a
token is multiplied with, the least power of two that brings the largest magnitude within the format's own. (Kernels of
ours for GPUs have one scale for all tokens where it is known before, or found faster.) All three products of a kernel
are in eight bits, and what is kept for the backward pass is, too. Since a power of two changes no digit, a product is
written in its own dtype and scaled where it is read. The gradient of a kernel adds up over tokens: there the scales of
a token and of its gradient, relative to the largest of all tokens, are part of the gradient, which has the room for it.

`int8`: a scale for each row and each column, so that one large number does not flatten all others. The sum runs along
other dimensions in each product, so tensors are rounded anew for each; the gradient of the kernel, whose sum over all
tokens suffers most, stays in the dtype of the inputs.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from maxtext.kernels.fp8_blocks import Kernels, Values, back_alone, back_joined, forward_turned, rounded_rows, turnable
from maxtext.kernels.rounding import (
    FP8,
    Rounded,
    as_matrix,
    by_rows,
    contract,
    empty_like,
    relative,
    room,
    rounded,
    scale_of_all,
    scaled,
    total,
)  # fmt: skip

INT8_TILE = 16  # numbers that an int8 product adds up at a time


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
        flat, rows, _ = rounded_rows([as_matrix(x, len(outer))], FP8[0])
        sums, kept = forward_turned(flat, rows, [as_matrix(each, rank) for each in kernels], room(dtype))
        found = [scaled(each, rows * kept.scale, dtype) for each in sums]
        shapes = [(*x.shape[: len(outer)], *each.shape[rank:]) for each in kernels]
        return tuple(y.reshape(shape) for y, shape in zip(found, shapes, strict=True)), (kept, *empty)
    (numbers,), rows = by_rows([x], len(outer), FP8[0])
    scale = scale_of_all(kernels, FP8[0])
    rough = [(each.astype(jnp.float32) / scale).astype(FP8[0]) for each in kernels]
    found = [scaled(contract(numbers, each, over, room(dtype)), rows * scale, dtype) for each in rough]
    return tuple(found), (Values(numbers, rows, rough, scale), *empty)


def backward(
    rank: int, recipe: str, dtype: Any, platform: str | None, kept: Any, gradients: Kernels
) -> tuple[Array, Kernels]:
    if recipe == "int8":
        of_x, of_kernels = zip(*map(back_int8(rank, platform, *kept), range(len(gradients)), gradients), strict=True)
        return total(of_x), of_kernels
    values, x, kernels = kept
    outer, shape, shapes = x.ndim - 1 - rank, x.shape[1:], [each.shape[1:] for each in kernels]
    dtypes = [each.dtype for each in kernels]
    if turnable(shape, shapes, rank, platform):
        flat = [as_matrix(each, outer) for each in gradients]
        if sum(each.size for each in flat) <= math.prod(shape):
            # A pass more over the gradients finds one scale, and spares one over the result, which would scale it.
            whole, found = back_alone(values, flat, scale_of_all(flat, FP8[1]), room(x.dtype), dtypes)
        else:
            joined, rows, _ = rounded_rows(flat, FP8[1])
            whole, found = back_joined(values, joined, rows, room(x.dtype), dtypes)
            whole = scaled(whole, rows * values.scale, room(x.dtype))
        whole = whole.astype(x.dtype)
        return whole.reshape(shape), tuple(each.reshape(shape) for each, shape in zip(found, shapes, strict=True))
    numbers, rows = by_rows(gradients, outer, FP8[1])
    sums = [
        contract(each, kernel, outputs_of(each, outer, rank), room(x.dtype))
        for each, kernel in zip(numbers, values.kernels, strict=True)
    ]
    factor, most = relative(values.rows * rows)
    numbers = [scaled(each.astype(jnp.float32), factor, FP8[1]) for each in numbers]
    tokens = range(outer), range(outer)
    return scaled(total(sums), rows * values.scale, x.dtype), tuple(
        scaled(contract(values.x, each, tokens, room(dtype)), most, dtype)
        for each, dtype in zip(numbers, dtypes, strict=True)
    )


def back_int8(
    rank: int, platform: str | None, x: Array, kernels: Kernels
) -> Callable[[int, Array], tuple[Array, Array]]:
    """Of a kernel's number and the gradient of its product: that of x, and its own."""
    outer = range(x.ndim - rank)

    def back(number: int, gradient: Array) -> tuple[Array, Array]:
        kernel, over = kernels[number], outputs_of(gradient, len(outer), rank)
        whole = contract(x, gradient.astype(x.dtype), (outer, outer), jnp.float32).astype(kernel.dtype)
        if platform == "gpu":
            # As for the way forward, where the sum runs along a kernel's first dimension. Were it the last, XLA would
            # lay the kernel out so that the product is ten times slower.
            turned = jax.lax.optimization_barrier(as_matrix(kernel, rank).T)
            flat = rounded(as_matrix(gradient, len(outer)), jnp.int8, (1,)), rounded(turned, jnp.int8, (0,))
            return times(*flat, ((1,), (0,)), x.dtype).reshape(x.shape), whole
        rough = rounded(gradient, jnp.int8, over[0]), rounded(kernel, jnp.int8, over[1])
        return times(*rough, over, x.dtype), whole

    return back


products.defvjp(forward, backward)


def times(one: Rounded, other: Rounded, over: tuple[Sequence[int], Sequence[int]], dtype: Any) -> Array:
    """Integers, added up over dimensions of each, and scaled."""
    numbers = padded(one.numbers, over[0]), padded(other.numbers, over[1])
    sums = contract(*numbers, over, jnp.int32).astype(jnp.float32)
    left = one.scale.reshape(*one.scale.shape, *[1] * other.scale.ndim)
    return (sums * (left * other.scale)).astype(dtype)


def padded(x: Array, axes: Sequence[int]) -> Array:
    """With zeros, to a multiple of 16 numbers along `axes` together. Of other int8 products (seen: 6 x 33 x 5003),
    XLA's Triton GEMM of jax 0.11.2 on an H200 adds up what lies behind the last number."""
    missing = -x.shape[axes[-1]] % INT8_TILE
    if not missing or not math.prod(x.shape[axis] for axis in axes) % INT8_TILE:
        return x
    return jnp.pad(x, [(0, missing if axis == axes[-1] else 0) for axis in range(x.ndim)])


def outputs_of(gradient: Array, outer: int, rank: int) -> tuple[Sequence[int], Sequence[int]]:
    """Their dimensions in a product's gradient, and in its kernel."""
    return range(outer, gradient.ndim), range(rank, rank + gradient.ndim - outer)
