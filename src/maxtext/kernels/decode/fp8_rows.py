"""Rows quantized to fp8 for the matmuls of a decode step with several sequences. Pallas kernels for
NVIDIA GPUs, lowered by Triton.

    quantize_rows         x
    norm_quantize_rows    rms_norm(x) · (norm_scale + offset)
    gate_quantize_rows    act(gate) · up,   [gate, up] = y · row_scale · column_scale

Shapes: M rows, K columns.

A row is ≈ qvalue · scale, with one scale, as in `fp8/quantize.py`. XLA launches up to three kernels
for each of these, and computes amax again where a product is multiplied by the scale. Here a
program reads a complete row and keeps it in registers. Values are computed in float32 and rounded
to the dtype of x or y before they are quantized, as if they were written.
"""

import functools
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from maxtext.kernels.fp8.quantize import E4M3, QuantizedTensor, scale_from_amax
from maxtext.kernels.triton.rowwise import column_tiles, floor_power_of_two

COLUMNS_PER_WARP = 256  # of a row: one load of 16 bytes for each thread
MAX_WARPS = 16
Tiles = list[Array]  # a row in float32, in tiles of powers of two


def quantize_rows(x: Array, interpret: bool = False) -> QuantizedTensor:
    """qvalue [M, K] and scale [M] of x [M, K]."""

    def read(x: Ref) -> Tiles:
        return [x[columns].astype(jnp.float32) for columns in column_tiles(x.shape[0])]

    return rows_call(read, [x], [], x, interpret, "fp8_quantize_rows")


def norm_quantize_rows(
    x: Array, norm_scale: Array, epsilon: float, offset: float = 0.0, interpret: bool = False
) -> QuantizedTensor:
    """qvalue [M, K] and scale [M] of the RMS norm of x [M, K], times norm_scale [K] + offset."""

    def read(x: Ref, norm_scale: Ref) -> Tiles:
        all_columns = column_tiles(x.shape[0])
        tiles = [x[columns].astype(jnp.float32) for columns in all_columns]
        factors = [norm_scale[columns].astype(jnp.float32) + offset for columns in all_columns]
        squares = functools.reduce(operator.add, [jnp.sum(tile * tile) for tile in tiles])
        inverse_rms = jax.lax.rsqrt(squares / x.shape[0] + epsilon)
        return [tile * inverse_rms * factor for tile, factor in zip(tiles, factors, strict=True)]

    return rows_call(read, [x], [norm_scale], x, interpret, "fp8_norm_quantize_rows")


def gate_quantize_rows(
    y: Array,
    row_scale: Array,
    column_scale: Array,
    activation: Callable[[Array], Array],
    interpret: bool = False,
) -> QuantizedTensor:
    """qvalue [M, K] and scale [M] of activation(gate) · up, of products y [M, 2 K], the gate first,
    times row_scale [M] and column_scale [2 K]."""
    num_columns = y.shape[1] // 2

    def read(y: Ref, row_scale: Ref, column_scale: Ref) -> Tiles:
        def scaled(columns: pl.Slice, start: int) -> Array:
            at = pl.ds(start + columns.start, columns.size)
            product = y[at].astype(jnp.float32) * row_scale[...] * column_scale[at]
            return product.astype(y.dtype).astype(jnp.float32)

        return [
            activation(scaled(columns, 0)) * scaled(columns, num_columns)
            for columns in column_tiles(num_columns)
        ]

    out = jax.ShapeDtypeStruct((len(y), num_columns), y.dtype)
    return rows_call(read, [y, row_scale], [column_scale], out, interpret, "fp8_gate_quantize_rows")


def rows_call(
    read: Callable[..., Tiles],
    arrays: Sequence[Array],
    vectors: Sequence[Array],
    out: Array | jax.ShapeDtypeStruct,
    interpret: bool,
    name: str,
) -> QuantizedTensor:
    """The rows `read(*row_refs, *vector_refs)` [K], rounded to the dtype of `out` [M, K] and
    quantized. `arrays` are [M] or [M, columns]; a program reads one row of each and all `vectors`.
    """

    def program(*refs: Ref) -> None:
        *inputs, qvalue_ref, scale_ref = refs
        tiles = [tile.astype(out.dtype).astype(jnp.float32) for tile in read(*inputs)]
        amax = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(tile)) for tile in tiles])
        scale = scale_from_amax(amax, E4M3)
        scale_ref[...] = scale
        inverse_scale = 1 / scale
        for tile, columns in zip(tiles, column_tiles(out.shape[1]), strict=True):
            qvalue_ref[columns] = (tile * inverse_scale).astype(E4M3)

    def row_of(array: Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
        rest = array.shape[1:]
        return pl.BlockSpec((None, *rest), lambda i: (i, *[0] * len(rest)))

    num_rows, num_columns = out.shape
    num_warps = floor_power_of_two(min(MAX_WARPS, num_columns // COLUMNS_PER_WARP))
    outs = [jax.ShapeDtypeStruct(out.shape, E4M3), jax.ShapeDtypeStruct((num_rows,), jnp.float32)]
    qvalue, scale = pl.pallas_call(
        program,
        grid=(num_rows,),
        in_specs=[
            *map(row_of, arrays),
            *(pl.BlockSpec(vector.shape, lambda i: (0,)) for vector in vectors),
        ],
        out_specs=[*map(row_of, outs)],
        out_shape=outs,
        compiler_params=triton.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name=name,
    )(*arrays, *vectors)
    return QuantizedTensor(qvalue, scale)
