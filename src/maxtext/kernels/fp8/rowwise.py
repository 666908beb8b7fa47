"""Row-wise quantizers and transposes for fp8, by Triton.

    quantize_rowwise          x_fp8 = x / scale,   scale [T] = amax scale of each row
    quantize_gated_rows       h_fp8 = act(gate) · up / scale
    gated_backward_rows       dgate_fp8 = dh · factor · up · act'(gate)
                              dup_fp8   = dh · factor · act(gate)
    transpose_fp8             x_fp8ᵀ
    quantize_and_transpose    x_fp8 and x_fp8ᵀ, with one given scale

Shapes: T rows, C columns, D/2 pairs of a head.

NVIDIA's fp8 matmuls contract the last dimension of both operands, and each tensor takes part in two
matmuls that contract different dimensions, so it is needed as it is and transposed. A row's scale
depends on that row alone: a program reads complete rows, computes their scales and writes fp8.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike

from maxtext.kernels.fp8.quantize import scale_from_amax
from maxtext.kernels.triton.rowwise import TILE, column_tiles, rowwise_call

Activation = Callable[[Array], Array]
IndexedTile = tuple[tuple[Any, ...], Array]  # a tile's index in the output, and its float32 values


def quantize_rowwise(
    matrices: Sequence[Array],
    dtype: DTypeLike,
    cos_sin: Sequence[Array] = (),
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """Matrices [T, C_i] concatenated in fp8 [T, sum C_i], the scales [T], and the sums of squares
    [T] of x / scale.

    With `cos_sin`, [T, D/2] each, the matrices are [T, H_i, 2, D/2], and the inverse RoPE is
    applied to all but the last: gradients of rotated queries and keys become those of the
    projections.
    """

    def program(*refs: Ref) -> None:
        inputs, angles, (out, scale, squares) = (
            refs[: len(matrices)],
            refs[len(matrices) : -3],
            refs[-3:],
        )
        cos, sin = (ref[...][:, None] for ref in angles) if angles else (None, None)
        tiles: list[IndexedTile] = []
        start = 0
        for x in inputs:
            for columns in column_tiles(x.shape[1]):
                target = pl.ds(start + columns.start, columns.size)
                if not angles:
                    tiles.append(((slice(None), target), x[:, columns].astype(jnp.float32)))
                    continue
                first, second = (x[:, columns, half].astype(jnp.float32) for half in range(2))
                if x is not inputs[-1]:
                    first, second = first * cos + second * sin, second * cos - first * sin
                tiles += [((slice(None), target, 0), first), ((slice(None), target, 1), second)]
            start += x.shape[1]
        scaled = write_quantized(tiles, out, scale)
        squares[...] = functools.reduce(operator.add, map(sum_squares, scaled))

    shape = (len(matrices[0]), sum(x.shape[1] for x in matrices), *matrices[0].shape[2:])
    x_fp8, scale, squares = rowwise_call(
        program,
        [*matrices, *cos_sin],
        [],
        [jax.ShapeDtypeStruct(shape, dtype)],
        2,
        interpret=interpret,
        name="fp8_quantize_rowwise",
    )
    return x_fp8.reshape(len(x_fp8), -1), scale, squares


def quantize_gated_rows(
    gate: Array, up: Array, activation: Activation, dtype: DTypeLike, interpret: bool = False
) -> tuple[Array, Array]:
    """activation(gate) · up, [T, C], in fp8, and its scales [T]."""

    def program(gate: Ref, up: Ref, out: Ref, scale: Ref) -> None:
        tiles: list[IndexedTile] = []
        for columns in column_tiles(gate.shape[1]):
            g, u = (ref[:, columns].astype(jnp.float32) for ref in (gate, up))
            tiles.append(((slice(None), columns), activation(g) * u))
        write_quantized(tiles, out, scale)

    out = jax.ShapeDtypeStruct(gate.shape, dtype)
    h_fp8, scale = rowwise_call(
        program, [gate, up], [], [out], 1, interpret=interpret, name="fp8_quantize_gated_rows"
    )
    return h_fp8, scale


def gated_backward_rows(
    gate: Array,
    up: Array,
    dh: Array,
    factor: Array,
    activation: Activation,
    dtype: DTypeLike,
    interpret: bool = False,
) -> list[Array]:
    """dgate and dup [T, C] in fp8 of h = activation(gate) · up, from dh times factor [T]."""

    def program(gate: Ref, up: Ref, dh: Ref, factor: Ref, dgate: Ref, dup: Ref) -> None:
        for columns in column_tiles(gate.shape[1]):
            g, u, d = (ref[:, columns].astype(jnp.float32) for ref in (gate, up, dh))
            active, slope = jax.jvp(activation, (g,), (jnp.ones_like(g),))
            d = d * factor[...][:, None]
            dgate[:, columns] = (d * u * slope).astype(dtype)
            dup[:, columns] = (d * active).astype(dtype)

    outs = [jax.ShapeDtypeStruct(gate.shape, dtype)] * 2
    return rowwise_call(
        program,
        [gate, up, dh, factor],
        [],
        outs,
        0,
        interpret=interpret,
        name="fp8_gated_backward_rows",
    )


def write_quantized(tiles: Sequence[IndexedTile], out: Ref, scale_ref: Ref) -> list[Array]:
    """In a kernel: write tiles in fp8 and the scales of their rows. Returns the tiles over their
    scale.
    """
    scale = scale_from_amax(
        functools.reduce(jnp.maximum, [amax(tile) for _, tile in tiles]), out.dtype
    )
    scale_ref[...] = scale
    scaled = [tile * (1 / scale).reshape(-1, *[1] * (tile.ndim - 1)) for _, tile in tiles]
    for (index, _), tile in zip(tiles, scaled, strict=True):
        out[index] = tile.astype(out.dtype)
    return scaled


def amax(rows: Array) -> Array:
    return jnp.max(jnp.abs(rows), axis=range(1, rows.ndim))


def sum_squares(rows: Array) -> Array:
    return jnp.sum(jnp.square(rows), axis=range(1, rows.ndim))


def transpose_fp8(x_fp8: Array, row_factor: Array | None = None, interpret: bool = False) -> Array:
    """x_fp8ᵀ [C, T] of x_fp8 [T, C]; if given, rows are multiplied by row_factor [T] and rounded
    first."""

    def program(x: Ref, *refs: Ref) -> None:
        *factors, out = refs
        tile = x[...]
        for factor in factors:
            tile = (tile.astype(jnp.float32) * factor[...][:, None]).astype(out.dtype)
        out[...] = tile.T

    factors = [] if row_factor is None else [row_factor]
    width = 2 * TILE if x_fp8.shape[1] % (2 * TILE) == 0 else TILE  # wider reads where C permits
    return pl.pallas_call(
        program,
        out_shape=jax.ShapeDtypeStruct(x_fp8.shape[::-1], x_fp8.dtype),
        grid=(x_fp8.shape[0] // TILE, x_fp8.shape[1] // width),
        in_specs=[
            pl.BlockSpec((TILE, width), lambda i, j: (i, j)),
            *[pl.BlockSpec((TILE,), lambda i, j: (i,))] * len(factors),
        ],
        out_specs=pl.BlockSpec((width, TILE), lambda i, j: (j, i)),
        compiler_params=triton.CompilerParams(num_warps=8),
        interpret=interpret,
        name="fp8_transpose",
    )(x_fp8, *factors)


def quantize_and_transpose(
    x: Array,
    scale: Array,
    dtype: DTypeLike,
    row_factor: Array | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """x [T, C] in fp8 with one given scale, and its transpose, as `transpose_fp8` returns it."""
    rows, columns = x.shape

    def program(x: Ref, inverse_scale: Ref, *refs: Ref) -> None:
        *factors, out, out_T = refs
        tile = (x[...].astype(jnp.float32) * inverse_scale[0]).astype(dtype)
        out[...] = tile
        for factor in factors:
            tile = (tile.astype(jnp.float32) * factor[...][:, None]).astype(dtype)
        out_T[...] = tile.T

    factors = [] if row_factor is None else [row_factor]
    x_fp8, x_fp8_T = pl.pallas_call(
        program,
        out_shape=[
            jax.ShapeDtypeStruct(shape, dtype) for shape in ((rows, columns), (columns, rows))
        ],
        grid=(rows // TILE, columns // TILE),
        in_specs=[
            pl.BlockSpec((TILE, TILE), lambda i, j: (i, j)),
            pl.BlockSpec((1,), lambda i, j: (0,)),
            *[pl.BlockSpec((TILE,), lambda i, j: (i,))] * len(factors),
        ],
        out_specs=[
            pl.BlockSpec((TILE, TILE), lambda i, j: (i, j)),
            pl.BlockSpec((TILE, TILE), lambda i, j: (j, i)),
        ],
        compiler_params=triton.CompilerParams(num_warps=8),
        interpret=interpret,
        name="fp8_quantize_and_transpose",
    )(x, 1 / scale.reshape(1), *factors)
    return x_fp8, x_fp8_T
