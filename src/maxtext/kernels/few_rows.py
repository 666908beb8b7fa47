"""Products of few rows with large kernels of int8, as generation has them: what counts is how fast kernels are read.

Pallas kernels for NVIDIA GPUs, by Triton. They read a kernel with the numbers that are added up side by side, [N, K].

A single row is made integers, too, so that a kernel's numbers need no conversion: each four neighbours share a power of
two, and each is a whole number of 15 bits of it, in two bytes (`fours`). That is exact for bfloat16 unless a neighbour
is 64 times as large, and then off by less than 1/8192 of that neighbour. A GPU has one instruction for the
sum of four products of bytes (dp4a). One program may multiply by several kernels.

Several rows are filled up to sixteen for tensor cores, where the kernel's numbers become floats in registers, by their
bits: a GPU is slow to convert integers. The sum is cut into spans that are added up outside.

Tiles are what was fastest on an H200; for floats the compiler's own products are as fast.

Shapes: M rows, K numbers that are added up, N columns.
"""

import functools
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

LEAST_ROWS = 16  # of a product on tensor cores: fewer are filled up
MOST_ROWS = 64  # with more, reading the kernel is no longer what takes the time
COLUMNS = 2  # of a tile for one row
LINES = 512  # of a tile for one row, twice as many for long sums; two tiles are read at a time
LONG = 8192
LEAST_LINES = 128  # four numbers for each thread of a warp
ROWS_COLUMNS, ROWS_LINES = 64, 128  # of a tile for several
SPANS = 8  # at most
BIAS = 2.0**23 + 128
BITS = 13  # by which a number of one row is moved: the largest of four becomes one of 14 bits
LEAST, MOST = BITS + 1, 254  # of the exponents of four numbers, so that all powers of two are ordinary numbers
# Four numbers of a kernel times the high bytes, then the low ones of x; one sum for four, times their power of two.
ADD_FOUR = """{ .reg .b32 sum, power; .reg .f32 value, scale;
dp4a.s32.s32 sum, $4, $5, 0; shl.b32 sum, sum, 8; dp4a.s32.s32 sum, $4, $6, sum; cvt.rn.f32.s32 value, sum;
shl.b32 power, $7, 23; mov.b32 scale, power; fma.rn.f32 $0, value, scale, $8;
mov.f32 $1, $9; mov.f32 $2, $10; mov.f32 $3, $11; }"""
# Four bytes n are made n + 128, and each the lowest byte of a float of 2^23.
UNPACK = "xor.b32 t, {0}, 0x80808080; " + " ".join(
    f"prmt.b32 {name}, t, 0x4B000000, 0x754{byte};" for byte, name in enumerate("abcd")
)


def supports(rows: int, depth: int, width: int, dtype: Any) -> bool:
    """Whether rows of `dtype` can be multiplied here, and faster than by the compiler."""
    columns, lines = (COLUMNS, 2 * LEAST_LINES) if rows == 1 else (ROWS_COLUMNS, ROWS_LINES)
    fits = depth % lines == 0 and width % columns == 0 and depth * width <= 2**31
    return fits and rows <= MOST_ROWS and jnp.dtype(dtype) == jnp.bfloat16


def products(x: Array, kernels: Sequence[Array], interpret: bool = False) -> list[Array]:
    """[M, N] in float32 for each kernel; x [M, K], kernels [N, K] of int8."""
    if x.shape[0] == 1:
        return [out[None] for out in of_one_row(x[0], kernels, interpret)]
    return [of_rows(x, kernel, interpret) for kernel in kernels]


def of_one_row(x: Array, kernels: Sequence[Array], interpret: bool) -> list[Array]:
    long = x.size >= LONG and x.size % (4 * LEAST_LINES) == 0
    lines = math.gcd(2 * LINES if long else LINES, x.size // 2)
    counts = [kernel.shape[0] // COLUMNS for kernel in kernels]
    firsts = [0, *accumulate(counts)]

    def place(number: int) -> Any:
        return lambda n: jnp.clip(n - firsts[number], 0, counts[number] - 1)

    places = [place(number) for number in range(len(kernels))]
    return pl.pallas_call(
        functools.partial(columns_of_one_row, firsts=firsts, lines=lines, interpret=interpret),
        grid=(firsts[-1],),
        in_specs=[
            pl.BlockSpec((x.size,), lambda n: (0,)),
            pl.BlockSpec((x.size,), lambda n: (0,)),
            pl.BlockSpec((x.size,), lambda n: (0,)),
            *(pl.BlockSpec((COLUMNS, x.size), lambda n, at=at: (at(n), 0)) for at in places),
        ],
        out_specs=[pl.BlockSpec((COLUMNS,), lambda n, at=at: (at(n),)) for at in places],
        out_shape=[jax.ShapeDtypeStruct(kernel.shape[:1], jnp.float32) for kernel in kernels],
        interpret=interpret,
        name="products_of_one_row",
        compiler_params=triton.CompilerParams(num_warps=2 if long else 1, num_stages=3),
    )(*fours(x), *kernels)


def fours(x: Array) -> tuple[Array, ...]:
    """x [K] as bytes [K]: high ones, low ones, and powers. x is (256 high + low) * 2^(power - 127) with the power of
    the first of its four neighbours, and the other three are zero. What is not finite makes a power of infinity."""
    apart = x.astype(jnp.float32).reshape(-1, 4)
    # No reduction, which would be a program of its own.
    largest = functools.reduce(jnp.maximum, [jnp.abs(apart[:, place : place + 1]) for place in range(4)])
    exponents = jax.lax.bitcast_convert_type(largest, jnp.int32) >> 23
    finite = exponents < 255
    exponents = jnp.clip(exponents, LEAST, MOST)
    scale = jax.lax.bitcast_convert_type((254 + BITS - exponents) << 23, jnp.float32)
    whole = jnp.round(jnp.where(finite, apart, 1) * scale).astype(jnp.int32)
    high = (whole + 128) >> 8
    powers = jnp.where(finite, exponents - BITS, 255)
    first = jax.lax.broadcasted_iota(jnp.int32, apart.shape, 1) == 0
    parts = high, whole - 256 * high, jnp.where(first, powers, 0)
    return tuple(part.astype(jnp.int8).reshape(-1) for part in parts)


def columns_of_one_row(
    high_ref: Any, low_ref: Any, power_ref: Any, *refs: Any, firsts: Sequence[int], lines: int, interpret: bool
) -> None:
    """Each program has columns of one kernel."""
    number = pl.program_id(0)
    steps = high_ref.shape[0] // lines // 2
    kernels, outs = refs[: len(refs) // 2], refs[len(refs) // 2 :]
    for kernel_ref, out_ref, first, end in zip(kernels, outs, firsts, firsts[1:], strict=False):

        def add(step: Array, total: Array, kernel_ref: Any = kernel_ref) -> Array:
            places = [pl.ds((2 * step + half) * lines, lines) for half in range(2)]
            tiles = [kernel_ref[:, at] for at in places]  # both on their way before the first is used
            for at, tile in zip(places, tiles, strict=True):
                total = add_fours(total, tile, high_ref[at], low_ref[at], power_ref[at], interpret)
            return total

        @pl.when((number >= first) & (number < end))
        def _(out_ref: Any = out_ref, add: Any = add) -> None:
            total = jax.lax.fori_loop(0, steps, add, jnp.zeros((COLUMNS, lines), jnp.float32))
            out_ref[...] = total.sum(axis=1)


def add_fours(total: Array, tile: Array, high: Array, low: Array, powers: Array, interpret: bool) -> Array:
    """total [COLUMNS, lines] with the sum of each four products added to the first of their places."""
    if interpret:
        whole = tile.astype(jnp.int32) * (high.astype(jnp.int32) * 256 + low.astype(jnp.int32))
        scale = jax.lax.bitcast_convert_type((powers.astype(jnp.int32) & 255)[::4] << 23, jnp.float32)
        sums = whole.reshape(len(tile), -1, 4).sum(axis=-1).astype(jnp.float32) * scale
        return total.at[:, ::4].add(sums)
    [total] = triton.elementwise_inline_asm(
        ADD_FOUR,
        args=[tile, *(jnp.broadcast_to(part[None], tile.shape) for part in (high, low, powers)), total],
        constraints="=f,=f,=f,=f,r,r,r,r,f,f,f,f",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(total.shape, jnp.float32)],
    )
    return total


def of_rows(x: Array, kernel: Array, interpret: bool) -> Array:
    (count, depth), width = x.shape, kernel.shape[0]
    rows = max(LEAST_ROWS, pl.next_power_of_2(count))
    spans = math.gcd(SPANS, depth // ROWS_LINES)
    sums = pl.pallas_call(
        functools.partial(span_of_rows, rows=rows, span=depth // spans, interpret=interpret),
        grid=(width // ROWS_COLUMNS, spans),
        in_specs=[
            pl.BlockSpec((count, depth), lambda n, s: (0, 0)),
            pl.BlockSpec((ROWS_COLUMNS, depth), lambda n, s: (n, 0)),
        ],
        out_specs=pl.BlockSpec((None, ROWS_COLUMNS, rows), lambda n, s: (s, n, 0)),
        out_shape=jax.ShapeDtypeStruct((spans, width, rows), jnp.float32),
        interpret=interpret,
        name="product_of_few_rows",
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
    )(x, kernel)
    return sums.sum(axis=0).T[:count]


def span_of_rows(x_ref: Any, kernel_ref: Any, out_ref: Any, *, rows: int, span: int, interpret: bool) -> None:
    first = pl.program_id(1) * span
    known = jnp.minimum(jnp.arange(rows), x_ref.shape[0] - 1)  # the last row stands for those that are not there

    def add(step: Array, total: Array) -> Array:
        at = pl.ds(first + step * ROWS_LINES, ROWS_LINES)
        x = x_ref[known, at]
        return total + triton.dot(floats(kernel_ref[:, at], interpret).astype(x.dtype), x, trans_b=True)

    zeros = jnp.zeros((ROWS_COLUMNS, rows), jnp.float32)
    out_ref[...] = jax.lax.fori_loop(0, span // ROWS_LINES, add, zeros)


def floats(integers: Array, interpret: bool) -> Array:
    """In float32."""
    if interpret:
        return integers.astype(jnp.float32)
    code = "{ .reg .b32 t, a, b, c, d; " + UNPACK.format("$4")
    code += " ".join(f"mov.b32 ${place}, {name};" for place, name in enumerate("abcd")) + " }"
    [biased] = triton.elementwise_inline_asm(
        code, args=[integers], constraints="=r,=r,=r,=r,r", pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(integers.shape, jnp.float32)],
    )  # fmt: skip
    return biased - BIAS
