"""Products of few rows with large kernels of int8, as generation has them: what counts is how fast kernels are read.

Pallas kernels for NVIDIA GPUs, by Triton. They read a kernel with the numbers that are added up side by side, [N, K].
Integers become floats in registers, by their bits: a GPU is slow to convert integers. A single row is multiplied
without tensor cores, for one or more kernels in one program; several rows are filled up to sixteen for tensor cores,
and the sum is cut into spans that are added up outside. Tiles are what was fastest on an H200; for floats the
compiler's own products are as fast.

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
COLUMNS, LINES = 4, 512  # of a tile for one row; two tiles are read at a time
ROWS_COLUMNS, ROWS_LINES = 64, 128  # of a tile for several
SPANS = 8  # at most
BIAS = 2.0**23 + 128
# Four bytes n are made n + 128, and each the lowest byte of a float of 2^23.
UNPACK = "xor.b32 t, {0}, 0x80808080; " + " ".join(
    f"prmt.b32 {name}, t, 0x4B000000, 0x754{byte};" for byte, name in enumerate("abcd")
)


def supports(rows: int, depth: int, width: int, dtype: Any) -> bool:
    """Whether rows of `dtype` can be multiplied here, and faster than by the compiler."""
    columns, lines = (COLUMNS, 2 * LEAST_ROWS) if rows == 1 else (ROWS_COLUMNS, ROWS_LINES)
    fits = depth % lines == 0 and width % columns == 0 and depth * width <= 2**31
    return fits and rows <= MOST_ROWS and jnp.dtype(dtype) == jnp.bfloat16


def products(x: Array, kernels: Sequence[Array], interpret: bool = False) -> list[Array]:
    """[M, N] in float32 for each kernel; x [M, K], kernels [N, K] of int8."""
    if x.shape[0] == 1:
        return [out[None] for out in of_one_row(x[0], kernels, interpret)]
    return [of_rows(x, kernel, interpret) for kernel in kernels]


def of_one_row(x: Array, kernels: Sequence[Array], interpret: bool) -> list[Array]:
    lines = math.gcd(LINES, x.size // 2)
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
            *(pl.BlockSpec((COLUMNS, x.size), lambda n, at=at: (at(n), 0)) for at in places),
        ],
        out_specs=[pl.BlockSpec((COLUMNS,), lambda n, at=at: (at(n),)) for at in places],
        out_shape=[jax.ShapeDtypeStruct(kernel.shape[:1], jnp.float32) for kernel in kernels],
        interpret=interpret,
        name="products_of_one_row",
        compiler_params=triton.CompilerParams(num_warps=2, num_stages=3),
    )(x, *kernels)


def columns_of_one_row(x_ref: Any, *refs: Any, firsts: Sequence[int], lines: int, interpret: bool) -> None:
    """Each program has columns of one kernel."""
    number = pl.program_id(0)
    steps = x_ref.shape[0] // lines // 2
    kernels, outs = refs[: len(refs) // 2], refs[len(refs) // 2 :]
    for kernel_ref, out_ref, first, end in zip(kernels, outs, firsts, firsts[1:], strict=False):

        def add(step: Array, total: Array, kernel_ref: Any = kernel_ref) -> Array:
            places = [pl.ds((2 * step + half) * lines, lines) for half in range(2)]
            tiles = [kernel_ref[:, at] for at in places]  # both on their way before the first is used
            for at, tile in zip(places, tiles, strict=True):
                total += x_ref[at].astype(jnp.float32)[None, :] * floats(tile, interpret)
            return total

        @pl.when((number >= first) & (number < end))
        def _(out_ref: Any = out_ref, add: Any = add) -> None:
            total = jax.lax.fori_loop(0, steps, add, jnp.zeros((COLUMNS, lines), jnp.float32))
            out_ref[...] = total.sum(axis=1)


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
