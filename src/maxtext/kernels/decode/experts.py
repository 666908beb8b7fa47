"""Matmuls of few rows with the experts that they chose, as in decoding, where time is spent on
reading weights: only those of chosen experts are read, each once. Pallas kernels for NVIDIA GPUs,
lowered by Triton.

    y[a] = x[a // C] w[expert_ids[a]],   C = A / R

Shapes: R rows, A assignments (row, expert), X experts, K inputs, N outputs.

A program computes some columns of one expert, for all of its assignments: it finds them among
`expert_ids` itself, so that no kernel has to sort them before. With fewer assignments than experts,
there are programs for each assignment, and those of the first one with an expert do the work.

Weights in mxfp4 are read in their bytes and converted to bfloat16 in registers. Even and odd inputs
are two products, and each group of 32 inputs is multiplied by its power of two.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike

from maxtext.kernels.decode.tiles import Tiles
from maxtext.kernels.weight_only import MXFP4, MXFP4_GROUP, QuantizedWeight

MIN_ROWS = 16  # of a tensor core matmul: fewer are padded
MAX_ASSIGNMENTS = 1024  # with more, grouped matmuls are faster
FEW_ASSIGNMENTS = 32
MIN_TILE = 32
GROUP_BYTES = MXFP4_GROUP // 2


def e2m1_to_bfloat16(upper: bool) -> str:
    """PTX that converts the upper or the lower halves of four bytes, $2, from e2m1 to bfloat16, $0
    and $1, multiplied by a scale, $3. The bits of a code become the sign, the two lowest bits of
    the exponent and the highest of the mantissa, which is the value divided by 2^126, also if it is
    subnormal."""
    lines = [".reg .b32 w, s, t, f;", "mov.b32 f, 0x7E807E80;", "prmt.b32 w, $2, $2, 0x3120;"]
    # Two codes are 16 bits apart now. Left shifts of the sign to bit 15, and of the others to bits
    # 8 to 6:
    shifts = ((8, 2), (0, -6)) if upper else ((12, 6), (4, -2))
    for out, (sign, rest) in enumerate(shifts):
        lines += [
            f"shl.b32 s, w, {sign};",
            "and.b32 s, s, 0x80008000;",
            f"{'shl' if rest > 0 else 'shr'}.b32 t, w, {abs(rest)};",
            "lop3.b32 t, t, 0x01C001C0, s, 0xEA;",  # (t & mask) | s
            "mul.rn.bf16x2 t, t, f;",
            f"mul.rn.bf16x2 ${out}, t, $3;",
        ]
    return "{ " + " ".join(lines) + " }"


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
    def arrays(self) -> list[Array]:
        """The weight, or codes [X, N, G, 16] and exponents [X, N, G] of G groups; scale; bias."""
        weights: list[Array] = [self.weight]
        if isinstance(self.weight, QuantizedWeight):
            shape = (*self.weight.scale.shape, GROUP_BYTES)
            weights = [self.weight.qvalue.reshape(shape), self.weight.scale]
        return [*weights, *(array for array in (self.scale, self.bias) if array is not None)]


Finish = Callable[[Sequence[Array]], Array]  # of the products with each weight, in float32


def supports(
    assignments: int,
    shape: Sequence[int],
    dtype: DTypeLike,
    weight_dtype: DTypeLike,
    packed: str = "",
) -> bool:
    """Whether the kernel supports this number of assignments and a weight of `shape` [X, K, N], of
    codes in the format `packed` if it is not empty."""
    aligned = not any(size % MIN_TILE for size in shape[1:])
    return (
        packed in ("", MXFP4)
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
    interpret: bool = False,
) -> Array:
    """[A, N] in the dtype of x: `finish` of the products of x [R, K] with the matrices of each
    assignment's expert. All matrices have the same shape. Where expert_ids [A] is X or more, there
    is no expert, and the result is undefined.
    """
    experts, depth, columns = matrices[0].weight.shape
    assignments = expert_ids.size
    is_mxfp4 = matrices[0].is_mxfp4
    tiles = tiles or default_tiles(assignments, len(matrices), is_mxfp4)
    block_columns = math.gcd(tiles.columns, columns)
    block_depth = tiles.depth if is_mxfp4 else math.gcd(tiles.depth, depth)
    if is_mxfp4:  # even and odd inputs
        x = x.reshape(len(x), depth // 2, 2).transpose(2, 0, 1)
    arrays = [x, expert_ids.astype(jnp.int32), *(a for m in matrices for a in m.arrays)]

    def whole(array: Array) -> pl.BlockSpec:
        return pl.BlockSpec(array.shape, lambda g, n: (0,) * array.ndim)

    return pl.pallas_call(
        functools.partial(
            expert_program,
            products=mxfp4_products if is_mxfp4 else products,
            has_scale=matrices[0].scale is not None,
            has_bias=matrices[0].bias is not None,
            experts=experts,
            count=len(matrices),
            finish=finish,
            block_columns=block_columns,
            block_depth=block_depth,
            interpret=interpret,
        ),
        grid=(min(assignments, experts), columns // block_columns),
        in_specs=[whole(array) for array in arrays],
        out_specs=pl.BlockSpec((assignments, columns), lambda g, n: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((assignments, columns), x.dtype),
        interpret=interpret,
        name="decode_expert_matmul",
        compiler_params=tiles.compiler_params,
    )(*arrays)


def default_tiles(assignments: int, matrices: int, is_mxfp4: bool = False) -> Tiles:
    """The fastest on an H200: few assignments have few programs, which are narrow."""
    if is_mxfp4:
        return Tiles(columns=64, depth=256, warps=4, stages=3)
    if assignments > FEW_ASSIGNMENTS:
        return Tiles(columns=128, depth=64, warps=4, stages=4)
    return Tiles(columns=64, depth=64, warps=8 if matrices > 1 else 4, stages=4)


def expert_program(
    x_ref: Ref,
    ids_ref: Ref,
    *refs: Ref,
    products: Callable[..., list[Array]],
    has_scale: bool,
    has_bias: bool,
    experts: int,
    count: int,
    finish: Finish,
    block_columns: int,
    block_depth: int,
    interpret: bool,
) -> None:
    """The columns of one expert, for all of its assignments."""
    *arrays, out_ref = refs
    size = len(arrays) // count
    matrices = [arrays[i * size : (i + 1) * size] for i in range(count)]
    assignments, num_rows = out_ref.shape[0], x_ref.shape[-2]
    per_row = assignments // num_rows
    group = pl.program_id(0)
    index = jnp.arange(pl.next_power_of_2(assignments))
    ids = triton.load(ids_ref.at[index], mask=index < assignments, other=experts)
    by_expert = assignments > experts
    expert = group if by_expert else ids_ref[group]
    matches = (ids == expert).astype(jnp.int32)
    num_matches = jnp.where(expert < experts, matches.sum(), 0)
    if not by_expert:
        num_earlier = jnp.where(index < group, matches, 0).sum()
        num_matches = jnp.where(num_earlier == 0, num_matches, 0)
    order = matches * jnp.cumsum(matches)  # from 1 on; 0 for other assignments
    first_column = pl.program_id(1) * block_columns
    columns = pl.ds(first_column, block_columns)

    def run_rows(step: Array, carry: None) -> None:
        # The last row is repeated.
        row = jnp.minimum(step * MIN_ROWS + jnp.arange(MIN_ROWS), num_matches - 1)
        assignment = jnp.where(order[None, :] == row[:, None] + 1, index[None, :], 0).sum(axis=1)
        totals = products(
            x_ref, assignment // per_row, matrices, expert, columns, block_depth, interpret
        )
        for i, (*_, last) in enumerate(matrices):
            if has_scale:
                totals[i] *= matrices[i][1][expert, columns].astype(jnp.float32)[None]
            if has_bias:
                totals[i] += last[expert, columns].astype(jnp.float32)[None]
        column = first_column + jnp.arange(block_columns)
        out_ref[assignment[:, None], column[None, :]] = finish(totals).astype(out_ref.dtype)

    jax.lax.fori_loop(0, pl.cdiv(num_matches, MIN_ROWS), run_rows, None)


def products(
    x_ref: Ref,
    rows: Array,
    matrices: Sequence[Sequence[Ref]],
    expert: Array,
    columns: pl.Slice,
    block_depth: int,
    interpret: bool,
) -> list[Array]:
    """[rows, columns] of float32 for each matrix of an expert, whose weights are [X, K, N]."""
    depth = x_ref.shape[1]

    def add(step: Array, totals: list[Array]) -> list[Array]:
        inputs = step * block_depth + jnp.arange(block_depth)
        x = x_ref[rows[:, None], inputs[None, :]]
        at = pl.ds(step * block_depth, block_depth)
        return [
            total + triton.dot(x, weight_ref[expert, at, columns].astype(x.dtype))
            for total, (weight_ref, *_) in zip(totals, matrices, strict=True)
        ]

    totals = [jnp.zeros((MIN_ROWS, columns.size), jnp.float32) for _ in matrices]
    return jax.lax.fori_loop(0, depth // block_depth, add, totals)


def mxfp4_products(
    x_ref: Ref,
    rows: Array,
    matrices: Sequence[Sequence[Ref]],
    expert: Array,
    columns: pl.Slice,
    block_depth: int,
    interpret: bool,
) -> list[Array]:
    """As `products`, of x [2, R, K / 2], with codes [X, N, G, 16] and exponents [X, N, G]. The last
    step may have fewer groups than the others."""
    groups, half = block_depth // MXFP4_GROUP, block_depth // 2
    num_groups, num_bytes = matrices[0][1].shape[2], x_ref.shape[2]
    is_whole = num_groups % groups == 0

    def add(step: Array, totals: list[Array]) -> list[Array]:
        group = step * groups + jnp.arange(groups)
        byte = step * half + jnp.arange(half)
        mask, x_mask = group < num_groups, byte < num_bytes
        column = columns.start + jnp.arange(columns.size)
        lane = jnp.arange(GROUP_BYTES)
        at = rows[:, None], byte[None, :]
        even, odd = (
            x_ref[i, *at]
            if is_whole
            else triton.load(
                x_ref.at[i, *at], mask=jnp.broadcast_to(x_mask[None], (MIN_ROWS, half)), other=0
            )
            for i in range(2)
        )
        new = []
        for total, (codes_ref, exponent_ref, *_) in zip(totals, matrices, strict=True):
            codes_at = codes_ref.at[
                expert, column[:, None, None], group[None, :, None], lane[None, None, :]
            ]
            exponents_at = exponent_ref.at[expert, column[:, None], group[None, :]]
            shape = (columns.size, groups, GROUP_BYTES)
            if is_whole:
                codes, exponents = triton.load(codes_at), triton.load(exponents_at)
            else:
                codes = triton.load(
                    codes_at, mask=jnp.broadcast_to(mask[None, :, None], shape), other=0
                )
                exponents = triton.load(
                    exponents_at, mask=jnp.broadcast_to(mask[None], shape[:2]), other=0
                )
            halves = e2m1_values(codes, powers_of_two(exponents), interpret)
            lower, upper = (part.reshape(columns.size, half) for part in halves)
            total += triton.dot(lower, even, trans_b=True)
            new.append(total + triton.dot(upper, odd, trans_b=True))
        return new

    totals = [jnp.zeros((columns.size, MIN_ROWS), jnp.float32) for _ in matrices]
    totals = jax.lax.fori_loop(0, pl.cdiv(num_groups, groups), add, totals)
    return [total.T for total in totals]


def powers_of_two(exponents: Array) -> Array:
    """bfloat16 of exponents with the bias of bfloat16."""
    bits = (exponents.astype(jnp.int32) << 7).astype(jnp.int16)
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)


def e2m1_values(codes: Array, scales: Array, interpret: bool) -> list[Array]:
    """bfloat16 of the lower and of the upper halves of codes [N, G, 16], times scales [N, G]."""
    scales = jnp.broadcast_to(scales[:, :, None], codes.shape)
    if interpret:
        return [emulated_e2m1(half) * scales for half in (codes & 15, codes >> 4)]
    return [
        triton.elementwise_inline_asm(
            e2m1_to_bfloat16(upper),
            args=[codes, scales],
            constraints="=&r,=&r,r,r,r",
            pack=4,
            result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, jnp.bfloat16)],
        )[0]
        for upper in (False, True)
    ]


def emulated_e2m1(codes: Array) -> Array:
    """bfloat16 of codes from 0 to 15, without instructions of a GPU."""
    codes = codes.astype(jnp.int32)
    exponent, mantissa = codes >> 1 & 3, (codes & 1) * 0.5
    magnitude = jnp.where(exponent == 0, mantissa, (1 + mantissa) * (1 << exponent) / 2)
    return jnp.where(codes < 8, magnitude, -magnitude).astype(jnp.bfloat16)
