"""fp8 matmuls on one NVIDIA GPU, forward and backward, over row-wise quantized operands.

    forward    y  = x w      x_fp8 [T, E] (e4m3), a scale for each token, or one;
                             w_fp8ᵀ [F, E] (e4m3), one scale
    backward   dx = dy wᵀ    dy_fp8 [T, F] (e5m2), a scale for each token, or one; w_fp8 [E, F]
               dw = xᵀ dy    x_fp8ᵀ [E, T]; dy_fp8ᵀ [F, T] multiplied by the relative token scales

Shapes: T tokens, E inputs, F outputs.

Every operand is contracted along its last dimension, as NVIDIA's fp8 instructions require. dw sums
over tokens, so their scales cannot be applied to the result: dy is multiplied by the scales,
relative to the largest one, and rounded again. e5m2 has the range for that.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from maxtext.common.log import log_once
from maxtext.kernels.fp8 import rowwise
from maxtext.kernels.fp8.quantize import (
    E4M3,
    E5M2,
    accum_dtype,
    contract,
    quantize_rows,
    relative_scales,
    shared_scale,
    sum_products,
)
from maxtext.kernels.triton.rowwise import MAX_COLUMNS, TILE, supports_triton

LAST = ((1,), (1,))  # contract the last dimension of two matrices


class MatmulResiduals(NamedTuple):
    """The operands for the backward pass."""

    x_fp8: Array  # [E, T] here; [T, E] if XLA quantizes
    x_scale: Array  # [T], or [] for all tokens
    weights_fp8: list[Array]  # [E, F_i]
    weight_scale: Array  # [] for all weights


def supports(
    x_shape: tuple[int, ...],
    weight_shapes: Sequence[tuple[int, ...]],
    input_dims: int,
    platform: str | None,
) -> bool:
    """Whether Triton quantizes and transposes tensors of these shapes: multiples of a tile, 32-bit
    offsets, and compute capability 8.9, the first with instructions that convert to fp8."""
    tokens = math.prod(x_shape[: len(x_shape) - input_dims])
    inputs = math.prod(x_shape[len(x_shape) - input_dims :])
    outputs = [math.prod(shape[input_dims:]) for shape in weight_shapes]
    aligned = not any(size % TILE for size in (tokens, inputs, *outputs))
    addressable = max(tokens, inputs) * max(inputs, sum(outputs)) < 2**31
    supported = aligned and addressable and supports_triton(platform, (8, 9))
    if platform == "gpu":
        log_once(
            f"fp8: {'Triton kernels quantize' if supported else 'XLA quantizes'} "
            "the operands of matmuls"
        )
    return supported


def quantize_rowwise(matrices: Sequence[Array], dtype: DTypeLike) -> tuple[Array, Array, Array]:
    """`rowwise.quantize_rowwise`, by XLA if rows are too long for the Triton kernel."""
    if sum(x.shape[1] for x in matrices) > MAX_COLUMNS:
        parts, scale = quantize_rows(matrices, 1, dtype)
        x_fp8 = jnp.concatenate(parts, axis=1)
        return x_fp8, scale, jnp.sum(jnp.square(x_fp8.astype(jnp.float32)), axis=1)
    return rowwise.quantize_rowwise(matrices, dtype)


def matmul_forward(
    x_fp8: Array, x_scale: Array, weights: Sequence[Array], dtype: DTypeLike
) -> tuple[list[Array], MatmulResiduals]:
    """x_fp8 [T, E] times each of weights [E, F_i]. If x_scale is a scalar, the results are scaled;
    otherwise the caller multiplies them by x_scale · weight_scale."""
    weight_scale = shared_scale(weights, E4M3)
    pairs = [rowwise.quantize_and_transpose(w, weight_scale, E4M3) for w in weights]
    residuals = MatmulResiduals(
        rowwise.transpose_fp8(x_fp8), x_scale, [w for w, _ in pairs], weight_scale
    )
    return [
        contract(x_fp8, w_T, LAST, dtype, scalar_or_none(x_scale * weight_scale))
        for _, w_T in pairs
    ], residuals


def matmul_backward(
    residuals: MatmulResiduals,
    dys_fp8: Sequence[Array],
    dy_scale: Array,
    dtype: DTypeLike,
    weight_dtypes: Sequence[DTypeLike],
    dys_fp8_T: Sequence[Array] | None = None,
) -> tuple[Array, list[Array]]:
    """dx [T, E], scaled if dy_scale is a scalar, and each dw [E, F_i] in its dtype. `dys_fp8_T`:
    the gradients transposed and multiplied by the relative token scales, if the caller has them."""
    scale = scalar_or_none(dy_scale * residuals.weight_scale)
    pairs = zip(dys_fp8, residuals.weights_fp8, strict=True)
    dxs = [contract(dy, w, LAST, dtype, scale) for dy, w in pairs]
    relative, largest = relative_scales(residuals.x_scale * dy_scale)
    dys_fp8_T = dys_fp8_T or [rowwise.transpose_fp8(dy, relative) for dy in dys_fp8]
    # The barrier keeps XLA:GPU from merging matmuls that share an operand, which would copy the
    # others.
    operands = [jax.lax.optimization_barrier((residuals.x_fp8, dy_T)) for dy_T in dys_fp8_T]
    dws = [
        contract(x_T, dy_T, LAST, accum_dtype(weight_dtype), largest)
        for (x_T, dy_T), weight_dtype in zip(operands, weight_dtypes, strict=True)
    ]
    return sum_products(dxs), [
        dw.astype(weight_dtype) for dw, weight_dtype in zip(dws, weight_dtypes, strict=True)
    ]


def packed_matmul_backward(
    residuals: MatmulResiduals,
    dy_fp8: Array,
    dy_scale: Array,
    dtype: DTypeLike,
    weight_dtypes: Sequence[DTypeLike],
) -> tuple[Array, list[Array]]:
    """`matmul_backward` of concatenated gradients [T, sum F_i]: one matmul for all weights."""
    splits = np.cumsum([w.shape[1] for w in residuals.weights_fp8])[:-1]
    packed = residuals._replace(weights_fp8=[jnp.concatenate(residuals.weights_fp8, axis=1)])
    dx, [dw] = matmul_backward(packed, [dy_fp8], dy_scale, dtype, weight_dtypes[:1])
    # The barriers separate the slices: otherwise XLA:GPU fuses the weight updates into one kernel,
    # which does not update in place and copies its results.
    copies = [dw]
    for _ in splits:
        copies.append(jax.lax.optimization_barrier(copies[-1]))
    slices = zip(copies, (0, *splits), (*splits, None), weight_dtypes, strict=True)
    return dx, [copy[:, start:end].astype(dtype) for copy, start, end, dtype in slices]


def one_scale_matmul_backward(
    residuals: MatmulResiduals,
    dys: Sequence[Array],
    dy_scale: Array,
    dtype: DTypeLike,
    weight_dtypes: Sequence[DTypeLike],
) -> tuple[Array, list[Array]]:
    """`matmul_backward` of unquantized gradients, with one scale for all of them."""
    relative, _ = relative_scales(residuals.x_scale)
    pairs = [rowwise.quantize_and_transpose(dy, dy_scale, E5M2, relative) for dy in dys]
    dys_fp8, dys_fp8_T = zip(*pairs, strict=True)
    return matmul_backward(residuals, dys_fp8, dy_scale, dtype, weight_dtypes, dys_fp8_T)


def scalar_or_none(scale: Array) -> Array | None:
    """The scale if it is a scalar, which a matmul can apply."""
    return scale if scale.ndim == 0 else None
