"""bfloat16 matmuls with few rows and a quantized weight, as in decoding, where time is spent on
reading the weight. Pallas kernels for NVIDIA GPUs, lowered by Triton.

    y = x w,   x [M, K] bfloat16,   w_T [N, K] fp8, int8 or int4

Shapes: M rows, K inputs, N outputs. Weights are transposed, so that the contracted dimension is
contiguous.

One row is a matrix-vector product (`gemv.py`). Several rows are padded to sixteen for tensor cores.
Codes are converted to floats in registers, integers by bit operations, since GPUs convert integers
slowly. int4 codes of even and of odd inputs are two products, for each group of inputs that share a
scale. The contraction is split into spans (split-K), whose sums are added outside of the kernel.

Tile sizes are the fastest on an H200 for int8; for float weights XLA's matmuls are as fast.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike

from maxtext.common.hardware import is_nvidia
from maxtext.kernels.decode import gemv
from maxtext.kernels.decode.gemv_products import GROUP_BYTES, is_grouped
from maxtext.kernels.weight_only import FP8, INT4, INT8, PACKED_OFFSET, QuantizedWeight

MIN_ROWS = 16  # of a tensor core matmul: fewer are padded
MAX_ROWS = 64  # with more, reading the weights no longer dominates
COLUMNS, DEPTH = 64, 128  # of a tile
MAX_SPANS = 8
BIAS = 2.0**23 + 128
# Four bytes n become n + 128, each the lowest byte of a float 2^23 + n + 128.
UNPACK = "xor.b32 t, {0}, 0x80808080; " + " ".join(
    f"prmt.b32 {name}, t, 0x4B000000, 0x754{byte};" for byte, name in enumerate("abcd")
)
FOUR_BITS = 0x4300  # a bfloat16 of 128, to whose last bits a code from 0 to 15 is added


def supports(
    rows: int, weight_T: QuantizedWeight, dtype: DTypeLike, capability: str = "9.0"
) -> bool:
    """Whether the kernels support the shape and format, and are faster than XLA's matmul."""
    if rows == 1:
        return gemv.supports_weight(weight_T, dtype, capability)
    columns, depth = weight_T.shape
    return (
        depth % DEPTH == 0
        and columns % COLUMNS == 0
        and depth * columns <= 2**31
        and rows <= MAX_ROWS
        and jnp.dtype(dtype) == jnp.bfloat16
        and (weight_T.format in (FP8, INT8) or is_grouped(weight_T))
        and (weight_T.format != FP8 or is_nvidia(capability, (8, 9)))
    )


def small_batch_matmul(
    x: Array, weights_T: Sequence[QuantizedWeight], interpret: bool = False
) -> list[Array]:
    """[M, N] for each weight, of one row in the dtype of x, of several in float32; x [M, K],
    weights_T [N, K]."""
    if x.shape[0] == 1:
        return [gemv.gemv(x[0], weight_T, interpret)[None] for weight_T in weights_T]
    return [matmul_rows(x, weight_T, interpret) for weight_T in weights_T]


def matmul_rows(x: Array, weight_T: QuantizedWeight, interpret: bool) -> Array:
    num_rows, (num_columns, depth) = x.shape[0], weight_T.shape
    padded_rows = max(MIN_ROWS, pl.next_power_of_2(num_rows))
    spans = math.gcd(MAX_SPANS, depth // DEPTH)
    # x of even and of odd inputs, as the halves of the codes' bytes, which have scales by group.
    grouped = weight_T.format == INT4
    vectors = [x[:, 0::2], x[:, 1::2]] if grouped else [x]
    parts = [weight_T.qvalue, weight_T.scale] if grouped else [weight_T.qvalue]
    sums = pl.pallas_call(
        functools.partial(
            grouped_program if grouped else matmul_program,
            padded_rows=padded_rows,
            steps=depth // spans // DEPTH,
            interpret=interpret,
        ),
        grid=(num_columns // COLUMNS, spans),
        in_specs=[
            *(pl.BlockSpec(vector.shape, lambda n, s: (0, 0)) for vector in vectors),
            *(pl.BlockSpec((COLUMNS, part.shape[1]), lambda n, s: (n, 0)) for part in parts),
        ],
        out_specs=pl.BlockSpec((None, COLUMNS, padded_rows), lambda n, s: (s, n, 0)),
        out_shape=jax.ShapeDtypeStruct((spans, num_columns, padded_rows), jnp.float32),
        interpret=interpret,
        name=f"decode_matmul_{weight_T.format}",
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
    )(*vectors, *parts)
    y = sums.sum(axis=0).T[:num_rows]
    return y if grouped else y * weight_T.scale[:, 0]


def matmul_program(
    x_ref: Ref, weight_ref: Ref, out_ref: Ref, *, padded_rows: int, steps: int, interpret: bool
) -> None:
    first = pl.program_id(1) * steps
    row = jnp.minimum(jnp.arange(padded_rows), x_ref.shape[0] - 1)  # the last row is repeated

    def add(step: Array, total: Array) -> Array:
        at = pl.ds((first + step) * DEPTH, DEPTH)
        x = x_ref[row, at]
        weight = to_floats(weight_ref[:, at], interpret).astype(x.dtype)
        return total + triton.dot(weight, x, trans_b=True)

    zeros = jnp.zeros((COLUMNS, padded_rows), jnp.float32)
    out_ref[...] = jax.lax.fori_loop(0, steps, add, zeros)


def grouped_program(
    even_ref: Ref,
    odd_ref: Ref,
    weight_ref: Ref,
    scale_ref: Ref,
    out_ref: Ref,
    *,
    padded_rows: int,
    steps: int,
    interpret: bool,
) -> None:
    """Each step is one group of inputs."""
    first = pl.program_id(1) * steps
    row = jnp.minimum(jnp.arange(padded_rows), even_ref.shape[0] - 1)

    def add(step: Array, total: Array) -> Array:
        at = pl.ds((first + step) * GROUP_BYTES, GROUP_BYTES)
        codes = weight_ref[:, at]
        pairs = ((codes & 15, even_ref), (codes >> 4, odd_ref))
        sums = [
            triton.dot(four_bits_to_floats(half), x_ref[row, at], trans_b=True)
            for half, x_ref in pairs
        ]
        return total + (sums[0] + sums[1]) * scale_ref[:, first + step][:, None]

    zeros = jnp.zeros((COLUMNS, padded_rows), jnp.float32)
    out_ref[...] = jax.lax.fori_loop(0, steps, add, zeros)


def four_bits_to_floats(codes: Array) -> Array:
    """uint8 from 0 to 15, with the offset of packed int4, to bfloat16, by bit operations."""
    bits = codes.astype(jnp.int16) | jnp.int16(FOUR_BITS)
    biased = jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
    return biased - jnp.bfloat16(128 + PACKED_OFFSET)


def to_floats(codes: Array, interpret: bool) -> Array:
    """int8 to float32, by bit operations; fp8 as it is."""
    if interpret or codes.dtype != jnp.int8:
        return codes.astype(jnp.float32) if codes.dtype == jnp.int8 else codes
    code = "{ .reg .b32 t, a, b, c, d; " + UNPACK.format("$4")
    code += " ".join(f"mov.b32 ${operand}, {name};" for operand, name in enumerate("abcd")) + " }"
    [biased] = triton.elementwise_inline_asm(
        code,
        args=[codes],
        constraints="=r,=r,=r,=r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, jnp.float32)],
    )
    return biased - BIAS
