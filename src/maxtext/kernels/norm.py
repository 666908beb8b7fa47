"""RMS normalisation over the last dimension, in float32, with a gradient of its own.

Autodiff would keep the input, and the input divided by its size, in float32 for the backward pass. This keeps the input
as it came and one number a row.

Before a sub-layer, the input of a norm is also what the sub-layer's result is added to. `beside` gives both, so that
going back, the sum of their gradients is part of the norm's. On one NVIDIA GPU there are kernels by Triton, for both
directions, that read everything once (`normed_rows`, `normed_sums` with the sum before it, `back`), where the compiler
makes two passes.
"""

import functools
import math
import operator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from maxtext.kernels.rows import LONGEST, TILE, down_to_power, ours, parts, run_by_rows

ROWS = 64  # of a program that goes back, one after the other
AT_ONCE = 4096  # numbers that it has of a row, or of several


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


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def beside(
    x: Array, scale: Array | None, epsilon: float, dtype: Any, platform: str | None = None
) -> tuple[Array, Array]:
    """x, and `rms_norm` of it. `platform`: of the one device that computes it; None: there are several, or any."""
    return beside_forward(x, scale, epsilon, dtype, platform)[0]


def beside_forward(x: Array, scale: Array | None, epsilon: float, dtype: Any, platform: str | None) -> Any:
    if scale is not None and supports(x.shape, platform):
        y, inverse = normed_rows(x.reshape(-1, x.shape[-1]), scale, epsilon, dtype)
        return (x, y.reshape(x.shape)), (x, scale, inverse)
    y, kept = forward(x, scale, epsilon, dtype)
    return (x, y), kept


def beside_backward(epsilon: float, dtype: Any, platform: str | None, kept: Any, gradients: Any) -> Any:
    x, scale, inverse = kept
    added, gradient = gradients
    if scale is None or not supports(x.shape, platform):
        of_x, of_scale = backward(epsilon, dtype, kept, gradient)
        return added + of_x, of_scale
    rows, of_norm, of_rows = (each.reshape(-1, x.shape[-1]) for each in (x, gradient, added))
    of_x, of_scale, _ = back(rows, of_norm, of_rows, inverse.reshape(-1), scale)
    return of_x.reshape(x.shape), of_scale


beside.defvjp(beside_forward, beside_backward)


def supports(shape: tuple[int, ...], platform: str | None) -> bool:
    """Whether kernels do it for x of this shape."""
    lines, width = math.prod(shape[:-1]), shape[-1]
    able = lines % TILE == 0 and width % TILE == 0 and width <= LONGEST and lines * width < 2**31
    return ours(platform) and able


def normed_rows(x: Array, scale: Array, epsilon: float, dtype: Any, interpret: bool = False) -> tuple[Array, Array]:
    """`rms_norm` of x [T, C] with scale [C], and what it multiplied the rows with, [T]."""

    def program(x: Any, scale: Any, out: Any, inverse: Any) -> None:
        found = [x[:, part].astype(jnp.float32) for part in parts(x.shape[1])]
        write_normed(found, scale, epsilon, out, inverse)

    out = jax.ShapeDtypeStruct(x.shape, dtype)
    normed, inverse = run_by_rows(program, [x], [scale], [out], 1, interpret, "normed_rows")
    return normed, inverse


def normed_sums(
    x: Array, y: Array, factor: Array, scale: Array, epsilon: float, dtype: Any, interpret: bool = False
) -> tuple[Array, Array, Array]:
    """x [T, C] plus y [T, C] times factor [T], and `normed_rows` of that."""

    def program(x: Any, y: Any, factor: Any, scale: Any, total: Any, out: Any, inverse: Any) -> None:
        found = []
        for part in parts(x.shape[1]):
            more = y[:, part].astype(jnp.float32) * factor[...][:, None]
            each = (x[:, part].astype(jnp.float32) + more).astype(total.dtype)
            total[:, part] = each
            found.append(each.astype(jnp.float32))
        write_normed(found, scale, epsilon, out, inverse)

    outs = [jax.ShapeDtypeStruct(x.shape, each) for each in (x.dtype, dtype)]
    total, normed, inverse = run_by_rows(program, [x, y, factor], [scale], outs, 1, interpret, "normed_sums")
    return total, normed, inverse


def write_normed(found: list[Array], scale: Any, epsilon: float, out: Any, inverse: Any) -> None:
    """Some rows, in parts."""
    squares = functools.reduce(operator.add, [jnp.sum(jnp.square(part), axis=1) for part in found])
    factor = jax.lax.rsqrt(squares / out.shape[1] + epsilon)
    inverse[...] = factor
    for each, part in zip(found, parts(out.shape[1]), strict=True):
        out[:, part] = (each * factor[:, None] * scale[part].astype(jnp.float32)[None]).astype(out.dtype)


def back(
    x: Array, gradient: Array, added: Array, inverse: Array, scale: Array, factor: Array | None = None,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """The gradients of x [T, C] and scale [C] of `beside`: from that of the norm, times factor [T], and that of x as it
    is; inverse [T] is what the norm multiplied x with. And the largest magnitude of the first, in each row."""
    lines, width = x.shape
    places, some = parts(width), max(1, min(ROWS, AT_ONCE // down_to_power(width)))
    factors = [] if factor is None else [factor]

    def program(x: Any, gradient: Any, added: Any, inverse: Any, scale: Any, *refs: Any) -> None:
        *factors, of_x, of_scale, largest = refs

        def step(number: Any, sums: list[Array]) -> list[Array]:
            rows = pl.ds(number * some, some)
            by = inverse[rows][:, None]
            units = [x[rows, part].astype(jnp.float32) * by for part in places]
            found = [gradient[rows, part].astype(jnp.float32) for part in places]
            for each in factors:
                found = [part * each[rows][:, None] for part in found]
            scaled = [each * scale[part].astype(jnp.float32)[None] for each, part in zip(found, places, strict=True)]
            along = [jnp.sum(one * other, axis=1) for one, other in zip(scaled, units, strict=True)]
            mean = (functools.reduce(operator.add, along) / width)[:, None]
            tops = []
            for unit, of_unit, part in zip(units, scaled, places, strict=True):
                each = by * (of_unit - unit * mean) + added[rows, part].astype(jnp.float32)
                of_x[rows, part] = each.astype(of_x.dtype)
                tops.append(jnp.max(jnp.abs(each), axis=1))
            largest[rows] = functools.reduce(jnp.maximum, tops)
            return [total + jnp.sum(one * unit, axis=0) for total, one, unit in zip(sums, found, units, strict=True)]

        zeros = [jnp.zeros((part.size,), jnp.float32) for part in places]
        for total, part in zip(jax.lax.fori_loop(0, ROWS // some, step, zeros), places, strict=True):
            of_scale[0, part] = total

    matrix, rows = pl.BlockSpec((ROWS, width), lambda i: (i, 0)), pl.BlockSpec((ROWS,), lambda i: (i,))
    programs = lines // ROWS
    of_x, of_scale, largest = pl.pallas_call(
        program,
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((programs, width), jnp.float32),
            jax.ShapeDtypeStruct((lines,), jnp.float32),
        ],
        grid=(programs,),
        in_specs=[matrix] * 3 + [rows, pl.BlockSpec((width,), lambda i: (0,))] + [rows] * len(factors),
        out_specs=[matrix, pl.BlockSpec((1, width), lambda i: (i, 0)), rows],
        compiler_params=triton.CompilerParams(num_warps=min(16, max(4, down_to_power(some * width // 1024)))),
        interpret=interpret,
        name="norm_back",
    )(x, gradient, added, inverse, scale, *factors)  # fmt: skip
    return of_x, jnp.sum(of_scale, axis=0).astype(scale.dtype), largest
