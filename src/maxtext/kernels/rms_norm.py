"""RMS norm over the last dimension, in float32, with a custom backward pass.

    n = x · inverse_rms · scale,   inverse_rms = 1 / √(mean(x²) + epsilon)

`rms_norm` saves the input in its own dtype and one float32 for each row. Autodiff would save the
input and its normalised copy in float32.

`rms_norm_rows`, `add_rms_norm_rows` and `rms_norm_rows_backward` are Triton kernels over rows, each
of which reads its inputs once.

Shapes: T rows, C columns.
"""

import functools
import operator
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike

from maxtext.common.types import Tree
from maxtext.kernels.triton.rowwise import column_tiles, floor_power_of_two, rowwise_call

BACKWARD_ROWS = 64  # rows of a backward program, which sums their dscale, block by block
BACKWARD_ELEMENTS = 4096  # elements of a block of rows


def rms_norm_rows(
    x: Array, scale: Array, epsilon: float, dtype: DTypeLike, interpret: bool = False
) -> tuple[Array, Array]:
    """n [T, C] in `dtype` of x [T, C] and scale [C], and inverse_rms [T]."""

    def program(x: Ref, scale: Ref, out: Ref, inverse_rms: Ref) -> None:
        tiles = [x[:, columns].astype(jnp.float32) for columns in column_tiles(x.shape[1])]
        write_normed(tiles, scale, epsilon, out, inverse_rms)

    out = jax.ShapeDtypeStruct(x.shape, dtype)
    normed, inverse_rms = rowwise_call(
        program, [x], [scale], [out], 1, interpret=interpret, name="rms_norm_rows"
    )
    return normed, inverse_rms


def add_rms_norm_rows(
    x: Array,
    y: Array,
    row_factor: Array,
    scale: Array,
    epsilon: float,
    dtype: DTypeLike,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """x + y · row_factor, all [T, C] but row_factor [T], and `rms_norm_rows` of the sum."""

    def program(
        x: Ref, y: Ref, row_factor: Ref, scale: Ref, total: Ref, out: Ref, inverse_rms: Ref
    ) -> None:
        tiles = []
        for columns in column_tiles(x.shape[1]):
            added = y[:, columns].astype(jnp.float32) * row_factor[...][:, None]
            tile = (x[:, columns].astype(jnp.float32) + added).astype(total.dtype)
            total[:, columns] = tile
            tiles.append(tile.astype(jnp.float32))
        write_normed(tiles, scale, epsilon, out, inverse_rms)

    outs = [jax.ShapeDtypeStruct(x.shape, out_dtype) for out_dtype in (x.dtype, dtype)]
    total, normed, inverse_rms = rowwise_call(
        program, [x, y, row_factor], [scale], outs, 1, interpret=interpret, name="add_rms_norm_rows"
    )
    return total, normed, inverse_rms


def write_normed(
    tiles: list[Array], scale: Ref, epsilon: float, out: Ref, inverse_rms: Ref
) -> None:
    """In a kernel: write the norm of rows, given as tiles."""
    squares = functools.reduce(operator.add, [jnp.sum(jnp.square(tile), axis=1) for tile in tiles])
    factor = jax.lax.rsqrt(squares / out.shape[1] + epsilon)
    inverse_rms[...] = factor
    for tile, columns in zip(tiles, column_tiles(out.shape[1]), strict=True):
        out[:, columns] = (
            tile * factor[:, None] * scale[columns].astype(jnp.float32)[None]
        ).astype(out.dtype)


def rms_norm_rows_backward(
    x: Array,
    dn: Array,
    dresidual: Array,
    inverse_rms: Array,
    scale: Array,
    row_factor: Array | None = None,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """dx [T, C] of the norm plus `dresidual` [T, C], dscale [C], and amax(|dx|) [T]; dn is
    multiplied by row_factor [T].
    """
    num_rows, num_columns = x.shape
    tiles = column_tiles(num_columns)
    block_rows = max(1, min(BACKWARD_ROWS, BACKWARD_ELEMENTS // floor_power_of_two(num_columns)))
    factors = [] if row_factor is None else [row_factor]

    def program(x: Ref, dn: Ref, dresidual: Ref, inverse_rms: Ref, scale: Ref, *refs: Ref) -> None:
        *factors, dx, dscale, amax = refs

        def step(block: Array, dscales: list[Array]) -> list[Array]:
            rows = pl.ds(block * block_rows, block_rows)
            inverse = inverse_rms[rows][:, None]
            units = [x[rows, columns].astype(jnp.float32) * inverse for columns in tiles]
            dns = [dn[rows, columns].astype(jnp.float32) for columns in tiles]
            for factor in factors:
                dns = [tile * factor[rows][:, None] for tile in dns]
            dunits = [
                tile * scale[columns].astype(jnp.float32)[None]
                for tile, columns in zip(dns, tiles, strict=True)
            ]
            dots = [
                jnp.sum(dunit * unit, axis=1) for dunit, unit in zip(dunits, units, strict=True)
            ]
            mean = (functools.reduce(operator.add, dots) / num_columns)[:, None]
            maxima = []
            for unit, dunit, columns in zip(units, dunits, tiles, strict=True):
                tile = inverse * (dunit - unit * mean) + dresidual[rows, columns].astype(
                    jnp.float32
                )
                dx[rows, columns] = tile.astype(dx.dtype)
                maxima.append(jnp.max(jnp.abs(tile), axis=1))
            amax[rows] = functools.reduce(jnp.maximum, maxima)
            return [
                total + jnp.sum(tile * unit, axis=0)
                for total, tile, unit in zip(dscales, dns, units, strict=True)
            ]

        zeros = [jnp.zeros((columns.size,), jnp.float32) for columns in tiles]
        totals = jax.lax.fori_loop(0, BACKWARD_ROWS // block_rows, step, zeros)
        for total, columns in zip(totals, tiles, strict=True):
            dscale[0, columns] = total

    matrix = pl.BlockSpec((BACKWARD_ROWS, num_columns), lambda i: (i, 0))
    vector = pl.BlockSpec((BACKWARD_ROWS,), lambda i: (i,))
    programs = num_rows // BACKWARD_ROWS
    num_warps = min(16, max(4, floor_power_of_two(block_rows * num_columns // 1024)))
    dx, dscale, amax = pl.pallas_call(
        program,
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((programs, num_columns), jnp.float32),
            jax.ShapeDtypeStruct((num_rows,), jnp.float32),
        ],
        grid=(programs,),
        in_specs=[matrix] * 3
        + [vector, pl.BlockSpec((num_columns,), lambda i: (0,))]
        + [vector] * len(factors),
        out_specs=[matrix, pl.BlockSpec((1, num_columns), lambda i: (i, 0)), vector],
        compiler_params=triton.CompilerParams(num_warps=num_warps),
        interpret=interpret,
        name="rms_norm_rows_backward",
    )(x, dn, dresidual, inverse_rms, scale, *factors)
    return dx, jnp.sum(dscale, axis=0).astype(scale.dtype), amax


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def rms_norm(x: Array, scale: Array | None, epsilon: float, dtype: DTypeLike) -> Array:
    """x [..., E] / √(mean(x²) + epsilon) · scale, in `dtype`. scale: [E], or of x [..., H, E] also
    [H, E], a scale for each head."""
    return forward(x, scale, epsilon, dtype)[0]


def forward(x: Array, scale: Array | None, epsilon: float, dtype: DTypeLike) -> tuple[Array, Tree]:
    x32 = x.astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + epsilon)
    return apply_scale(x32 * inverse_rms, scale).astype(dtype), (x, scale, inverse_rms)


def backward(
    epsilon: float, dtype: DTypeLike, residuals: Tree, dy: Array
) -> tuple[Array, Array | None]:
    x, scale, inverse_rms = residuals
    unit = x.astype(jnp.float32) * inverse_rms
    dy = dy.astype(jnp.float32)
    dunit = apply_scale(dy, scale)
    dx = inverse_rms * (dunit - unit * jnp.mean(dunit * unit, axis=-1, keepdims=True))
    dscale = (
        None
        if scale is None
        else jnp.sum(dy * unit, axis=tuple(range(x.ndim - scale.ndim))).astype(scale.dtype)
    )
    return dx.astype(x.dtype), dscale


rms_norm.defvjp(forward, backward)


def apply_scale(x: Array, scale: Array | None) -> Array:
    return x if scale is None else x * scale.astype(jnp.float32)
