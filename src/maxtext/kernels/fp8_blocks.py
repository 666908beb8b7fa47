"""Products in fp8 on one NVIDIA GPU, as `low_precision` has them, by kernels of `fp8_rows`; with the norm before them
(`normed_products`), and a whole feed-forward block with a gate (`gated`).

A sub-layer's input is also what its result is added to. So these give it back as it is: going back, its gradient is
added in the same pass as the norm's.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from maxtext.common.log import say_once
from maxtext.kernels import fp8_rows
from maxtext.kernels.fp8_rows import Activation
from maxtext.kernels.norm import back as norm_back
from maxtext.kernels.rounding import (
    FP8,
    as_matrix,
    by_rows,
    contract,
    empty_like,
    relative,
    room,
    scale_of_all,
    scaled,
    total,
)
from maxtext.kernels.rows import LONGEST, TILE, ours

LAST = ((1,), (1,))  # dimensions of two matrices
Kernels = tuple[Array, ...]


class Values(NamedTuple):
    """What a product in fp8 keeps of its inputs."""

    x: Array  # tokens, or [inputs, tokens]
    rows: Array  # the scales of tokens
    kernels: list[Array]
    scale: Array  # of all kernels


class Normed(NamedTuple):
    """What is kept of a norm before a product."""

    x: Array  # [tokens, inputs]
    scale: Array
    inverse: Array  # what the norm multiplied tokens with


def turnable(x: tuple[int, ...], kernels: Sequence[tuple[int, ...]], rank: int, platform: str | None) -> bool:
    """Whether tensors of these shapes are rounded and turned by `fp8_rows`: it has whole tiles, offsets of 32 bits, and
    instructions of its own to round with, which NVIDIA's GPUs have from compute capability 8.9 on."""
    lines, inputs = math.prod(x[: len(x) - rank]), math.prod(x[len(x) - rank :])
    outputs = [math.prod(each[rank:]) for each in kernels]
    whole = not any(size % TILE for size in (lines, inputs, *outputs))
    small = max(lines, inputs) * max(inputs, *outputs) < 2**31
    able = whole and small and ours(platform, (8, 9))
    if platform == "gpu":
        say_once(f"tensors in fp8 are rounded by {'kernels of ours' if able else 'the compiler'}")
    return able


def rounded_rows(matrices: Sequence[Array], dtype: Any) -> tuple[list[Array], Array]:
    """In fp8, with a scale for each row, which they share: by a kernel that reads them once, where they fit into it."""
    if sum(each.shape[1] for each in matrices) > LONGEST:
        return by_rows(matrices, 1, dtype)
    return fp8_rows.rounded_rows(matrices, dtype)


def forward_turned(numbers: Array, rows: Array, kernels: Sequence[Array], dtype: Any) -> tuple[list[Array], Values]:
    """Of matrices, by kernels for NVIDIA's GPUs; tokens, in fp8, come with their scales. Products are not scaled."""
    scale = scale_of_all(kernels)
    ways = [fp8_rows.both_ways(each, scale, FP8[0]) for each in kernels]
    kept = Values(fp8_rows.turned(numbers), rows, [way[0] for way in ways], scale)
    return [contract(numbers, way[1], LAST, dtype) for way in ways], kept


def back_turned(
    values: Values, numbers: Sequence[Array], rows: Array, dtype: Any, dtypes: Sequence[Any]
) -> tuple[Array, list[Array]]:
    """The gradients of tokens, not scaled, and of the kernels, in their dtypes, of `forward_turned`, from those of its
    results, which come with their scales."""
    sums = [contract(each, kernel, LAST, dtype) for each, kernel in zip(numbers, values.kernels, strict=True)]
    factor, most = relative(values.rows * rows)
    # Held together, as the compiler for GPUs would join products of the same tokens by a copy of what they differ in.
    ways = [jax.lax.optimization_barrier((values.x, fp8_rows.turned(each, factor))) for each in numbers]
    found = [contract(x, way, LAST, room(dtype)) for (x, way), dtype in zip(ways, dtypes, strict=True)]
    of_kernels = [scaled(each, most, dtype) for each, dtype in zip(found, dtypes, strict=True)]
    return total(sums), of_kernels


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def normed_products(x: Array, norm: Array, kernels: Kernels, epsilon: float, dtype: Any) -> tuple[Array, Kernels]:
    """x [..., E], and the products in fp8 of its norm by the root mean square, with scale `norm` [E], and each kernel
    [E, outputs]; on one NVIDIA GPU, for what is `turnable`."""
    return normed_forward(x, norm, kernels, epsilon, dtype)[0]


def normed_forward(x: Array, norm: Array, kernels: Kernels, epsilon: float, dtype: Any) -> tuple[Any, Any]:
    flat, empty = as_matrix(x, x.ndim - 1), tuple(map(empty_like, kernels))
    numbers, rows, inverse = fp8_rows.normed_rows(flat, norm, epsilon, FP8[0])
    sums, values = forward_turned(numbers, rows, [as_matrix(each, 1) for each in kernels], room(dtype))
    found = [scaled(each, rows * values.scale, dtype) for each in sums]
    shaped = tuple(y.reshape(*x.shape[:-1], *each.shape[1:]) for y, each in zip(found, kernels, strict=True))
    return (x, shaped), (values, Normed(flat, norm, inverse), empty)


def normed_backward(epsilon: float, dtype: Any, kept: Any, gradients: Any) -> tuple[Array, Array, Kernels]:
    values, normed, empty = kept
    added, of_products = gradients
    shapes, dtypes = [each.shape[1:] for each in empty], [each.dtype for each in empty]
    numbers, rows = rounded_rows([as_matrix(each, added.ndim - 1) for each in of_products], FP8[1])
    sums, found = back_turned(values, numbers, rows, room(added.dtype), dtypes)
    of_x, of_norm = back_normed(normed, sums, added, rows * values.scale)
    return of_x, of_norm, tuple(each.reshape(shape) for each, shape in zip(found, shapes, strict=True))


normed_products.defvjp(normed_forward, normed_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def gated(
    x: Array, norm: Array, kernels: Kernels, epsilon: float, activation: Activation, names: tuple[str, str], dtype: Any
) -> tuple[Array, Array]:
    """x [..., E], and what a feed-forward block in fp8 makes of its norm: (activation(x gate) · (x up)) down, with
    kernels [E, W], [E, W], [W, E]. As `normed_products`; all that lies between products is in the same pass as the
    rounding. `names`, for rematerialisation, of the products with gate and up, which are not scaled."""
    return gated_forward(x, norm, kernels, epsilon, activation, names, dtype)[0]


def gated_forward(
    x: Array, norm: Array, kernels: Kernels, epsilon: float, activation: Activation, names: tuple[str, str], dtype: Any
) -> tuple[Any, Any]:
    flat, empty = as_matrix(x, x.ndim - 1), tuple(map(empty_like, kernels))
    numbers, rows, inverse = fp8_rows.normed_rows(flat, norm, epsilon, FP8[0])
    sums, values = forward_turned(numbers, rows, kernels[:2], room(dtype))
    gate, up = (checkpoint_name(each, name) for each, name in zip(sums, names, strict=True))
    hidden, hidden_rows = fp8_rows.gated_rows(gate, up, rows * values.scale, activation, FP8[0])
    (y,), hidden_values = forward_turned(hidden, hidden_rows, kernels[2:], room(dtype))
    y = scaled(y, hidden_rows * hidden_values.scale, dtype).reshape(*x.shape[:-1], -1)
    return (x, y), (values, hidden_values, gate, up, Normed(flat, norm, inverse), empty)


def gated_backward(
    epsilon: float, activation: Activation, names: tuple[str, str], dtype: Any, kept: Any, gradients: Any
) -> tuple[Array, Array, Kernels]:
    values, hidden_values, gate, up, normed, empty = kept
    added, gradient = gradients
    dtypes = [each.dtype for each in empty]
    numbers, rows = rounded_rows([as_matrix(gradient, gradient.ndim - 1)], FP8[1])
    of_hidden, of_down = back_turned(hidden_values, numbers, rows, gate.dtype, dtypes[2:])
    numbers, both_rows = fp8_rows.gated_back(
        gate, up, of_hidden, values.rows * values.scale, rows * hidden_values.scale, activation, FP8[1]
    )
    sums, of_both = back_turned(values, numbers, both_rows, room(added.dtype), dtypes[:2])
    of_x, of_norm = back_normed(normed, sums, added, both_rows * values.scale)
    return of_x, of_norm, (*of_both, *of_down)


gated.defvjp(gated_forward, gated_backward)


def back_normed(normed: Normed, gradient: Array, added: Array, factor: Array) -> tuple[Array, Array]:
    """Of x, which is also `added` to something, and of the norm's scale, from that of the norm, times factor [T]."""
    flat = added.reshape(normed.x.shape)
    of_x, of_norm = norm_back(normed.x, gradient, flat, normed.inverse, normed.scale, factor)
    return of_x.reshape(added.shape), of_norm
