"""Matmuls of few rows with the experts that they chose, as in decoding, where time is spent on
reading weights: only those of chosen experts are read, each once. Pallas kernels for NVIDIA GPUs,
lowered by Triton.

    y[a] = x[a // C] w[expert_ids[a]],   C = A / R

Shapes: R rows, A assignments (row, expert), X experts, K inputs, N outputs, S spans of inputs.

A program computes some columns of one expert, for all of its assignments: it finds them among
`expert_ids` itself, so that no kernel has to sort them before. With fewer assignments than experts,
there are programs for each assignment, and those of the first one with an expert do the work. Where
that leaves most of a GPU idle, the inputs are split into spans (split-K), whose products are added
outside of the kernel.

With fp8 weights, a row of x is two rows in fp8 whose sum has the precision of bfloat16
(`fp8_rows`): products of fp8 need the fewest conversions. Weights in mxfp4 are converted to
bfloat16 in registers, by bits, for four products, of every fourth input: two bytes have four codes.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike

from maxtext.common.hardware import is_nvidia
from maxtext.kernels.decode.tiles import Tiles
from maxtext.kernels.fp8.quantize import E4M3
from maxtext.kernels.weight_only import MXFP4, MXFP4_GROUP, QuantizedWeight

MIN_ROWS = 16  # of a tensor core matmul: fewer are padded
MAX_ASSIGNMENTS = 1024  # with more, grouped matmuls are faster
FEW_ASSIGNMENTS = 32
MIN_TILE = 32
CODES = 4  # of mxfp4, in two bytes
GROUP_WORDS = MXFP4_GROUP // CODES
MIN_PROGRAMS = 528  # four for each multiprocessor of an H200
MAX_SPANS = 8
SCALE_SHIFT = 64  # see `powers_of_two`
LOW_SHIFT = 4  # bits of precision of e4m3: the second of two rows is this much smaller
MAX_FP8_EXPONENT = 7  # of the largest magnitude of a row: 1.875 * 2^7 is in e4m3


def e2m1_to_bfloat16(code: int) -> str:
    """PTX that converts a code of two words of four each, $1, to bfloat16, $0, and multiplies it by
    scales, $2. The bits of a code become the sign, the two lowest bits of the exponent and the
    highest of the mantissa, which is the value divided by 2^126, also if it is subnormal."""
    sign, rest = 12 - 4 * code, 6 - 4 * code  # left shifts to bit 15, and to bits 8 to 6
    shift = "shl" if rest > 0 else "shr"
    return (
        f"{{ .reg .b32 s, t, z; mov.b32 z, 0x80008000; shl.b32 s, $1, {sign}; and.b32 s, s, z; "
        f"{shift}.b32 t, $1, {abs(rest)}; lop3.b32 t, t, 0x01C001C0, s, 0xEA; "  # (t & mask) | s
        "fma.rn.bf16x2 $0, t, $2, z; }"
    )


@dataclass(frozen=True)
class ExpertMatrix:
    """A weight [X, K, N] of floats, of integers or float8 with a scale [X, N] of the outputs, or in
    mxfp4, and a bias [X, N]."""

    weight: Array | QuantizedWeight
    scale: Array | None = None
    bias: Array | None = None

    @property
    def is_mxfp4(self) -> bool:
        return isinstance(self.weight, QuantizedWeight)

    @property
    def is_fp8(self) -> bool:
        return self.weight.dtype == E4M3

    @property
    def weight_arrays(self) -> list[Array]:
        """The weight, in fp8 as [X, N, K], which is how it lies in memory (`layout_for_decode`); or
        words [X, N, K / 4] of four codes, and exponents [X, N, K / 32]."""
        if not isinstance(self.weight, QuantizedWeight):
            return [self.weight.swapaxes(1, 2) if self.is_fp8 else self.weight]
        pairs = self.weight.qvalue.reshape(*self.weight.qvalue.shape[:-1], -1, 2)
        return [jax.lax.bitcast_convert_type(pairs, jnp.uint16), self.weight.scale]

    @property
    def arrays(self) -> list[Array]:
        more = (array for array in (self.scale, self.bias) if array is not None)
        return [*self.weight_arrays, *more]

    def finish(self, product: Array, expert_ids: Array) -> Array:
        """The product [A, N] of the weight with its scale and bias, as a program does it."""
        if self.scale is not None:
            product *= self.scale[expert_ids].astype(jnp.float32)
        if self.bias is not None:
            product += self.bias[expert_ids].astype(jnp.float32)
        return product


Finish = Callable[[Sequence[Array]], Array]  # of the products with each weight, in float32


def supports(
    assignments: int,
    shape: Sequence[int],
    dtype: DTypeLike,
    weight_dtype: DTypeLike,
    packed: str = "",
    capability: str = "9.0",
) -> bool:
    """Whether the kernel supports this number of assignments and a weight of `shape` [X, K, N], of
    codes in the format `packed` if it is not empty, on a GPU of this compute capability."""
    aligned = not any(size % MIN_TILE for size in shape[1:])
    return (
        packed in ("", MXFP4)
        and (jnp.dtype(weight_dtype) != E4M3 or is_nvidia(capability, (8, 9)))
        and assignments <= MAX_ASSIGNMENTS
        and aligned
        and math.prod(shape) <= 2**31
        and jnp.dtype(dtype) == jnp.bfloat16
        and (jnp.dtype(weight_dtype) == jnp.bfloat16 or jnp.dtype(weight_dtype).itemsize == 1)
    )


def expert_matmul(
    x: Array,
    expert_ids: Array,
    matrices: Sequence[ExpertMatrix],
    finish: Finish,
    tiles: Tiles | None = None,
    spans: int | None = None,
    interpret: bool = False,
) -> Array:
    """[A, N] in the dtype of x: `finish` of the products of x [R, K] with the matrices of each
    assignment's expert. All matrices have the same shape. Where expert_ids [A] is X or more, there
    is no expert, and the result is undefined. `spans`: of inputs, by default as many as occupy a
    GPU.
    """
    experts, depth, columns = matrices[0].weight.shape
    first, assignments, dtype = matrices[0], expert_ids.size, x.dtype
    tiles = tiles or default_tiles(assignments, len(matrices), first)
    block_columns = math.gcd(tiles.columns, columns)
    block_depth = tiles.depth if first.is_mxfp4 else math.gcd(tiles.depth, depth)
    grid = min(assignments, experts), columns // block_columns
    steps = -(-depth // block_depth)
    if spans is None:
        has_codes = jnp.dtype(first.weight.dtype).itemsize == 1
        spans = num_spans(math.prod(grid), steps) if has_codes else 1
    row_scale = None
    if first.is_mxfp4:
        x = x.reshape(len(x), depth // CODES, CODES).transpose(2, 0, 1)
    elif first.is_fp8:
        x, row_scale = fp8_rows(x)
    arrays = [
        x,
        *([] if row_scale is None else [row_scale]),
        expert_ids.astype(jnp.int32),
        *(array for matrix in matrices for array in matrix.arrays),
    ]
    parts = (spans, len(matrices)) if spans > 1 else ()
    shape = (*parts, assignments, columns)

    def whole(shape: Sequence[int]) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda g, n, s: (0,) * len(shape))

    y = pl.pallas_call(
        functools.partial(
            expert_program,
            products=products_of(first),
            has_row_scale=row_scale is not None,
            has_scale=first.scale is not None,
            has_bias=first.bias is not None,
            experts=experts,
            count=len(matrices),
            finish=finish,
            block=Block(block_columns, block_depth, -(-steps // spans), interpret),
        ),
        grid=(*grid, spans),
        in_specs=[whole(array.shape) for array in arrays],
        out_specs=whole(shape),
        out_shape=jax.ShapeDtypeStruct(shape, dtype if spans == 1 else jnp.float32),
        interpret=interpret,
        name="decode_expert_matmul",
        compiler_params=tiles.compiler_params,
    )(*arrays)
    if spans == 1:
        return y
    sums = y.sum(axis=0)
    return finish([m.finish(sums[i], expert_ids) for i, m in enumerate(matrices)]).astype(dtype)


@dataclass(frozen=True)
class Block:
    """The part of the outputs that a program computes: `columns`, in up to `steps` steps of `depth`
    inputs."""

    columns: int
    depth: int
    steps: int
    interpret: bool


def num_spans(programs: int, steps: int) -> int:
    """A power of two that leaves two steps or more in a span."""
    spans = 1
    while spans < MAX_SPANS and spans * programs < MIN_PROGRAMS and steps >= 4 * spans:
        spans *= 2
    return spans


def fp8_rows(x: Array) -> tuple[Array, Array]:
    """High and low parts [2, R, K] in e4m3, and scales [R], of x [R, K] in bfloat16: x = (high +
    low / 16) · scale. That is exact for values above 2^-14 of the row's largest, and for others to
    2^-17 of it."""
    amax = jnp.max(jnp.abs(x), axis=1).astype(jnp.float32)
    exponent = jax.lax.bitcast_convert_type(amax, jnp.int32) >> 23
    exponent = jnp.clip(exponent, MAX_FP8_EXPONENT + 1, 254) - MAX_FP8_EXPONENT
    scale = jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)
    scaled = x.astype(jnp.float32) / scale[:, None]
    # Rounded by bits: XLA takes a cast to e4m3 and back for nothing.
    bits = jax.lax.bitcast_convert_type(scaled, jnp.int32)
    rounded = (bits + (1 << 19) - 1 + (bits >> 20 & 1)) >> 20 << 20
    high = jax.lax.bitcast_convert_type(rounded, jnp.float32)
    low = (scaled - high) * 2.0**LOW_SHIFT
    return jnp.stack([high.astype(E4M3), low.astype(E4M3)]), scale


def products_of(matrix: ExpertMatrix) -> "Callable[..., list[Array]]":
    if matrix.is_mxfp4:
        return mxfp4_products
    return fp8_products if matrix.is_fp8 else products


def default_tiles(assignments: int, matrices: int, matrix: ExpertMatrix) -> Tiles:
    """The fastest on an H200: few assignments have few programs, which are narrow."""
    if matrix.is_mxfp4:
        return Tiles(columns=64, depth=256, warps=4, stages=3)
    if matrix.is_fp8:
        return Tiles(columns=64, depth=128, warps=4, stages=4)
    if assignments > FEW_ASSIGNMENTS:
        return Tiles(columns=128, depth=64, warps=4, stages=4)
    return Tiles(columns=64, depth=64, warps=8 if matrices > 1 else 4, stages=4)


def expert_program(
    x_ref: Ref,
    *refs: Ref,
    products: Callable[..., list[Array]],
    has_row_scale: bool,
    has_scale: bool,
    has_bias: bool,
    experts: int,
    count: int,
    finish: Finish,
    block: Block,
) -> None:
    """The columns of one expert, for all of its assignments."""
    row_scale_ref, refs = (refs[0], refs[1:]) if has_row_scale else (None, refs)
    ids_ref, *arrays, out_ref = refs
    size = len(arrays) // count
    matrices = [arrays[i * size : (i + 1) * size] for i in range(count)]
    assignments = ids_ref.shape[0]
    per_row = assignments // x_ref.shape[-2]
    order, num_matches, expert = find_assignments(ids_ref, experts)
    first_column, span = pl.program_id(1) * block.columns, pl.program_id(2)
    columns = pl.ds(first_column, block.columns)
    is_whole = len(out_ref.shape) == 2

    def run_rows(step: Array, carry: None) -> None:
        # The last row is repeated.
        row = jnp.minimum(step * MIN_ROWS + jnp.arange(MIN_ROWS), num_matches - 1)
        index = jnp.arange(order.shape[0])
        assignment = jnp.where(order[None, :] == row[:, None] + 1, index[None, :], 0).sum(axis=1)
        rows = assignment // per_row
        totals = products(x_ref, rows, matrices, expert, columns, span * block.steps, block)
        if row_scale_ref is not None:
            totals = [total * row_scale_ref[rows][:, None] for total in totals]
        at = assignment[:, None], (first_column + jnp.arange(block.columns))[None, :]
        if not is_whole:
            for i, total in enumerate(totals):
                out_ref[span, i, *at] = total
            return
        for i, (*_, last) in enumerate(matrices):
            if has_scale:
                totals[i] *= matrices[i][-1 - has_bias][expert, columns].astype(jnp.float32)[None]
            if has_bias:
                totals[i] += last[expert, columns].astype(jnp.float32)[None]
        out_ref[at] = finish(totals).astype(out_ref.dtype)

    jax.lax.fori_loop(0, pl.cdiv(num_matches, MIN_ROWS), run_rows, None)


def find_assignments(ids_ref: Ref, experts: int) -> tuple[Array, Array, Array]:
    """The assignments of this program's expert, numbered from 1 on (0: another expert's), padded to
    a power of two; their number, 0 if another program computes them; and the expert."""
    assignments, group = ids_ref.shape[0], pl.program_id(0)
    index = jnp.arange(pl.next_power_of_2(assignments))
    ids = triton.load(ids_ref.at[index], mask=index < assignments, other=experts)
    by_expert = assignments > experts
    expert = group if by_expert else ids_ref[group]
    matches = (ids == expert).astype(jnp.int32)
    num_matches = jnp.where(expert < experts, matches.sum(), 0)
    if not by_expert:
        num_earlier = jnp.where(index < group, matches, 0).sum()
        num_matches = jnp.where(num_earlier == 0, num_matches, 0)
    return matches * jnp.cumsum(matches), num_matches, expert


def products(
    x_ref: Ref,
    rows: Array,
    matrices: Sequence[Sequence[Ref]],
    expert: Array,
    columns: pl.Slice,
    first: Array,
    block: Block,
) -> list[Array]:
    """[rows, columns] of float32 for each matrix of an expert, whose weights are [X, K, N], over
    the inputs of steps from `first` on."""
    num_steps = x_ref.shape[1] // block.depth

    def add(step: Array, totals: list[Array]) -> list[Array]:
        inputs = step * block.depth + jnp.arange(block.depth)
        x = x_ref[rows[:, None], inputs[None, :]]
        at = pl.ds(step * block.depth, block.depth)
        return [
            total + triton.dot(x, weight_ref[expert, at, columns].astype(x.dtype))
            for total, (weight_ref, *_) in zip(totals, matrices, strict=True)
        ]

    totals = [jnp.zeros((MIN_ROWS, block.columns), jnp.float32) for _ in matrices]
    end = jnp.minimum(first + block.steps, num_steps)
    return jax.lax.fori_loop(first, end, add, totals)


def fp8_products(
    x_ref: Ref,
    rows: Array,
    matrices: Sequence[Sequence[Ref]],
    expert: Array,
    columns: pl.Slice,
    first: Array,
    block: Block,
) -> list[Array]:
    """As `products`, of x [2, R, K] from `fp8_rows`, with weights [X, N, K]."""
    num_steps = x_ref.shape[2] // block.depth

    def add(step: Array, totals: list[Array]) -> list[Array]:
        inputs = step * block.depth + jnp.arange(block.depth)
        parts = [x_ref[i, rows[:, None], inputs[None, :]] for i in range(2)]
        at = pl.ds(step * block.depth, block.depth)
        weights = [weight_ref[expert, columns, at] for weight_ref, *_ in matrices]
        return [
            total + triton.dot(weight, x, trans_b=True)
            for total, (weight, x) in zip(totals, itertools.product(weights, parts), strict=True)
        ]

    zeros = jnp.zeros((block.columns, MIN_ROWS), jnp.float32)
    end = jnp.minimum(first + block.steps, num_steps)
    totals = jax.lax.fori_loop(first, end, add, [zeros] * (2 * len(matrices)))
    return [
        (high + low * 2.0**-LOW_SHIFT).T
        for high, low in zip(totals[::2], totals[1::2], strict=True)
    ]


def mxfp4_products(
    x_ref: Ref,
    rows: Array,
    matrices: Sequence[Sequence[Ref]],
    expert: Array,
    columns: pl.Slice,
    first: Array,
    block: Block,
) -> list[Array]:
    """As `products`, of x [4, R, K / 4], with words [X, N, K / 4] of four codes and exponents [X,
    N, K / 32]. The last step may have fewer groups than the others."""
    groups, num_groups = block.depth // MXFP4_GROUP, matrices[0][1].shape[2]
    words, num_words = block.depth // CODES, x_ref.shape[2]
    is_whole = num_groups % groups == 0
    column = columns.start + jnp.arange(block.columns)

    def load(ref: Ref, at: tuple, mask: Array, *shape: int) -> Array:
        if is_whole:
            return triton.load(ref.at[at])
        return triton.load(ref.at[at], mask=jnp.broadcast_to(mask, shape), other=0)

    def add(step: Array, totals: list[Array]) -> list[Array]:
        group = step * groups + jnp.arange(groups)
        word = step * words + jnp.arange(words)
        group_mask, mask = (group < num_groups)[None], (word < num_words)[None]
        inputs = [
            load(x_ref, (i, rows[:, None], word[None]), mask, MIN_ROWS, words) for i in range(CODES)
        ]
        new = []
        for total, (words_ref, exponent_ref, *_) in zip(totals, matrices, strict=True):
            at = (expert, column[:, None], word[None])
            codes = load(words_ref, at, mask, block.columns, words)
            at = (expert, column[:, None], group[None])
            scales = powers_of_two(load(exponent_ref, at, group_mask, block.columns, groups))
            scales = jnp.broadcast_to(scales[:, :, None], (*scales.shape, GROUP_WORDS))
            scales = scales.reshape(codes.shape)
            for i, x in enumerate(inputs):
                values = e2m1_values(codes, scales, i, block.interpret)
                total += triton.dot(values, x, trans_b=True)
            new.append(total)
        return new

    totals = [jnp.zeros((block.columns, MIN_ROWS), jnp.float32) for _ in matrices]
    end = jnp.minimum(first + block.steps, pl.cdiv(num_groups, groups))
    totals = jax.lax.fori_loop(first, end, add, totals)
    return [total.T * 2.0**SCALE_SHIFT for total in totals]


def powers_of_two(exponents: Array) -> Array:
    """bfloat16 scales of `e2m1_values` for exponents of mxfp4 from 66 to 192, which are 2^-61 to
    2^65: times the factor 2^126 that values lack, and divided by 2^64 so that all are finite."""
    shifted = jnp.minimum(exponents.astype(jnp.int32) + (126 - SCALE_SHIFT), 254)
    return jax.lax.bitcast_convert_type((shifted << 7).astype(jnp.int16), jnp.bfloat16)


def e2m1_values(words: Array, scales: Array, code: int, interpret: bool) -> Array:
    """The bfloat16 of a code, 0 to 3, of each word of four, times 2^-126 and scales."""
    if interpret:
        codes = words.astype(jnp.int32) >> 4 * code & 15
        exponent, mantissa = codes >> 1 & 3, (codes & 1) * 0.5
        magnitude = jnp.where(exponent == 0, mantissa, (1 + mantissa) * (1 << exponent) / 2)
        values = jnp.where(codes < 8, magnitude, -magnitude)
        return (values * (scales.astype(jnp.float32) * 2.0**-126)).astype(jnp.bfloat16)
    [values] = triton.elementwise_inline_asm(
        e2m1_to_bfloat16(code),
        args=[words, scales],
        constraints="=r,r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, jnp.bfloat16)],
    )
    return values
