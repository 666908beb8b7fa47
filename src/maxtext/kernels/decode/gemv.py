"""Fused matrix-vector products (GEMV) of a decode step with one sequence, in bfloat16. Pallas
kernels for NVIDIA GPUs, lowered by Triton.

    n = rms_norm(x) · (scale + offset)

    norm_gate_up      act(n w_gate) · (n w_up)
    norm_qkv_rope     RoPE(n w_q), RoPE(n w_k), n w_v
    norm_gemv         n w + bias
    gemv_add          residual + x w
    gemv              x w

Shapes: K inputs, N outputs, H query heads, G key/value heads, D head_dim.

With one token, a product takes as long as reading its weight, and the norms, rotations and sums
around it would take as long as a kernel launch each. Weights are transposed, [N, K], so that the
contracted dimension is contiguous, and may be quantized. A program computes a few columns over all
of K, or the same columns of a pair of weights. The inverse RMS is a scalar, so it multiplies the
product at the end. Accumulation is in float32; tile sizes are the fastest on an H200 (those of fp8
and int4 are not measured yet).
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from maxtext.common.hardware import is_nvidia
from maxtext.common.types import Tree
from maxtext.kernels.decode.gemv_products import LOADS, NormedInput, is_grouped, operands
from maxtext.kernels.decode.tiles import Tiles
from maxtext.kernels.weight_only import FP8, INT4, INT8, QuantizedWeight

FLOATS = "floats"
# By format, and whether the weight is short or long (from LONG_DEPTH inputs on).
PAIRS: dict[str, tuple[Tiles, Tiles]] = {
    FLOATS: (Tiles(2, 1024, 1), Tiles(2, 2048, 4)),
    FP8: (Tiles(2, 1024, 1), Tiles(2, 2048, 4)),
    INT8: (Tiles(1, 512, 1, stages=3), Tiles(1, 512, 1, stages=3)),
    INT4: (Tiles(1, 1024, 1, stages=3), Tiles(1, 1024, 1, stages=3)),
}
SINGLE: dict[str, tuple[Tiles, Tiles]] = {
    FLOATS: (Tiles(1, 512, 1), Tiles(1, 512, 1)),
    FP8: (Tiles(1, 512, 1), Tiles(1, 512, 1)),
    INT8: (Tiles(2, 512, 1, stages=3), Tiles(2, 1024, 2, stages=3)),
    INT4: (Tiles(2, 1024, 1, stages=3), Tiles(2, 2048, 2, stages=3)),
}
LONG_DEPTH = {FLOATS: 4096, FP8: 4096, INT8: 8192, INT4: 8192}
BYTES_PER_THREAD = 512  # in-flight loads of one thread at most
DEPTH_MULTIPLE, COLUMN_MULTIPLE = 512, 16  # that K and N must be


def supports(
    depth: int, columns: int, dtype: DTypeLike, weight_format: str = "", capability: str = "9.0"
) -> bool:
    """Whether the kernels support x [depth] of `dtype` and a weight [columns, depth] in this
    format, or of `dtype` if it is empty. int4 weights need groups of 128 inputs."""
    aligned = (
        depth % DEPTH_MULTIPLE == 0 and columns % COLUMN_MULTIPLE == 0 and depth * columns <= 2**31
    )
    converts = weight_format != FP8 or is_nvidia(capability, (8, 9))
    is_known = weight_format in ("", FP8, INT8, INT4)
    return aligned and converts and is_known and jnp.dtype(dtype) == jnp.bfloat16


def supports_weight(weight_T: QuantizedWeight, dtype: DTypeLike, capability: str) -> bool:
    columns, depth = weight_T.shape
    if weight_T.format == INT4 and not is_grouped(weight_T):
        return False
    return supports(depth, columns, dtype, weight_T.format, capability)


def norm_gate_up(
    x: NormedInput,
    weights_T: Array | QuantizedWeight,
    activation: Callable[[Array], Array],
    interpret: bool = False,
) -> Array:
    """[N]; weights_T [2 N, K], the gate first."""
    tiles = tiles_of(PAIRS, weights_T)
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
    weights_T: Array | QuantizedWeight,
    cos: Array,
    sin: Array,
    heads: tuple[int, int],
    interpret: bool = False,
) -> list[Array]:
    """q [H, D], k and v [G, D]; `heads` is (H, G); weights_T [(H + 2 G) D, K]; cos and sin [D /
    2].
    """
    tiles = tiles_of(PAIRS, weights_T)
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
    x: NormedInput,
    weight_T: Array | QuantizedWeight,
    bias: Array | None = None,
    interpret: bool = False,
) -> Array:
    """n weight_T.T + bias, [N]; weight_T [N, K]."""

    def finish(total: Array, *biases: Array) -> Array:
        return sum(biases, start=total)

    biases = [] if bias is None else [bias]
    return column_call(
        finish, x, weight_T, *biases, table=PAIRS, name="norm_gemv", interpret=interpret
    )


def gemv(x: Array, weight_T: Array | QuantizedWeight, interpret: bool = False) -> Array:
    """[N] of x [K] and weight_T [N, K]."""
    return column_call(
        lambda total: total, x, weight_T, table=SINGLE, name="gemv", interpret=interpret
    )


def gemv_add(
    x: Array, weight_T: Array | QuantizedWeight, residual: Array, interpret: bool = False
) -> Array:
    """residual [N] + x [K] times weight_T [N, K]."""

    def finish(total: Array, residual: Array) -> Array:
        return residual + total.astype(residual.dtype)

    return column_call(
        finish, x, weight_T, residual, table=SINGLE, name="gemv_add", interpret=interpret
    )


def column_call(
    finish: Callable[..., Array],
    x: NormedInput | Array,
    weight_T: Array | QuantizedWeight,
    *more: Array,
    table: dict[str, tuple[Tiles, Tiles]],
    name: str,
    interpret: bool,
) -> Array:
    """[N]: `finish(product, *more)` of the product with weight_T [N, K] in float32, and further
    arrays [N]."""
    tiles = tiles_of(table, weight_T)
    columns = pl.BlockSpec((tiles.columns,), lambda n: (n,))

    def store(total: Array, *refs: Ref) -> None:
        *more_refs, out_ref = refs
        out_ref[...] = finish(total, *(ref[...] for ref in more_refs)).astype(out_ref.dtype)

    return gemv_call(
        store,
        x,
        weight_T,
        [lambda n: n],
        *more,
        programs=weight_T.shape[0] // tiles.columns,
        tiles=tiles,
        interpret=interpret,
        name=name,
        more_specs=[columns] * len(more),
        out_specs=columns,
        out_shape=like(x.x if isinstance(x, NormedInput) else x, weight_T.shape[0]),
    )


def weight_format(weight_T: Array | QuantizedWeight) -> str:
    return weight_T.format if isinstance(weight_T, QuantizedWeight) else FLOATS


def tiles_of(table: dict[str, tuple[Tiles, Tiles]], weight_T: Array | QuantizedWeight) -> Tiles:
    name = weight_format(weight_T)
    short, long = table[name]
    return long if weight_T.shape[1] >= LONG_DEPTH[name] else short


def like(x: Array, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, x.dtype)


def gemv_call(
    finish: Callable[..., None],
    x: NormedInput | Array,
    weights_T: Array | QuantizedWeight,
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
    loads = 1 if weight_format(weights_T) in (FLOATS, FP8) else LOADS
    block_depth = math.gcd(tiles.depth, depth // loads)
    num_bytes = len(block_indices) * tiles.columns * depth * jnp.dtype(weights_T.dtype).itemsize
    unrolled = num_bytes <= 32 * tiles.warps * BYTES_PER_THREAD
    read = operands(x, weights_T, block_depth, unrolled, interpret)
    num_vectors, num_parts = len(read.vectors), len(read.parts)
    end = num_vectors + num_parts * len(block_indices)

    def run(*refs: Ref) -> None:
        blocks = [refs[at : at + num_parts] for at in range(num_vectors, end, num_parts)]
        finish(*read.sums(refs[:num_vectors], blocks), *refs[end:])

    def whole(array: Array) -> pl.BlockSpec:
        return pl.BlockSpec(array.shape, lambda n: (0,) * array.ndim)

    def columns_of(part: Array, index: Callable[[Array], Array]) -> pl.BlockSpec:
        rest = part.shape[1:]
        return pl.BlockSpec((tiles.columns, *rest), lambda n: (index(n), *[0] * len(rest)))

    return pl.pallas_call(
        run,
        grid=(programs,),
        in_specs=[
            *map(whole, read.vectors),
            *(columns_of(part, index) for index in block_indices for part in read.parts),
            *more_specs,
        ],
        out_specs=out_specs,
        out_shape=out_shape,
        interpret=interpret,
        name=f"decode_{name}",
        compiler_params=tiles.compiler_params,
    )(*read.vectors, *read.parts * len(block_indices), *more)
