"""The products of a row with columns of a transposed weight [N, K], inside GEMV kernels, by the
format of the weight. Pallas kernels for NVIDIA GPUs, lowered by Triton.

    floats      weights in the dtype of x, and fp8 codes, are converted to float32
    int8        x is converted to integers instead, since GPUs convert int8 slowly
    int4        the same, with two codes in a byte and a scale for each group of 128 inputs

For int8 and int4, neighbours in x share a power of two, and each is a 15-bit multiple of it, in two
bytes (`split_bytes`). That is exact for bfloat16 unless a neighbour is 64 times as large, and then
the error is less than 1/8192 of that neighbour. dp4a sums four byte products in one instruction.

Shapes: K inputs, N outputs, G groups of 128 inputs.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from maxtext.kernels.weight_only import FP8, INT4, INT8, PACKED_OFFSET, QuantizedWeight

GROUP = 128  # inputs that share a scale in int4, the only number that the kernels support
GROUP_BYTES = GROUP // 2
SHIFT = 13  # binary shift of the integers: the largest of the neighbours gets 14 bits
MIN_EXPONENT, MAX_EXPONENT = SHIFT + 5, 254  # of neighbours, so that all scales are normal
LOADS = 2  # tiles of quantized weights that are loaded before the first is used
# Four weights times the high bytes, then the low bytes of x; their sum times their power of two,
# added to a total.
DP4A_INT8 = """{ .reg .b32 sum, power; .reg .f32 value, scale;
dp4a.s32.s32 sum, $4, $5, 0; shl.b32 sum, sum, 8; dp4a.s32.s32 sum, $4, $6, sum;
cvt.rn.f32.s32 value, sum;
shl.b32 power, $7, 23; mov.b32 scale, power; fma.rn.f32 $0, value, scale, $8;
mov.f32 $1, $9; mov.f32 $2, $10; mov.f32 $3, $11; }"""
# Eight weights in four bytes; those in the lower halves belong to even inputs. A code with the
# offset 8 in the upper half of a byte is 16 times its value after its highest bit is flipped.
DP4A_INT4 = """{ .reg .b32 even, odd, sum, power; .reg .f32 value, scale;
xor.b32 odd, $4, 0x88888888; shl.b32 even, odd, 4;
and.b32 even, even, 0xF0F0F0F0; and.b32 odd, odd, 0xF0F0F0F0;
dp4a.s32.s32 sum, even, $5, 0; dp4a.s32.s32 sum, odd, $6, sum; shl.b32 sum, sum, 8;
dp4a.s32.s32 sum, even, $7, sum; dp4a.s32.s32 sum, odd, $8, sum;
cvt.rn.f32.s32 value, sum;
shl.b32 power, $9, 23; mov.b32 scale, power; mul.f32 scale, scale, $10;
fma.rn.f32 $0, value, scale, $14;
mov.f32 $1, $15; mov.f32 $2, $16; mov.f32 $3, $17; }"""


@dataclass(frozen=True)
class NormedInput:
    """The RMS norm of x [K], times scale [K] + offset."""

    x: Array
    scale: Array
    epsilon: float
    offset: float = 0.0


@dataclass(frozen=True)
class Operands:
    """The arrays that a kernel reads: `vectors` whole in each program, and `parts` [N, ...] of the
    weight in blocks of columns. `sums(vectors, parts of each block)`: the products [columns]."""

    vectors: list[Array]
    parts: list[Array]
    sums: Callable[[Sequence[Ref], Sequence[Sequence[Ref]]], list[Array]]


def is_grouped(weight_T: QuantizedWeight) -> bool:
    """Whether it is int4 with two codes in a byte and a scale for each group of GROUP inputs."""
    groups = weight_T.scale.shape[1]
    return weight_T.packed == INT4 and weight_T.shape[1] == groups * GROUP


def operands(
    x: NormedInput | Array,
    weight_T: Array | QuantizedWeight,
    block_depth: int,
    unrolled: bool,
    interpret: bool,
) -> Operands:
    """`block_depth`: the inputs of a step, a power of two. `unrolled`: all loads of floats are
    issued before the first is used."""
    normed = isinstance(x, NormedInput)
    norm = (x.epsilon, x.offset) if isinstance(x, NormedInput) else None
    vectors = [x.x, x.scale] if isinstance(x, NormedInput) else [x]
    if not isinstance(weight_T, QuantizedWeight) or weight_T.format == FP8:
        sums = functools.partial(float_sums, block_depth, unrolled, norm)
        return Operands(vectors, parts_of(weight_T), sums)
    n = vectors[0].astype(jnp.float32)
    if isinstance(x, NormedInput):
        n *= x.scale.astype(jnp.float32) + x.offset
    squared = vectors[:1] if normed else []
    if weight_T.format == INT8:
        sums = functools.partial(int8_sums, block_depth, norm, interpret)
        return Operands([*squared, *split_bytes(n, 4)], parts_of(weight_T), sums)
    high, low, power = split_bytes(n, 8)
    split = [high[0::2], high[1::2], low[0::2], low[1::2], power[0::2]]
    vectors = [array.reshape(-1, GROUP) for array in squared]
    vectors += [array.reshape(-1, GROUP_BYTES) for array in split]
    codes = weight_T.qvalue.reshape(weight_T.shape[0], -1, GROUP_BYTES)
    sums = functools.partial(int4_sums, block_depth // GROUP, norm, interpret)
    return Operands(vectors, [codes, weight_T.scale], sums)


def parts_of(weight_T: Array | QuantizedWeight) -> list[Array]:
    if isinstance(weight_T, QuantizedWeight):
        return [weight_T.qvalue, weight_T.scale]
    return [weight_T]


def split_bytes(x: Array, neighbours: int) -> tuple[Array, ...]:
    """x [K] as int8 arrays [K]: high bytes, low bytes and exponents. x is (256 high + low) *
    2^(exponent - 127), with the exponent of the first of `neighbours`; the others are zero.
    Infinity and NaN have the exponent of infinity. For four-bit codes (8 neighbours), exponents are
    less by 4, since those codes are multiplied by 16."""
    groups = x.astype(jnp.float32).reshape(-1, neighbours)
    # Not a reduction, which would be a kernel of its own.
    magnitudes = [jnp.abs(groups[:, i : i + 1]) for i in range(neighbours)]
    largest = functools.reduce(jnp.maximum, magnitudes)
    exponents = jax.lax.bitcast_convert_type(largest, jnp.int32) >> 23
    finite = exponents < 255
    exponents = jnp.clip(exponents, MIN_EXPONENT, MAX_EXPONENT)
    scale = jax.lax.bitcast_convert_type((254 + SHIFT - exponents) << 23, jnp.float32)
    integers = jnp.round(jnp.where(finite, groups, 1) * scale).astype(jnp.int32)
    high = (integers + 128) >> 8
    powers = jnp.where(finite, exponents - SHIFT - (4 if neighbours == 8 else 0), 255)
    first = jax.lax.broadcasted_iota(jnp.int32, groups.shape, 1) == 0
    parts = high, integers - 256 * high, jnp.where(first, powers, 0)
    return tuple(part.astype(jnp.int8).reshape(-1) for part in parts)


def float_sums(
    block_depth: int,
    unrolled: bool,
    norm: tuple[float, float] | None,
    vectors: Sequence[Ref],
    blocks: Sequence[Sequence[Ref]],
) -> list[Array]:
    """`norm` is (epsilon, offset). The inverse RMS is a scalar, so it multiplies the products."""
    columns, depth = blocks[0][0].shape
    steps = depth // block_depth

    def add(step: Array | int, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        squares, *totals = carry
        at = pl.ds(step * block_depth, block_depth)
        tiles = [weight[:, at] for weight, *_ in blocks]
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
        *(jnp.zeros((columns, block_depth)) for _ in blocks),
    )
    if unrolled:
        for step in range(steps):
            carry = add(step, carry)
    else:
        carry = jax.lax.fori_loop(0, steps, add, carry)
    squares, *totals = carry
    factor = inverse_rms(squares, depth, norm)
    return [
        total.sum(axis=1) * factor * (scale[0][:, 0] if scale else 1.0)
        for total, (_, *scale) in zip(totals, blocks, strict=True)
    ]


def inverse_rms(squares: Array, depth: int, norm: tuple[float, float] | None) -> Array | float:
    return 1.0 if norm is None else jax.lax.rsqrt(squares.sum() / depth + norm[0])


def int8_sums(
    block_depth: int,
    norm: tuple[float, float] | None,
    interpret: bool,
    vectors: Sequence[Ref],
    blocks: Sequence[Sequence[Ref]],
) -> list[Array]:
    *squared, high, low, power = vectors
    columns, depth = blocks[0][0].shape

    def add(step: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        squares, *totals = carry
        spans = [pl.ds((LOADS * step + i) * block_depth, block_depth) for i in range(LOADS)]
        tiles = [[codes[:, at] for codes, _ in blocks] for at in spans]
        for at, tile in zip(spans, tiles, strict=True):
            split = [part[at][None] for part in (high, low, power)]
            totals = [
                add_dp4a(DP4A_INT8, total, codes, split, None, interpret)
                for total, codes in zip(totals, tile, strict=True)
            ]
            if squared:
                squares += square(squared[0][at])
        return squares, *totals

    zeros = [jnp.zeros((columns, block_depth), jnp.float32) for _ in blocks]
    carry = (jnp.zeros((block_depth,), jnp.float32), *zeros)
    squares, *totals = jax.lax.fori_loop(0, depth // block_depth // LOADS, add, carry)
    factor = inverse_rms(squares, depth, norm)
    return [
        total.sum(axis=1) * factor * scale[:, 0]
        for total, (_, scale) in zip(totals, blocks, strict=True)
    ]


def int4_sums(
    block_groups: int,
    norm: tuple[float, float] | None,
    interpret: bool,
    vectors: Sequence[Ref],
    blocks: Sequence[Sequence[Ref]],
) -> list[Array]:
    *squared, high_even, high_odd, low_even, low_odd, power = vectors
    columns, groups, _ = blocks[0][0].shape

    def add(step: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        squares, *totals = carry
        spans = [pl.ds((LOADS * step + i) * block_groups, block_groups) for i in range(LOADS)]
        tiles = [[(codes[:, at, :], scale[:, at]) for codes, scale in blocks] for at in spans]
        for at, tile in zip(spans, tiles, strict=True):
            split = [part[at, :][None] for part in (high_even, high_odd, low_even, low_odd, power)]
            totals = [
                add_dp4a(DP4A_INT4, total, codes, split, scale[:, :, None], interpret)
                for total, (codes, scale) in zip(totals, tile, strict=True)
            ]
            if squared:
                squares += square(squared[0][at, :])
        return squares, *totals

    tile_shape = (columns, block_groups, GROUP_BYTES)
    zeros = [jnp.zeros(tile_shape, jnp.float32) for _ in blocks]
    carry = (jnp.zeros((block_groups, GROUP), jnp.float32), *zeros)
    squares, *totals = jax.lax.fori_loop(0, groups // block_groups // LOADS, add, carry)
    factor = inverse_rms(squares.sum(axis=1), groups * GROUP, norm)
    return [total.sum(axis=2).sum(axis=1) * factor for total in totals]


def square(x: Array) -> Array:
    x = x.astype(jnp.float32)
    return x * x


def add_dp4a(
    code: str,
    total: Array,
    codes: Array,
    split: Sequence[Array],
    scale: Array | None,
    interpret: bool,
) -> Array:
    """In a kernel: `total`, float32, plus the products of `codes` with x, which is `split` into
    bytes and powers, and with `scale`. The sum over four bytes is added at the first of them."""
    if interpret:
        return total.at[..., ::4].add(emulated_dp4a(codes, split, scale))
    factors = [*split] if scale is None else [*split, scale]
    [total] = triton.elementwise_inline_asm(
        code,
        args=[codes, *(jnp.broadcast_to(factor, codes.shape) for factor in factors), total],
        constraints=",".join(
            ["=f"] * 4 + ["r"] * (1 + len(split)) + ["f"] * (4 if scale is None else 8)
        ),
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(total.shape, jnp.float32)],
    )
    return total


def emulated_dp4a(codes: Array, split: Sequence[Array], scale: Array | None) -> Array:
    """The summands of `add_dp4a`, one for four bytes, without its instructions."""
    *parts, power = [part.astype(jnp.int32) for part in split]
    if codes.dtype == jnp.uint8:
        nibbles = codes.astype(jnp.int32) & 15, codes.astype(jnp.int32) >> 4
        values = [16 * (nibble - PACKED_OFFSET) for nibble in nibbles]
    else:
        values = [codes.astype(jnp.int32)]
    high, low = parts[: len(values)], parts[len(values) :]
    products = sum(
        value * (256 * high_bytes + low_bytes)
        for value, high_bytes, low_bytes in zip(values, high, low, strict=True)
    )
    words = jnp.asarray(products).reshape(*codes.shape[:-1], -1, 4).sum(axis=-1)
    powers = jax.lax.bitcast_convert_type((power[..., ::4] & 255) << 23, jnp.float32)
    return words.astype(jnp.float32) * (powers if scale is None else powers * scale)
