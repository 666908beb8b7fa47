"""A single row times large kernels of bfloat16, with what comes before and after in the same program.

Generating one sequence, a layer is a few products that take as long as their kernels take to read, and around them
norms, rotations and sums that take as long as it takes to start them. Here are the products of a layer with those in
them: of a normed row with a gate and a linear branch (`gated`), of a normed row with queries, keys and values, the
first two rotated (`rotated`), one that is added to the stream of residuals (`added`), and one alone (`product`).

Pallas kernels for NVIDIA GPUs, by Triton. They read a kernel with the numbers that are added up side by side, [N, K].
Each program has a few columns of all K lines, or of two kernels whose columns belong together. A norm's factor is one
number, so the product is computed without it and multiplied at the end; sums are in float32.

Tiles are what was fastest on an H200. Shapes: K numbers that are added up, N columns, D head size.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from maxtext.kernels.attention.decode import store_head


@dataclass(frozen=True)
class Tiles:
    columns: int  # of a kernel
    lines: int  # at a time
    warps: int


@dataclass(frozen=True)
class Normed:
    """A row [K] and how it is normed: by its root mean square, then times scale [K] + offset."""

    row: Array
    scale: Array
    epsilon: float
    offset: float = 0.0


PAIRS, LONG_PAIRS, SINGLE = Tiles(2, 1024, 1), Tiles(2, 2048, 4), Tiles(1, 512, 1)
LONG = 4096
AT_ONCE = 256  # numbers that are on their way to one thread
LINES, COLUMNS = 512, 16  # that kernels must have a multiple of


def supports(depth: int, width: int, dtype: Any) -> bool:
    """Whether a row of `dtype` can be multiplied here by a kernel of the same."""
    return depth % LINES == 0 and width % COLUMNS == 0 and depth * width <= 2**31 and jnp.dtype(dtype) == jnp.bfloat16


def gated(x: Normed, kernels: Array, activation: Callable[[Array], Array], interpret: bool = False) -> Array:
    """[N] of x: activation(x gate) · x up; kernels [2 N, K], the gate's first."""
    tiles = for_pairs(x)
    width = kernels.shape[0] // 2
    blocks = width // tiles.columns

    def finish(gate: Array, up: Array, out_ref: Any) -> None:
        out_ref[...] = (activation(gate) * up).astype(out_ref.dtype)

    return call(
        finish, x, kernels, [lambda n: n, lambda n: n + blocks], blocks, tiles, interpret, "gated_product",
        out_specs=pl.BlockSpec((tiles.columns,), lambda n: (n,)), out_shape=like(x.row, width),
    )  # fmt: skip


def rotated(
    x: Normed, kernels: Array, cos: Array, sin: Array, heads: tuple[int, int], interpret: bool = False
) -> list[Array]:
    """Queries [H, D], keys and values [G, D] of x; heads: H and G; kernels [(H + 2 G) D, K]; cos and sin [D / 2]."""
    tiles = for_pairs(x)
    queries, groups = heads
    half = cos.shape[0]
    parts = half // tiles.columns

    def finish(first: Array, second: Array, cos_ref: Any, sin_ref: Any, *outs: Any) -> None:
        # As the product would have been written.
        halves = [each.astype(x.row.dtype).astype(jnp.float32) for each in (first, second)]
        at = (pl.program_id(0) % parts) * tiles.columns + jnp.arange(tiles.columns)
        store_head(outs, heads, pl.program_id(0) // parts, (at, half + at), halves, cos_ref[...], sin_ref[...])

    whole = [pl.BlockSpec((count, 2 * half), lambda n: (0, 0)) for count in (queries, groups, groups)]
    angles = pl.BlockSpec((tiles.columns,), lambda n: (n % parts,))
    return call(
        finish, x, kernels, [lambda n: 2 * n - n % parts, lambda n: 2 * n - n % parts + parts],
        parts * (queries + 2 * groups), tiles, interpret, "rotated_products", cos, sin,
        more_specs=[angles, angles], out_specs=whole,
        out_shape=[like(x.row, count, 2 * half) for count in (queries, groups, groups)],
    )  # fmt: skip


def product(x: Array, kernel: Array, interpret: bool = False) -> Array:
    """[N] of x [K] and a kernel [N, K]."""

    def finish(total: Array, out_ref: Any) -> None:
        out_ref[...] = total.astype(out_ref.dtype)

    columns = pl.BlockSpec((SINGLE.columns,), lambda n: (n,))
    return call(
        finish, x, kernel, [lambda n: n], kernel.shape[0] // SINGLE.columns, SINGLE, interpret, "plain_product",
        out_specs=columns, out_shape=like(x, kernel.shape[0]),
    )  # fmt: skip


def added(x: Array, kernel: Array, stream: Array, interpret: bool = False) -> Array:
    """stream [N] and x times a kernel [N, K]."""

    def finish(total: Array, stream_ref: Any, out_ref: Any) -> None:
        out_ref[...] = stream_ref[...] + total.astype(out_ref.dtype)

    columns = pl.BlockSpec((SINGLE.columns,), lambda n: (n,))
    return call(
        finish, x, kernel, [lambda n: n], kernel.shape[0] // SINGLE.columns, SINGLE, interpret, "added_product",
        stream, more_specs=[columns], out_specs=columns, out_shape=like(x, kernel.shape[0]),
    )  # fmt: skip


def for_pairs(x: Normed) -> Tiles:
    return LONG_PAIRS if x.row.size >= LONG else PAIRS


def like(x: Array, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, x.dtype)


def call(
    finish: Callable[..., None], x: Normed | Array, kernels: Array, places: list[Callable[[Any], Any]], programs: int,
    tiles: Tiles, interpret: bool, name: str, *more: Array, out_specs: Any, out_shape: Any, more_specs: Any = (),
) -> Any:  # fmt: skip
    """Each program's sums over the columns that are at its `places`, `finish`ed."""
    depth = kernels.shape[1]
    lines = math.gcd(tiles.lines, depth)
    rows = [x.row, x.scale] if isinstance(x, Normed) else [x]
    norm = (x.epsilon, x.offset) if isinstance(x, Normed) else None
    at_once = len(places) * tiles.columns * depth <= 32 * tiles.warps * AT_ONCE

    def run(*refs: Any) -> None:
        of_rows, of_kernels = refs[: len(rows)], refs[len(rows) : len(rows) + len(places)]
        finish(*sums(of_rows, of_kernels, lines, at_once, norm), *refs[len(rows) + len(places) :])

    def block(at: Callable[[Any], Any]) -> pl.BlockSpec:
        return pl.BlockSpec((tiles.columns, depth), lambda n: (at(n), 0))

    return pl.pallas_call(
        run,
        grid=(programs,),
        in_specs=[
            *(pl.BlockSpec((depth,), lambda n: (0,)) for _ in rows),
            *(block(at) for at in places),
            *more_specs,
        ],
        out_specs=out_specs,
        out_shape=out_shape,
        interpret=interpret,
        name=f"{name}_of_one_row",
        compiler_params=triton.CompilerParams(num_warps=tiles.warps, num_stages=1),
    )(*rows, *[kernels] * len(places), *more)


def sums(rows: Any, kernels: Any, lines: int, at_once: bool, norm: tuple[float, float] | None) -> list[Array]:
    """[columns] for each kernel's block [columns, K]."""
    depth, columns = kernels[0].shape[1], kernels[0].shape[0]
    steps = depth // lines

    def add(step: Any, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        squares, *totals = carry
        at = pl.ds(step * lines, lines)
        read = [kernel[:, at] for kernel in kernels]
        x = rows[0][at].astype(jnp.float32)
        if norm is not None:
            squares += x * x
            x *= rows[1][at].astype(jnp.float32) + norm[1]
        return squares, *(total + tile.astype(jnp.float32) * x[None] for total, tile in zip(totals, read, strict=True))

    carry = jnp.zeros((lines,), jnp.float32), *(jnp.zeros((columns, lines), jnp.float32) for _ in kernels)
    if at_once:  # all is read before the first is used
        for step in range(steps):
            carry = add(step, carry)
    else:
        carry = jax.lax.fori_loop(0, steps, add, carry)
    squares, *totals = carry
    factor = 1.0 if norm is None else jax.lax.rsqrt(squares.sum() / depth + norm[0])
    return [total.sum(axis=1) * factor for total in totals]
