"""Products of few rows with a large kernel, as generation has them: what counts is how fast the kernel is read.

Pallas kernels for NVIDIA GPUs, by Triton. A program reads a tile of columns over a span of the sum; integers become
floats in registers. The sums of the spans are added up outside, where the compiler joins that with what comes next.
Tiles are what was fastest on an H200.

Shapes: M rows, K numbers that are added up, N columns.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

LEAST_ROWS = 16  # of a product on tensor cores: fewer are filled up
MOST_ROWS = 64  # with more, reading the kernel is no longer what takes the time
PROGRAMS = 1056  # that keep a chip busy, eight for each multiprocessor of an H100 or H200
IN_A_WORD = 4  # integers of 8 bits


def supports(rows: int, depth: int, width: int, x: Any, kernel: Any) -> bool:
    """Whether it can be done here, and better than by the compiler: that is as good with several rows of floats."""
    integers = jnp.dtype(kernel) == jnp.int8
    lines, columns = tile(rows, width)
    return (
        jnp.dtype(x) in (jnp.bfloat16, jnp.float16)
        and (integers or jnp.dtype(kernel) == jnp.dtype(x))
        and rows <= (MOST_ROWS if integers else 1)
        and depth % (2 * lines) == 0
        and width % columns == 0
    )


def tile(rows: int, width: int) -> tuple[int, int]:
    """Lines and columns."""
    if rows > 1:
        return 64, 128
    columns = next((columns for columns in (512, 256) if width % columns == 0), 128)
    return 4096 // columns, columns


def product(x: Array, kernel: Array, interpret: bool = False) -> Array:
    """[M, N] in float32; x [M, K], kernel [K, N]."""
    (rows, depth), width = x.shape, kernel.shape[1]
    lines, columns = tile(rows, width)
    splits = even_splits(depth // (2 * lines), pl.cdiv(PROGRAMS, width // columns))
    sizes: dict[str, Any] = {"lines": lines, "span": depth // splits}
    parts = 1
    if rows > 1:
        run = functools.partial(span_of_rows, rows=max(LEAST_ROWS, pl.next_power_of_2(rows)), count=rows, **sizes)
    elif kernel.dtype == jnp.int8:
        run, parts = functools.partial(span_of_words, **sizes), IN_A_WORD
        kernel = jax.lax.bitcast_convert_type(kernel.reshape(depth, -1, parts), jnp.int32)
    else:
        run = functools.partial(span_of_one_row, **sizes)
    sums = pl.pallas_call(
        run,
        grid=(width // columns, splits),
        in_specs=[
            pl.BlockSpec((rows, depth), lambda n, s: (0, 0)),
            pl.BlockSpec((depth, columns // parts), lambda n, s: (0, n)),
        ],
        out_specs=pl.BlockSpec((None, rows * parts, columns // parts), lambda n, s: (s, 0, n)),
        out_shape=jax.ShapeDtypeStruct((splits, rows * parts, width // parts), jnp.float32),
        interpret=interpret,
        name="product_of_few_rows",
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=4),
    )(x, kernel)
    whole = sums.sum(axis=0)
    return whole.T.reshape(rows, width) if parts > 1 else whole


def even_splits(tiles: int, wanted: int) -> int:
    """The smallest number of equal spans that is at least what is wanted, if there is one."""
    return next((splits for splits in range(min(wanted, tiles), tiles + 1) if tiles % splits == 0), tiles)


def span_of_rows(x_ref: Any, kernel_ref: Any, out_ref: Any, *, rows: int, count: int, lines: int, span: int) -> None:
    """On tensor cores."""
    first = pl.program_id(1) * span
    row, column = jnp.arange(rows), jnp.arange(out_ref.shape[1])
    known = jnp.minimum(row, count - 1)

    def add(step: Array, total: Array) -> Array:
        at = pl.ds(first + step * lines, lines)
        x = x_ref[known, at]
        return total + triton.dot(x, kernel_ref[at, :].astype(x.dtype))

    total = jax.lax.fori_loop(0, span // lines, add, jnp.zeros((rows, column.size), jnp.float32))
    triton.store(out_ref.at[row[:, None], column[None, :]], total, mask=(row < count)[:, None] & (column >= 0)[None, :])


def span_of_one_row(x_ref: Any, kernel_ref: Any, out_ref: Any, *, lines: int, span: int) -> None:
    first = pl.program_id(1) * span

    def add(step: Array, total: Array) -> Array:
        places = [pl.ds(first + (2 * step + half) * lines, lines) for half in range(2)]
        tiles = [kernel_ref[at, :] for at in places]  # both on their way before the first is used
        for at, each in zip(places, tiles, strict=True):
            total += x_ref[0, at].astype(jnp.float32)[:, None] * each.astype(jnp.float32)
        return total

    total = jax.lax.fori_loop(0, span // lines // 2, add, jnp.zeros((lines, out_ref.shape[1]), jnp.float32))
    out_ref[0, :] = total.sum(axis=0)


def span_of_words(x_ref: Any, kernel_ref: Any, out_ref: Any, *, lines: int, span: int) -> None:
    """One row with integers, four in a word. A GPU converts integers slowly, so floats are made of their bits: those of
    2^23 with n + 128 in its lowest bits, or with 256 times that in the next ones, less what was added."""
    first, words = pl.program_id(1) * span, out_ref.shape[1]

    def add(step: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        at = pl.ds(first + step * lines, lines)
        low = kernel_ref[at, :] ^ -0x7F7F7F80  # 0x80808080: from -128..127 to 0..255
        x = x_ref[0, at].astype(jnp.float32)[:, None]
        added = []
        for pair in (low, jax.lax.shift_right_logical(low, 16)):
            for mask, least in ((0xFF, 128.0), (0xFF00, 128.0 * 256)):
                number = jax.lax.bitcast_convert_type((pair & mask) | 0x4B000000, jnp.float32)
                added.append(x * (number - (2.0**23 + least)))
        return tuple(total + each for total, each in zip(totals, added, strict=True))

    zeros = tuple(jnp.zeros((lines, words), jnp.float32) for _ in range(IN_A_WORD))
    for place, total in enumerate(jax.lax.fori_loop(0, span // lines, add, zeros)):
        out_ref[place, :] = total.sum(axis=0) * (1.0 if place % 2 == 0 else 1 / 256)
