"""Rows rounded to eight bits, and turned, by kernels for NVIDIA GPUs, by Triton.

NVIDIA's products in fp8 add up along the last dimension of both operands, and each tensor is in two products that add
up along different ones. So it is needed as it is and with lines and columns exchanged. A row's scale depends on that
row only, so a program reads rows whole, finds their scales and writes them in eight bits: `rounded_rows`, with a norm
before it `normed_rows`, with the gate of a feed-forward block `gated_rows` and, going back, `gated_back`. `turned`
exchanges lines and columns of what they wrote; `both_ways` is for kernels, which have one scale.

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
from maxtext.kernels.rows import TILE, parts, program_size

Activation = Callable[[Array], Array]


def rounded_rows(matrices: Sequence[Array], dtype: Any, interpret: bool = False) -> tuple[list[Array], Array]:
    """Matrices [T, C], C of each its own, in eight bits; the scales [T] that their rows share."""

    def rows(*refs: Any) -> list[list[Array]]:
        return [[x[:, part].astype(jnp.float32) for part in parts(x.shape[1])] for x in refs]

    *numbers, scale = by_rows(rows, matrices, [], [x.shape[1] for x in matrices], dtype, interpret, "rounded_rows")
    return numbers, scale


def normed_rows(
    x: Array, scale: Array, epsilon: float, dtype: Any, interpret: bool = False
) -> tuple[Array, Array, Array]:
    """As `rms_norm` of x [T, C] with scale [C], in eight bits; the scales [T] of its rows, and what the norm
    multiplied them with."""

    def rows(x: Any, norm: Any, inverse: Any) -> list[list[Array]]:
        found = [x[:, part].astype(jnp.float32) for part in parts(x.shape[1])]
        squares = functools.reduce(operator.add, [jnp.sum(jnp.square(part), axis=1) for part in found])
        factor = jax.lax.rsqrt(squares / x.shape[1] + epsilon)
        inverse[...] = factor
        places = parts(x.shape[1])
        return [[each * factor[:, None] * norm[part][None] for each, part in zip(found, places, strict=True)]]

    width = x.shape[1]
    numbers, inverse, scale = by_rows(rows, [x], [], [width], dtype, interpret, "normed_rows", columns=[scale], more=1)
    return numbers, scale, inverse


def gated_rows(
    gate: Array, up: Array, factor: Array, activation: Activation, dtype: Any, interpret: bool = False
) -> tuple[Array, Array]:
    """activation(gate) · up [T, C] in eight bits, and its scales [T]; both are multiplied by factor [T] before."""

    def rows(gate: Any, up: Any, factor: Any) -> list[list[Array]]:
        places = parts(gate.shape[1])
        return [[activation(times(gate, part, factor)) * times(up, part, factor) for part in places]]

    numbers, scale = by_rows(rows, [gate, up], [factor], [gate.shape[1]], dtype, interpret, "gated_rows")
    return numbers, scale


def gated_back(
    gate: Array, up: Array, gradient: Array, factor: Array, back: Array, activation: Activation, dtype: Any,
    interpret: bool = False,
) -> tuple[list[Array], Array]:  # fmt: skip
    """The gradients of gate and up in eight bits, of one of `gated_rows` that is multiplied by back [T] before."""

    def rows(gate: Any, up: Any, gradient: Any, factor: Any, back: Any) -> list[list[Array]]:
        of_gate, of_up = [], []
        for part in parts(gate.shape[1]):
            g, d = times(gate, part, factor), times(gradient, part, back)
            active, slope = jax.jvp(activation, (g,), (jnp.ones_like(g),))
            of_gate.append(d * times(up, part, factor) * slope)
            of_up.append(d * active)
        return [of_gate, of_up]

    widths = [gate.shape[1]] * 2
    *numbers, scale = by_rows(rows, [gate, up, gradient], [factor, back], widths, dtype, interpret, "gated_back")
    return numbers, scale


def times(x: Any, part: Any, factor: Any) -> Array:
    return x[:, part].astype(jnp.float32) * factor[...][:, None]


def by_rows(
    rows: Callable[..., list[list[Array]]], matrices: Sequence[Array], factors: Sequence[Array], widths: Sequence[int],
    dtype: Any, interpret: bool, name: str, columns: Sequence[Array] = (), more: int = 0,
) -> list[Array]:  # fmt: skip
    """What `rows` makes of some rows of all matrices [T, C], in parts, in eight bits; and their scales [T], which those
    of a row share. It sees some of each of `factors` [T], all of `columns` [C], and writes to as many [T] as `more`
    says, which come before the scales."""
    lines, count = len(matrices[0]), len(matrices) + len(factors) + len(columns)
    longest = max(sum(widths), sum(x.shape[1] for x in matrices))
    some, warps = program_size(longest)

    def program(*refs: Any) -> None:
        ins, outs, others, scale_ref = refs[:count], refs[count : count + len(widths)], refs[-1 - more : -1], refs[-1]
        found = rows(*ins, *others)
        largest = [jnp.max(jnp.abs(part), axis=1) for row in found for part in row]
        scale = scale_for(functools.reduce(jnp.maximum, largest), dtype)
        scale_ref[...] = scale
        factor = (1 / scale)[:, None]
        for out, row in zip(outs, found, strict=True):
            for place, part in zip(parts(out.shape[1]), row, strict=True):
                out[:, place] = (part * factor).astype(dtype)

    def whole(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((some, width), lambda i: (i, 0))

    one = pl.BlockSpec((some,), lambda i: (i,))
    numbers = [jax.ShapeDtypeStruct((lines, width), dtype) for width in widths]
    return pl.pallas_call(
        program,
        out_shape=[*numbers, *[jax.ShapeDtypeStruct((lines,), jnp.float32)] * (more + 1)],
        grid=(lines // some,),
        in_specs=[
            *(whole(x.shape[1]) for x in matrices),
            *[one] * len(factors),
            *(pl.BlockSpec(x.shape, lambda i: (0,)) for x in columns),
        ],
        out_specs=[*map(whole, widths), *[one] * (more + 1)],
        compiler_params=triton.CompilerParams(num_warps=warps),
        interpret=interpret,
        name=name,
    )(*matrices, *factors, *columns)


def turned(numbers: Array, factor: Array | None = None, interpret: bool = False) -> Array:
    """[C, T] of [T, C] in eight bits; rows are multiplied by factor [T] before, and rounded again."""

    def turn(x: Any, *refs: Any) -> None:
        *factors, out = refs
        some = x[...]
        for each in factors:
            some = (some.astype(jnp.float32) * each[...][:, None]).astype(out.dtype)
        out[...] = some.T

    factors = [] if factor is None else [factor]
    tile = pl.BlockSpec((TILE, TILE), lambda i, j: (i, j))
    return pl.pallas_call(
        turn,
        out_shape=jax.ShapeDtypeStruct(numbers.shape[::-1], numbers.dtype),
        grid=(numbers.shape[0] // TILE, numbers.shape[1] // TILE),
        in_specs=[tile, *[pl.BlockSpec((TILE,), lambda i, j: (i,))] * len(factors)],
        out_specs=pl.BlockSpec((TILE, TILE), lambda i, j: (j, i)),
        compiler_params=triton.CompilerParams(num_warps=8),
        interpret=interpret,
        name="turned",
    )(numbers, *factors)


def both_ways(x: Array, scale: Array, dtype: Any, interpret: bool = False) -> tuple[Array, Array]:
    """A matrix in eight bits, with one scale, and the same with lines and columns exchanged."""
    lines, columns = x.shape

    def turn(x: Any, factor: Any, numbers: Any, turned: Any) -> None:
        some = (x[...].astype(jnp.float32) * factor[0]).astype(dtype)
        numbers[...] = some
        turned[...] = some.T

    numbers, exchanged = pl.pallas_call(
        turn,
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape in ((lines, columns), (columns, lines))],
        grid=(lines // TILE, columns // TILE),
        in_specs=[pl.BlockSpec((TILE, TILE), lambda i, j: (i, j)), pl.BlockSpec((1,), lambda i, j: (0,))],
        out_specs=[pl.BlockSpec((TILE, TILE), lambda i, j: (i, j)), pl.BlockSpec((TILE, TILE), lambda i, j: (j, i))],
        compiler_params=triton.CompilerParams(num_warps=8),
        interpret=interpret,
        name="rounded_both_ways",
    )(x, 1 / scale.reshape(1))
    return numbers, exchanged
