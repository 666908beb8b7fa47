"""Fused bfloat16 matrix-vector products (GEMV) of a decode step with one sequence. Pallas kernels
for NVIDIA GPUs, lowered by Triton.

    n = rms_norm(x) · (scale + offset)

    norm_gate_up      act(n w_gate) · (n w_up)
    norm_qkv_rope     RoPE(n w_q), RoPE(n w_k), n w_v
    norm_gemv         n w + bias
    gemv_add          residual + x w
    gemv              x w

Shapes: K inputs, N outputs, H query heads, G key/value heads, D head_dim.

With one token, a product takes as long as reading its weight, and the norms, rotations and sums
around it would take as long as a kernel launch each. Weights are transposed, [N, K], so that the
contracted dimension is contiguous. A program computes a few columns over all of K, or the same
columns of a pair of weights. The inverse RMS is a scalar, so it multiplies the product at the end.
Accumulation is in float32; tile sizes are the fastest on an H200.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike

from maxtext.common.types import Tree


@dataclass(frozen=True)
class Tiles:
    columns: int  # outputs of a program
    depth: int  # inputs of a step
    warps: int


@dataclass(frozen=True)
class NormedInput:
    """The RMS norm of x [K], times scale [K] + offset."""

    x: Array
    scale: Array
    epsilon: float
    offset: float = 0.0


PAIRS, LONG_PAIRS, SINGLE = Tiles(2, 1024, 1), Tiles(2, 2048, 4), Tiles(1, 512, 1)
LONG_DEPTH = 4096
ELEMENTS_PER_THREAD = 256  # in-flight loads of one thread at most
DEPTH_MULTIPLE, COLUMN_MULTIPLE = 512, 16  # that K and N must be


def supports(depth: int, columns: int, dtype: DTypeLike) -> bool:
    """Whether the kernels support x [depth] and a weight [columns, depth] of `dtype`."""
    aligned = (
        depth % DEPTH_MULTIPLE == 0 and columns % COLUMN_MULTIPLE == 0 and depth * columns <= 2**31
    )
    return aligned and jnp.dtype(dtype) == jnp.bfloat16


def norm_gate_up(
    x: NormedInput, weights_T: Array, activation: Callable[[Array], Array], interpret: bool = False
) -> Array:
    """[N]; weights_T [2 N, K], the gate first."""
    tiles = pair_tiles(x)
    columns = weights_T.shape[0] // 2
    blocks = columns // tiles.columns

    def finish(gate: Array, up: Array, out_ref: Ref) -> None:
        out_ref[...] = (activation(gate) * up).astype(out_ref.dtype)

    return gemv_call(
        finish,
        x,
        weights_T,
        [lambda n: n, lambda n: n + blocks],
        programs=blocks,
        tiles=tiles,
        interpret=interpret,
        name="norm_gate_up",
        out_specs=pl.BlockSpec((tiles.columns,), lambda n: (n,)),
        out_shape=like(x.x, columns),
    )


def norm_qkv_rope(
    x: NormedInput,
    weights_T: Array,
    cos: Array,
    sin: Array,
    heads: tuple[int, int],
    interpret: bool = False,
) -> list[Array]:
    """q [H, D], k and v [G, D]; `heads` is (H, G); weights_T [(H + 2 G) D, K]; cos and sin [D /
    2].
    """
    tiles = pair_tiles(x)
    q_heads, kv_heads = heads
    half = cos.shape[0]
    blocks = half // tiles.columns  # of half a head

    def finish(first: Array, second: Array, cos_ref: Ref, sin_ref: Ref, *outs: Ref) -> None:
        # Rounded as if the product were written.
        halves = [part.astype(x.x.dtype).astype(jnp.float32) for part in (first, second)]
        columns = (pl.program_id(0) % blocks) * tiles.columns + jnp.arange(tiles.columns)
        head = pl.program_id(0) // blocks
        store_head(outs, heads, head, (columns, half + columns), halves, cos_ref[...], sin_ref[...])

    counts = (q_heads, kv_heads, kv_heads)
    angles = pl.BlockSpec((tiles.columns,), lambda n: (n % blocks,))
    return gemv_call(
        finish,
        x,
        weights_T,
        [lambda n: 2 * n - n % blocks, lambda n: 2 * n - n % blocks + blocks],
        cos,
        sin,
        programs=blocks * (q_heads + 2 * kv_heads),
        tiles=tiles,
        interpret=interpret,
        name="norm_qkv_rope",
        more_specs=[angles, angles],
        out_specs=[pl.BlockSpec((count, 2 * half), lambda n: (0, 0)) for count in counts],
        out_shape=[like(x.x, count, 2 * half) for count in counts],
    )


def store_head(
    outs: Sequence[Ref],
    heads: tuple[int, int],
    head: Array,
    columns: Sequence[Array],
    halves: Sequence[Array],
    cos: Array,
    sin: Array,
) -> None:
    """In a kernel: store the same columns of both halves of one of H + 2 G heads in q, k or v; with
    RoPE if it is a query or key."""
    (first, second), (q_heads, kv_heads) = halves, heads
    rotated = (first * cos - second * sin, second * cos + first * sin)
    begins = (0, q_heads, q_heads + kv_heads, q_heads + 2 * kv_heads)
    for out_ref, begin, end, pair in zip(
        outs, begins, begins[1:], (rotated, rotated, (first, second)), strict=False
    ):

        @pl.when((head >= begin) & (head < end))
        def _(out_ref: Ref = out_ref, begin: int = begin, pair: Sequence[Array] = pair) -> None:
            for at, values in zip(columns, pair, strict=True):
                out_ref[head - begin, at] = values.astype(out_ref.dtype)


def norm_gemv(
    x: NormedInput, weight_T: Array, bias: Array | None = None, interpret: bool = False
) -> Array:
    """n weight_T.T + bias, [N]; weight_T [N, K]."""
    tiles = pair_tiles(x)
    more = [] if bias is None else [bias]
    columns = pl.BlockSpec((tiles.columns,), lambda n: (n,))

    def finish(total: Array, *refs: Ref) -> None:
        *bias_refs, out_ref = refs
        for ref in bias_refs:
            total = total + ref[...].astype(jnp.float32)
        out_ref[...] = total.astype(out_ref.dtype)

    return gemv_call(
        finish,
        x,
        weight_T,
        [lambda n: n],
        *more,
        programs=weight_T.shape[0] // tiles.columns,
        tiles=tiles,
        interpret=interpret,
        name="norm_gemv",
        more_specs=[columns] * len(more),
        out_specs=columns,
        out_shape=like(x.x, weight_T.shape[0]),
    )


def gemv(x: Array, weight_T: Array, interpret: bool = False) -> Array:
    """[N] of x [K] and weight_T [N, K]."""

    def finish(total: Array, out_ref: Ref) -> None:
        out_ref[...] = total.astype(out_ref.dtype)

    return gemv_call(
        finish,
        x,
        weight_T,
        [lambda n: n],
        programs=weight_T.shape[0] // SINGLE.columns,
        tiles=SINGLE,
        interpret=interpret,
        name="gemv",
        out_specs=pl.BlockSpec((SINGLE.columns,), lambda n: (n,)),
        out_shape=like(x, weight_T.shape[0]),
    )


def gemv_add(x: Array, weight_T: Array, residual: Array, interpret: bool = False) -> Array:
    """residual [N] + x [K] times weight_T [N, K]."""

    def finish(total: Array, residual_ref: Ref, out_ref: Ref) -> None:
        out_ref[...] = residual_ref[...] + total.astype(out_ref.dtype)

    columns = pl.BlockSpec((SINGLE.columns,), lambda n: (n,))
    return gemv_call(
        finish,
        x,
        weight_T,
        [lambda n: n],
        residual,
        programs=weight_T.shape[0] // SINGLE.columns,
        tiles=SINGLE,
        interpret=interpret,
        name="gemv_add",
        more_specs=[columns],
        out_specs=columns,
        out_shape=like(x, weight_T.shape[0]),
    )


def pair_tiles(x: NormedInput) -> Tiles:
    return LONG_PAIRS if x.x.size >= LONG_DEPTH else PAIRS


def like(x: Array, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, x.dtype)


def gemv_call(
    finish: Callable[..., None],
    x: NormedInput | Array,
    weights_T: Array,
    block_indices: list[Callable[[Array], Array]],
    *more: Array,
    programs: int,
    tiles: Tiles,
    interpret: bool,
    name: str,
    out_specs: Tree,
    out_shape: Tree,
    more_specs: Sequence[pl.BlockSpec] = (),
) -> Tree:
    """Run `finish(*products, *more_refs, *out_refs)` with the products of a program, one for each
    of `block_indices`, which map the program to a block of columns of `weights_T`."""
    depth = weights_T.shape[1]
    block_depth = math.gcd(tiles.depth, depth)
    vectors = [x.x, x.scale] if isinstance(x, NormedInput) else [x]
    norm = (x.epsilon, x.offset) if isinstance(x, NormedInput) else None
    unrolled = len(block_indices) * tiles.columns * depth <= 32 * tiles.warps * ELEMENTS_PER_THREAD

    def run(*refs: Ref) -> None:
        end = len(vectors) + len(block_indices)
        sums = products(refs[: len(vectors)], refs[len(vectors) : end], block_depth, unrolled, norm)
        finish(*sums, *refs[end:])

    def columns_of(index: Callable[[Array], Array]) -> pl.BlockSpec:
        return pl.BlockSpec((tiles.columns, depth), lambda n: (index(n), 0))

    return pl.pallas_call(
        run,
        grid=(programs,),
        in_specs=[
            *(pl.BlockSpec((depth,), lambda n: (0,)) for _ in vectors),
            *(columns_of(index) for index in block_indices),
            *more_specs,
        ],
        out_specs=out_specs,
        out_shape=out_shape,
        interpret=interpret,
        name=f"decode_{name}",
        compiler_params=triton.CompilerParams(num_warps=tiles.warps, num_stages=1),
    )(*vectors, *[weights_T] * len(block_indices), *more)


def products(
    vectors: Sequence[Ref],
    weights_T: Sequence[Ref],
    block_depth: int,
    unrolled: bool,
    norm: tuple[float, float] | None,
) -> list[Array]:
    """In a kernel: [columns] for each block [columns, K] of weights. `norm` is (epsilon,
    offset).
    """
    columns, depth = weights_T[0].shape
    steps = depth // block_depth

    def add(step: Array | int, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        squares, *totals = carry
        at = pl.ds(step * block_depth, block_depth)
        tiles = [weight[:, at] for weight in weights_T]
        x = vectors[0][at].astype(jnp.float32)
        if norm is not None:
            squares += x * x
            x *= vectors[1][at].astype(jnp.float32) + norm[1]
        return squares, *(
            total + tile.astype(jnp.float32) * x[None]
            for total, tile in zip(totals, tiles, strict=True)
        )

    carry = (
        jnp.zeros((block_depth,), jnp.float32),
        *(jnp.zeros((columns, block_depth)) for _ in weights_T),
    )
    if unrolled:  # all loads are issued before the first is used
        for step in range(steps):
            carry = add(step, carry)
    else:
        carry = jax.lax.fori_loop(0, steps, add, carry)
    squares, *totals = carry
    factor = 1.0 if norm is None else jax.lax.rsqrt(squares.sum() / depth + norm[0])
    return [total.sum(axis=1) * factor for total in totals]
