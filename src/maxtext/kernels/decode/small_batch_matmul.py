"""bfloat16 x int8 matmuls with few rows, as in decoding, where time is spent on reading the
weights. Pallas kernels for NVIDIA GPUs, lowered by Triton.

    y = x w,   x [M, K] bfloat16,   w_T [N, K] int8,   y [M, N] float32

Shapes: M rows, K inputs, N outputs. Weights are transposed, so that the contracted dimension is
contiguous.

One row is converted to integers, so that weights need no conversion: four neighbours share a power
of two, and each is a 15-bit multiple of it, in two bytes (`split_bytes`). That is exact for
bfloat16 unless a neighbour is 64 times as large, and then the error is less than 1/8192 of that
neighbour. dp4a sums four byte products in one instruction. One kernel may multiply by several
weights.

Several rows are padded to sixteen for tensor cores. Weights are converted to floats in registers by
bit operations, since GPUs convert integers slowly. The contraction is split into spans (split-K),
whose sums are added outside of the kernel.

Tile sizes are the fastest on an H200; for float weights XLA's matmuls are as fast.
"""

import functools
import math
from collections.abc import Callable, Sequence
from itertools import accumulate

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike

MIN_ROWS = 16  # of a tensor core matmul: fewer are padded
MAX_ROWS = 64  # with more, reading the weights no longer dominates
COLUMNS = 2  # of a tile for one row
DEPTH = 512  # of a tile for one row, twice as much from LONG_DEPTH on; two tiles are read at a time
LONG_DEPTH = 8192
MIN_DEPTH = 128  # four values for each thread of a warp
ROWS_COLUMNS, ROWS_DEPTH = 64, 128  # of a tile for several rows
MAX_SPANS = 8
BIAS = 2.0**23 + 128
SHIFT = 13  # binary shift of the values of one row: the largest of four gets 14 bits
MIN_EXPONENT, MAX_EXPONENT = SHIFT + 1, 254  # of four values, so that all scales are normal
# Four weights times the high bytes, then the low bytes of x; their sum times their power of two.
DP4A = """{ .reg .b32 sum, power; .reg .f32 value, scale;
dp4a.s32.s32 sum, $4, $5, 0; shl.b32 sum, sum, 8; dp4a.s32.s32 sum, $4, $6, sum;
cvt.rn.f32.s32 value, sum;
shl.b32 power, $7, 23; mov.b32 scale, power; fma.rn.f32 $0, value, scale, $8;
mov.f32 $1, $9; mov.f32 $2, $10; mov.f32 $3, $11; }"""
# Four bytes n become n + 128, each the lowest byte of a float 2^23 + n + 128.
UNPACK = "xor.b32 t, {0}, 0x80808080; " + " ".join(
    f"prmt.b32 {name}, t, 0x4B000000, 0x754{byte};" for byte, name in enumerate("abcd")
)


def supports(rows: int, depth: int, columns: int, dtype: DTypeLike) -> bool:
    """Whether the kernels support the shape, and are faster than XLA's matmul."""
    block_columns, block_depth = (
        (COLUMNS, 2 * MIN_DEPTH) if rows == 1 else (ROWS_COLUMNS, ROWS_DEPTH)
    )
    aligned = depth % block_depth == 0 and columns % block_columns == 0
    return (
        aligned
        and depth * columns <= 2**31
        and rows <= MAX_ROWS
        and jnp.dtype(dtype) == jnp.bfloat16
    )


def small_batch_matmul(
    x: Array, weights_T: Sequence[Array], interpret: bool = False
) -> list[Array]:
    """[M, N] in float32 for each weight; x [M, K], weights_T [N, K] of int8."""
    if x.shape[0] == 1:
        return [out[None] for out in gemv_int8(x[0], weights_T, interpret)]
    return [matmul_rows(x, weight_T, interpret) for weight_T in weights_T]


def gemv_int8(x: Array, weights_T: Sequence[Array], interpret: bool) -> list[Array]:
    long = x.size >= LONG_DEPTH and x.size % (4 * MIN_DEPTH) == 0
    block_depth = math.gcd(2 * DEPTH if long else DEPTH, x.size // 2)
    counts = [weight_T.shape[0] // COLUMNS for weight_T in weights_T]
    firsts = [0, *accumulate(counts)]

    def block_index(weight: int) -> Callable:
        return lambda n: jnp.clip(n - firsts[weight], 0, counts[weight] - 1)

    indices = [block_index(weight) for weight in range(len(weights_T))]
    return pl.pallas_call(
        functools.partial(
            gemv_program, firsts=firsts, block_depth=block_depth, interpret=interpret
        ),
        grid=(firsts[-1],),
        in_specs=[
            pl.BlockSpec((x.size,), lambda n: (0,)),
            pl.BlockSpec((x.size,), lambda n: (0,)),
            pl.BlockSpec((x.size,), lambda n: (0,)),
            *(
                pl.BlockSpec((COLUMNS, x.size), lambda n, index=index: (index(n), 0))
                for index in indices
            ),
        ],
        out_specs=[
            pl.BlockSpec((COLUMNS,), lambda n, index=index: (index(n),)) for index in indices
        ],
        out_shape=[jax.ShapeDtypeStruct(weight_T.shape[:1], jnp.float32) for weight_T in weights_T],
        interpret=interpret,
        name="decode_gemv_int8",
        compiler_params=triton.CompilerParams(num_warps=2 if long else 1, num_stages=3),
    )(*split_bytes(x), *weights_T)


def split_bytes(x: Array) -> tuple[Array, ...]:
    """x [K] as int8 arrays [K]: high bytes, low bytes and exponents. x is (256 high + low) *
    2^(exponent - 127), with the exponent of the first of four neighbours; the other three are zero.
    Infinity and NaN have the exponent of infinity."""
    quads = x.astype(jnp.float32).reshape(-1, 4)
    # Not a reduction, which would be a kernel of its own.
    largest = functools.reduce(jnp.maximum, [jnp.abs(quads[:, i : i + 1]) for i in range(4)])
    exponents = jax.lax.bitcast_convert_type(largest, jnp.int32) >> 23
    finite = exponents < 255
    exponents = jnp.clip(exponents, MIN_EXPONENT, MAX_EXPONENT)
    scale = jax.lax.bitcast_convert_type((254 + SHIFT - exponents) << 23, jnp.float32)
    integers = jnp.round(jnp.where(finite, quads, 1) * scale).astype(jnp.int32)
    high = (integers + 128) >> 8
    powers = jnp.where(finite, exponents - SHIFT, 255)
    first = jax.lax.broadcasted_iota(jnp.int32, quads.shape, 1) == 0
    parts = high, integers - 256 * high, jnp.where(first, powers, 0)
    return tuple(part.astype(jnp.int8).reshape(-1) for part in parts)


def gemv_program(
    high_ref: Ref,
    low_ref: Ref,
    power_ref: Ref,
    *refs: Ref,
    firsts: Sequence[int],
    block_depth: int,
    interpret: bool,
) -> None:
    """Each program computes columns of one weight."""
    program = pl.program_id(0)
    steps = high_ref.shape[0] // block_depth // 2
    weights_T, outs = refs[: len(refs) // 2], refs[len(refs) // 2 :]
    for weight_ref, out_ref, first, end in zip(weights_T, outs, firsts, firsts[1:], strict=False):

        def add(step: Array, total: Array, weight_ref: Ref = weight_ref) -> Array:
            spans = [pl.ds((2 * step + half) * block_depth, block_depth) for half in range(2)]
            # Both loads are issued before the first is used.
            tiles = [weight_ref[:, at] for at in spans]
            for at, tile in zip(spans, tiles, strict=True):
                total = add_dp4a(total, tile, high_ref[at], low_ref[at], power_ref[at], interpret)
            return total

        @pl.when((program >= first) & (program < end))
        def _(out_ref: Ref = out_ref, add: Callable = add) -> None:
            total = jax.lax.fori_loop(0, steps, add, jnp.zeros((COLUMNS, block_depth), jnp.float32))
            out_ref[...] = total.sum(axis=1)


def add_dp4a(
    total: Array, tile: Array, high: Array, low: Array, powers: Array, interpret: bool
) -> Array:
    """total [COLUMNS, block_depth] plus the sum of every four products, at the first of the
    four.
    """
    if interpret:
        products = tile.astype(jnp.int32) * (high.astype(jnp.int32) * 256 + low.astype(jnp.int32))
        scale = jax.lax.bitcast_convert_type(
            (powers.astype(jnp.int32) & 255)[::4] << 23, jnp.float32
        )
        sums = products.reshape(len(tile), -1, 4).sum(axis=-1).astype(jnp.float32) * scale
        return total.at[:, ::4].add(sums)
    [total] = triton.elementwise_inline_asm(
        DP4A,
        args=[
            tile,
            *(jnp.broadcast_to(part[None], tile.shape) for part in (high, low, powers)),
            total,
        ],
        constraints="=f,=f,=f,=f,r,r,r,r,f,f,f,f",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(total.shape, jnp.float32)],
    )
    return total


def matmul_rows(x: Array, weight_T: Array, interpret: bool) -> Array:
    (num_rows, depth), num_columns = x.shape, weight_T.shape[0]
    padded_rows = max(MIN_ROWS, pl.next_power_of_2(num_rows))
    spans = math.gcd(MAX_SPANS, depth // ROWS_DEPTH)
    sums = pl.pallas_call(
        functools.partial(
            matmul_program, padded_rows=padded_rows, span=depth // spans, interpret=interpret
        ),
        grid=(num_columns // ROWS_COLUMNS, spans),
        in_specs=[
            pl.BlockSpec((num_rows, depth), lambda n, s: (0, 0)),
            pl.BlockSpec((ROWS_COLUMNS, depth), lambda n, s: (n, 0)),
        ],
        out_specs=pl.BlockSpec((None, ROWS_COLUMNS, padded_rows), lambda n, s: (s, n, 0)),
        out_shape=jax.ShapeDtypeStruct((spans, num_columns, padded_rows), jnp.float32),
        interpret=interpret,
        name="decode_matmul_int8",
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
    )(x, weight_T)
    return sums.sum(axis=0).T[:num_rows]


def matmul_program(
    x_ref: Ref,
    weight_ref: Ref,
    out_ref: Ref,
    *,
    padded_rows: int,
    span: int,
    interpret: bool,
) -> None:
    first = pl.program_id(1) * span
    row = jnp.minimum(jnp.arange(padded_rows), x_ref.shape[0] - 1)  # the last row is repeated

    def add(step: Array, total: Array) -> Array:
        at = pl.ds(first + step * ROWS_DEPTH, ROWS_DEPTH)
        x = x_ref[row, at]
        return total + triton.dot(
            to_floats(weight_ref[:, at], interpret).astype(x.dtype), x, trans_b=True
        )

    zeros = jnp.zeros((ROWS_COLUMNS, padded_rows), jnp.float32)
    out_ref[...] = jax.lax.fori_loop(0, span // ROWS_DEPTH, add, zeros)


def to_floats(integers: Array, interpret: bool) -> Array:
    """int8 to float32, by bit operations."""
    if interpret:
        return integers.astype(jnp.float32)
    code = "{ .reg .b32 t, a, b, c, d; " + UNPACK.format("$4")
    code += " ".join(f"mov.b32 ${operand}, {name};" for operand, name in enumerate("abcd")) + " }"
    [biased] = triton.elementwise_inline_asm(
        code,
        args=[integers],
        constraints="=r,=r,=r,=r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(integers.shape, jnp.float32)],
    )
    return biased - BIAS
