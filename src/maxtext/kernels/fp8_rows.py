"""Rows rounded to eight bits, and turned, by kernels for NVIDIA GPUs, by Triton.

NVIDIA's products in fp8 add up along the last dimension of both operands, and each tensor is in two products that add
up along different ones. So it is needed as it is and with lines and columns exchanged. A row's scale depends on that
row only, so a program reads rows whole, finds their scales and writes them in eight bits: `rounded_rows`, with the gate
of a feed-forward block `gated_rows`. `gated_back`, of the gradients of a gate, need not find them. `turned` exchanges
lines and columns of what they wrote; `both_ways` is for what has one scale.

Shapes: T rows, C columns.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from maxtext.kernels.rounding import scale_for
from maxtext.kernels.rows import TILE, parts, run_by_rows

Activation = Callable[[Array], Array]
Part = tuple[tuple[Any, ...], Array]  # of some rows: its place, and its numbers


def rounded_rows(
    matrices: Sequence[Array], dtype: Any, angles: Sequence[Array] = (), interpret: bool = False
) -> tuple[Array, Array, Array]:
    """Matrices [T, C], C of each its own, side by side in eight bits; the scales [T] of rows, and the sums of squares
    [T] of what was rounded. With `angles`, their cosines and sines [T, pairs], matrices are [T, heads, 2, pairs], and
    all but the last are rotated back by them before."""

    def program(*refs: Any) -> None:
        ins, around, (out, scale, squares) = refs[: len(matrices)], refs[len(matrices) : -3], refs[-3:]
        cos, sin = (each[...][:, None] for each in around) if around else (None, None)
        found: list[Part] = []
        start = 0
        for x in ins:
            for part in parts(x.shape[1]):
                place = pl.ds(start + part.start, part.size)
                if not around:
                    found.append(((slice(None), place), x[:, part].astype(jnp.float32)))
                    continue
                one, other = (x[:, part, side].astype(jnp.float32) for side in range(2))
                if x is not ins[-1]:
                    one, other = one * cos + other * sin, other * cos - one * sin
                found += [((slice(None), place, 0), one), ((slice(None), place, 1), other)]
            start += x.shape[1]
        numbers = write(found, out, scale)
        squares[...] = functools.reduce(operator.add, map(square, numbers))

    out = jax.ShapeDtypeStruct((len(matrices[0]), sum(x.shape[1] for x in matrices), *matrices[0].shape[2:]), dtype)
    numbers, scale, squares = run_by_rows(program, [*matrices, *angles], [], [out], 2, interpret, "rounded_rows")
    return numbers.reshape(len(numbers), -1), scale, squares


def gated_rows(
    gate: Array, up: Array, activation: Activation, dtype: Any, interpret: bool = False
) -> tuple[Array, Array]:
    """activation(gate) · up [T, C] in eight bits, and its scales [T]."""

    def program(gate: Any, up: Any, numbers: Any, scale: Any) -> None:
        found: list[Part] = []
        for part in parts(gate.shape[1]):
            g, u = (each[:, part].astype(jnp.float32) for each in (gate, up))
            found.append(((slice(None), part), activation(g) * u))
        write(found, numbers, scale)

    out = jax.ShapeDtypeStruct(gate.shape, dtype)
    numbers, scale = run_by_rows(program, [gate, up], [], [out], 1, interpret, "gated_rows")
    return numbers, scale


def gated_back(
    gate: Array, up: Array, gradient: Array, factor: Array, activation: Activation, dtype: Any, interpret: bool = False
) -> list[Array]:
    """The gradients of gate and up in eight bits, of one of `gated_rows` that is multiplied by factor [T] before."""

    def program(gate: Any, up: Any, gradient: Any, factor: Any, of_gate: Any, of_up: Any) -> None:
        for part in parts(gate.shape[1]):
            g, u, d = (each[:, part].astype(jnp.float32) for each in (gate, up, gradient))
            active, slope = jax.jvp(activation, (g,), (jnp.ones_like(g),))
            d = d * factor[...][:, None]
            of_gate[:, part] = (d * u * slope).astype(dtype)
            of_up[:, part] = (d * active).astype(dtype)

    outs = [jax.ShapeDtypeStruct(gate.shape, dtype)] * 2
    return run_by_rows(program, [gate, up, gradient, factor], [], outs, 0, interpret, "gated_back")


def write(found: Sequence[Part], out: Any, scale_ref: Any) -> list[Array]:
    """Some rows in eight bits, and their scales; gives the parts, scaled, and not rounded."""
    scale = scale_for(functools.reduce(jnp.maximum, [largest(part) for _, part in found]), out.dtype)
    scale_ref[...] = scale
    scaled = [part * (1 / scale).reshape(-1, *[1] * (part.ndim - 1)) for _, part in found]
    for (place, _), part in zip(found, scaled, strict=True):
        out[place] = part.astype(out.dtype)
    return scaled


def largest(rows: Array) -> Array:
    return jnp.max(jnp.abs(rows), axis=range(1, rows.ndim))


def square(rows: Array) -> Array:
    return jnp.sum(jnp.square(rows), axis=range(1, rows.ndim))


def turned(numbers: Array, factor: Array | None = None, interpret: bool = False) -> Array:
    """[C, T] of [T, C] in eight bits; rows are multiplied by factor [T] before, and rounded again."""

    def turn(x: Any, *refs: Any) -> None:
        *factors, out = refs
        some = x[...]
        for each in factors:
            some = (some.astype(jnp.float32) * each[...][:, None]).astype(out.dtype)
        out[...] = some.T

    factors = [] if factor is None else [factor]
    wide = 2 * TILE if numbers.shape[1] % (2 * TILE) == 0 else TILE  # columns at once: longer reads
    return pl.pallas_call(
        turn,
        out_shape=jax.ShapeDtypeStruct(numbers.shape[::-1], numbers.dtype),
        grid=(numbers.shape[0] // TILE, numbers.shape[1] // wide),
        in_specs=[
            pl.BlockSpec((TILE, wide), lambda i, j: (i, j)), *[pl.BlockSpec((TILE,), lambda i, j: (i,))] * len(factors)
        ],
        out_specs=pl.BlockSpec((wide, TILE), lambda i, j: (j, i)),
        compiler_params=triton.CompilerParams(num_warps=8),
        interpret=interpret,
        name="turned",
    )(numbers, *factors)  # fmt: skip


def both_ways(
    x: Array, scale: Array, dtype: Any, factor: Array | None = None, interpret: bool = False
) -> tuple[Array, Array]:
    """A matrix in eight bits, with one scale, and as `turned` gives it."""
    lines, columns = x.shape

    def turn(x: Any, by: Any, *refs: Any) -> None:
        *factors, numbers, turned = refs
        some = (x[...].astype(jnp.float32) * by[0]).astype(dtype)
        numbers[...] = some
        for each in factors:
            some = (some.astype(jnp.float32) * each[...][:, None]).astype(dtype)
        turned[...] = some.T

    factors = [] if factor is None else [factor]
    numbers, exchanged = pl.pallas_call(
        turn,
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape in ((lines, columns), (columns, lines))],
        grid=(lines // TILE, columns // TILE),
        in_specs=[
            pl.BlockSpec((TILE, TILE), lambda i, j: (i, j)),
            pl.BlockSpec((1,), lambda i, j: (0,)),
            *[pl.BlockSpec((TILE,), lambda i, j: (i,))] * len(factors),
        ],
        out_specs=[pl.BlockSpec((TILE, TILE), lambda i, j: (i, j)), pl.BlockSpec((TILE, TILE), lambda i, j: (j, i))],
        compiler_params=triton.CompilerParams(num_warps=8),
        interpret=interpret,
        name="rounded_both_ways",
    )(x, 1 / scale.reshape(1), *factors)
    return numbers, exchanged
