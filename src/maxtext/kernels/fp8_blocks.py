"""Products in fp8 on one NVIDIA GPU, as `low_precision` has them, by kernels of `fp8_rows`; with the norm before them
(`normed_products`), a whole feed-forward block with a gate (`gated`), the product after attention before that block
(`read_and_gated`), and a head with the loss after it (`scored`).

The input of a norm is also what a sub-layer's result is added to. So the first three give it, too: going back, its
gradient is added in the same pass as the norm's.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from maxtext.common.log import say_once
from maxtext.kernels import fp8_rows, loss_rows
from maxtext.kernels.fp8_rows import Activation
from maxtext.kernels.norm import back as norm_back
from maxtext.kernels.norm import normed_rows, normed_sums
from maxtext.kernels.rounding import (
    FP8,
    as_matrix,
    by_rows,
    contract,
    empty_like,
    relative,
    room,
    scale_for,
    scale_of_all,
    scaled,
    total,
)
from maxtext.kernels.rows import LONGEST, TILE, ours

LAST = ((1,), (1,))  # dimensions of two matrices
STEEPEST = 1.2  # any activation that the kernels know; and none is above 1 at 0
Kernels = tuple[Array, ...]
Angles = tuple[Array, ...]  # their cosines and sines, or nothing
Rotate = Callable[[Array, Array, Array], Array]


class Values(NamedTuple):
    """What a product in fp8 keeps of its inputs."""

    x: Array  # tokens, or [inputs, tokens]
    rows: Array  # the scales of tokens, or one of all
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
    small = max(lines, inputs) * max(inputs, sum(outputs)) < 2**31
    able = whole and small and ours(platform, (8, 9))
    if platform == "gpu":
        say_once(f"tensors in fp8 are rounded by {'kernels of ours' if able else 'the compiler'}")
    return able


def rounded_rows(matrices: Sequence[Array], dtype: Any) -> tuple[Array, Array, Array]:
    """Side by side in fp8, with a scale for each row, and its sum of squares in fp8: by a kernel that reads them once,
    where they fit into it."""
    if sum(each.shape[1] for each in matrices) > LONGEST:
        found, scale = by_rows(matrices, 1, dtype)
        numbers = jnp.concatenate(found, axis=1)
        return numbers, scale, jnp.sum(jnp.square(numbers.astype(jnp.float32)), axis=1)
    return fp8_rows.rounded_rows(matrices, dtype)


def forward_turned(numbers: Array, rows: Array, kernels: Sequence[Array], dtype: Any) -> tuple[list[Array], Values]:
    """Of matrices, by kernels for NVIDIA's GPUs; tokens, in fp8, come with their scales, or one for all. Products are
    scaled if it is one."""
    scale = scale_of_all(kernels, FP8[0])
    ways = [fp8_rows.both_ways(each, scale, FP8[0]) for each in kernels]
    kept = Values(fp8_rows.turned(numbers), rows, [way[0] for way in ways], scale)
    return [contract(numbers, way[1], LAST, dtype, alone(rows * scale)) for way in ways], kept


def back_turned(
    values: Values, numbers: Sequence[Array], rows: Array, dtype: Any, dtypes: Sequence[Any],
    turned: Sequence[Array] | None = None,
) -> tuple[Array, list[Array]]:  # fmt: skip
    """The gradients of tokens, scaled if that is by one number, and of the kernels, in their dtypes, of
    `forward_turned`, from those of its results, which come with their scales, or one for all; and, where that is done,
    `turned`."""
    pairs, one = zip(numbers, values.kernels, strict=True), alone(rows * values.scale)
    sums = [contract(each, kernel, LAST, dtype, one) for each, kernel in pairs]
    factor, most = relative(values.rows * rows)
    turned = turned or [fp8_rows.turned(each, factor) for each in numbers]
    # Held together, as the compiler for GPUs would join products of the same tokens by a copy of what they differ in.
    ways = [jax.lax.optimization_barrier((values.x, each)) for each in turned]
    found = [contract(x, way, LAST, room(dtype), most) for (x, way), dtype in zip(ways, dtypes, strict=True)]
    return total(sums), [each.astype(dtype) for each, dtype in zip(found, dtypes, strict=True)]


def back_joined(
    values: Values, numbers: Array, rows: Array, dtype: Any, dtypes: Sequence[Any]
) -> tuple[Array, list[Array]]:
    """`back_turned`, from gradients that lie side by side: one product for all."""
    widths = np.cumsum([each.shape[1] for each in values.kernels])[:-1]
    values = values._replace(kernels=[jnp.concatenate(values.kernels, axis=1)])
    whole, [found] = back_turned(values, [numbers], rows, dtype, dtypes[:1])
    # Each is a part of another value: else the compiler for GPUs joins what reads them, as the updates of the kernels,
    # in one pass, which does not write in place, and copies what it wrote.
    wholes = [found]
    for _ in widths:
        wholes.append(jax.lax.optimization_barrier(wholes[-1]))
    places = zip(wholes, (0, *widths), (*widths, None), dtypes, strict=True)
    return whole, [each[:, start:end].astype(dtype) for each, start, end, dtype in places]


def back_alone(
    values: Values, gradients: Sequence[Array], scale: Array, dtype: Any, dtypes: Sequence[Any]
) -> tuple[Array, list[Array]]:
    """`back_turned`, with one scale for all gradients."""
    factor, _ = relative(values.rows)
    numbers, turned = zip(*(fp8_rows.both_ways(each, scale, FP8[1], factor) for each in gradients), strict=True)
    return back_turned(values, numbers, scale, dtype, dtypes, turned)


def alone(scale: Array) -> Array | None:
    """A scale, if it is one."""
    return scale if scale.ndim == 0 else None


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def normed_products(
    x: Array, norm: Array, kernels: Kernels, angles: Angles, rotate: Rotate | None, epsilon: float, dtype: Any
) -> tuple[Array, Kernels]:
    """x [..., E], and the products in fp8 of its norm by the root mean square, with scale `norm` [E], and each kernel
    [E, outputs]; on one NVIDIA GPU, for what is `turnable`. With `angles`, their cosines and sines [..., 1, pairs], all
    but the last of the products are rotated: by `rotate`, and going back in the pass that rounds their gradients."""
    return normed_forward(x, norm, kernels, angles, rotate, epsilon, dtype)[0]


def normed_forward(
    x: Array, norm: Array, kernels: Kernels, angles: Angles, rotate: Rotate | None, epsilon: float, dtype: Any
) -> tuple[Any, Any]:
    numbers, scale, kept = normed(x, norm, epsilon)
    found, values = forward_turned(numbers, scale, [as_matrix(each, 1) for each in kernels], room(dtype))
    shapes = [(*x.shape[:-1], *each.shape[1:]) for each in kernels]
    shaped = [y.astype(dtype).reshape(shape) for y, shape in zip(found, shapes, strict=True)]
    if rotate is not None:
        shaped[:-1] = [rotate(each, *angles) for each in shaped[:-1]]
    return (x, tuple(shaped)), (values, kept, angles, tuple(map(empty_like, kernels)))


def normed(x: Array, norm: Array, epsilon: float) -> tuple[Array, Array, Normed]:
    """In fp8, with one scale: no number of a row is larger than the root of their sum of squares, which a norm makes
    the same for all rows."""
    flat, scale = as_matrix(x, x.ndim - 1), scale_of_normed(norm)
    numbers, inverse = normed_rows(flat, norm.astype(jnp.float32) / scale, epsilon, FP8[0])
    return numbers, scale, Normed(flat, norm, inverse)


def scale_of_normed(norm: Array) -> Array:
    return scale_for(math.sqrt(len(norm)) * jnp.max(jnp.abs(norm.astype(jnp.float32))), FP8[0])


def normed_backward(
    rotate: Rotate | None, epsilon: float, dtype: Any, kept: Any, gradients: Any
) -> tuple[Array, Array, Kernels, None]:
    values, normed, angles, empty = kept
    added, of_products = gradients
    shapes, dtypes = [each.shape[1:] for each in empty], [each.dtype for each in empty]
    lines, outer = len(normed.x), added.ndim - 1
    if rotate is None:
        numbers, rows, _ = rounded_rows([as_matrix(each, outer) for each in of_products], FP8[1])
    else:
        pairs = [each.reshape(lines, each.shape[-2], 2, -1) for each in of_products]
        numbers, rows, _ = fp8_rows.rounded_rows(pairs, FP8[1], [each.reshape(lines, -1) for each in angles])
    sums, found = back_joined(values, numbers, rows, room(added.dtype), dtypes)
    of_x, of_norm, _ = back_normed(normed, sums, added, rows * values.scale)
    return of_x, of_norm, tuple(each.reshape(shape) for each, shape in zip(found, shapes, strict=True)), None


normed_products.defvjp(normed_forward, normed_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def gated(
    x: Array, norm: Array, kernels: Kernels, epsilon: float, activation: Activation, names: tuple[str, str], dtype: Any
) -> tuple[Array, Array]:
    """x [..., E], and what a feed-forward block in fp8 makes of its norm: (activation(x gate) · (x up)) down, with
    kernels [E, W], [E, W], [W, E]. As `normed_products`; all that lies between products is in the same pass as the
    rounding. `names`, for rematerialisation, of the products with gate and up."""
    return gated_forward(x, norm, kernels, epsilon, activation, names, dtype)[0]


def gated_forward(
    x: Array, norm: Array, kernels: Kernels, epsilon: float, activation: Activation, names: tuple[str, str], dtype: Any
) -> tuple[Any, Any]:
    y, kept = fed_forward(*normed(x, norm, epsilon), kernels, activation, names, dtype)
    return (x, y.reshape(x.shape)), kept


def fed_forward(
    numbers: Array, scale: Array, kept: Normed, kernels: Kernels, activation: Activation, names: tuple[str, ...],
    dtype: Any,
) -> tuple[Array, Any]:  # fmt: skip
    found, values = forward_turned(numbers, scale, kernels[:2], room(dtype))
    gate, up = (checkpoint_name(each, name) for each, name in zip(found, names, strict=True))
    hidden, rows = fp8_rows.gated_rows(gate, up, activation, FP8[0])
    (y,), hidden_values = forward_turned(hidden, rows, kernels[2:], room(dtype))
    y = scaled(y, rows * hidden_values.scale, dtype)
    return y, (values, hidden_values, gate, up, kept, tuple(map(empty_like, kernels)))


def gated_backward(
    epsilon: float, activation: Activation, names: tuple[str, str], dtype: Any, kept: Any, gradients: Any
) -> tuple[Array, Array, Kernels]:
    of_x, of_norm, of_kernels, _ = fed_backward(activation, kept, gradients)
    return of_x, of_norm, of_kernels


gated.defvjp(gated_forward, gated_backward)


def fed_backward(activation: Activation, kept: Any, gradients: Any) -> tuple[Array, Array, Kernels, Array]:
    """Of x, the norm and the kernels; and the largest magnitude of the first, of each token."""
    values, hidden_values, gate, up, normed, empty = kept
    added, gradient = gradients
    dtypes = [each.dtype for each in empty]
    numbers, rows, squares = rounded_rows([as_matrix(gradient, gradient.ndim - 1)], FP8[1])
    of_hidden, of_down = back_turned(hidden_values, [numbers], rows, gate.dtype, dtypes[2:])
    reach = reach_of_gates(values, hidden_values, jnp.sqrt(squares))
    of_gates = fp8_rows.gated_back(gate, up, of_hidden, 1 / reach, activation, FP8[1])
    rows = rows * hidden_values.scale * reach
    sums, of_both = back_turned(values, of_gates, rows, room(added.dtype), dtypes[:2])
    of_x, of_norm, largest = back_normed(normed, sums, added, rows * values.scale)
    return of_x, of_norm, (*of_both, *of_down), largest


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8))
def read_and_gated(
    x: Array, mixed: Array, out: Array, norm: Array, kernels: Kernels, epsilon: float, activation: Activation,
    names: tuple[str, str, str], dtype: Any,
) -> tuple[Array, Array]:  # fmt: skip
    """x [..., E] plus `mixed` [..., inputs] times `out` [inputs, E], in fp8, and `gated` of that: so the sum is in the
    same pass as the norm, and the scale of its gradient, one for all tokens, is found with it. The first of `names` is
    of the product with `out`, which is not scaled."""
    return read_forward(x, mixed, out, norm, kernels, epsilon, activation, names, dtype)[0]


def read_forward(
    x: Array, mixed: Array, out: Array, norm: Array, kernels: Kernels, epsilon: float, activation: Activation,
    names: tuple[str, str, str], dtype: Any,
) -> tuple[Any, Any]:  # fmt: skip
    outer = x.ndim - 1
    numbers, rows, _ = rounded_rows([as_matrix(mixed, outer)], FP8[0])
    (read,), read_values = forward_turned(numbers, rows, [as_matrix(out, out.ndim - 1)], room(dtype))
    read, scale = checkpoint_name(read, names[0]), scale_of_normed(norm)
    factor, factors = rows * read_values.scale, norm.astype(jnp.float32) / scale
    sums, numbers, inverse = normed_sums(as_matrix(x, outer), read, factor, factors, epsilon, FP8[0])
    y, kept = fed_forward(numbers, scale, Normed(sums, norm, inverse), kernels, activation, names[1:], dtype)
    return (sums.reshape(x.shape), y.reshape(x.shape)), (read_values, kept, empty_like(mixed), empty_like(out))


def read_backward(
    epsilon: float, activation: Activation, names: tuple[str, str, str], dtype: Any, kept: Any, gradients: Any
) -> tuple[Array, Array, Array, Array, Kernels]:
    read_values, fed, mixed, out = kept
    of_x, of_norm, of_kernels, largest = fed_backward(activation, fed, gradients)
    flat, scale = as_matrix(of_x, of_x.ndim - 1), scale_for(jnp.max(largest), FP8[1])
    of_mixed, [of_out] = back_alone(read_values, [flat], scale, room(mixed.dtype), [out.dtype])
    of_mixed = of_mixed.astype(mixed.dtype).reshape(mixed.shape[1:])
    return of_x, of_mixed, of_out.reshape(out.shape[1:]), of_norm, of_kernels


read_and_gated.defvjp(read_forward, read_backward)


def reach_of_gates(values: Values, hidden_values: Values, lengths: Array) -> Array:
    """Scales [T] for the gradients of gate and up, not scaled, from `lengths` [T] of those of the block's result in
    fp8. They are known before the gradients, as a product is not larger than the lengths of what is multiplied. They
    may be some thousand times too large: that leaves e5m2 eighteen powers of two in which it has as many digits."""
    largest = float(jnp.finfo(FP8[0]).max)
    up = largest * values.rows * largest * values.scale * math.sqrt(len(values.kernels[0]))  # or gate, at most
    down = jnp.sqrt(jnp.max(jnp.sum(jnp.square(hidden_values.kernels[0].astype(jnp.float32)), axis=1)))
    # Rounding may have made what is multiplied, and the products, a quarter larger.
    return scale_for(1.25 * lengths * down * (1 + STEEPEST * up), FP8[1])


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def scored(x: Array, kernel: Array, targets: Array, dtype: Any) -> tuple[Array, Array]:
    """`cross_entropy` of logits in fp8: x [..., E] times kernel [E, V], in `dtype`, targets [...]. The scales of their
    gradients are known before, as no probability is above one, and they are rounded in the pass that computes them."""
    return scored_forward(x, kernel, targets, dtype)[0]


def scored_forward(x: Array, kernel: Array, targets: Array, dtype: Any) -> tuple[Any, Any]:
    numbers, rows, _ = rounded_rows([as_matrix(x, x.ndim - 1)], FP8[0])
    (logits,), values = forward_turned(numbers, rows, [kernel], room(dtype))
    flat = targets.reshape(-1)
    largest, logarithm, chosen = loss_rows.sums(logits, flat, rows * values.scale)
    found = logarithm - chosen, logarithm + largest
    kept = values, logits, flat, largest, logarithm, empty_like(x), empty_like(kernel)
    return tuple(each.reshape(targets.shape) for each in found), kept


def scored_backward(dtype: Any, kept: Any, gradients: tuple[Array, Array]) -> tuple[Array, Array, None]:
    values, logits, targets, largest, logarithm, x, kernel = kept
    of_loss, of_partition = (each.reshape(-1) for each in gradients)
    rows = scale_for(jnp.abs(of_loss) + jnp.abs(of_partition), FP8[1])
    of_each = -of_loss / rows, (of_loss + of_partition) / rows
    factor = values.rows * values.scale
    numbers = loss_rows.back(logits, targets, largest, logarithm, *of_each, FP8[1], factor)
    whole, (of_kernel,) = back_turned(values, [numbers], rows, room(x.dtype), [kernel.dtype])
    return scaled(whole, rows * values.scale, x.dtype).reshape(x.shape[1:]), of_kernel, None


scored.defvjp(scored_forward, scored_backward)


def back_normed(normed: Normed, gradient: Array, added: Array, factor: Array) -> tuple[Array, Array, Array]:
    """Of x, which is also `added` to something, and of the norm's scale, from that of the norm, times factor [T]; and
    the largest magnitudes [T] of the first."""
    flat = added.reshape(normed.x.shape)
    of_x, of_norm, largest = norm_back(normed.x, gradient, flat, normed.inverse, normed.scale, factor)
    return of_x.reshape(added.shape), of_norm, largest
