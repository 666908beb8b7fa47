"""fp8 matmuls on one NVIDIA GPU: forward, and the two of the backward pass, over operands quantized
row by row.

    forward    y  = x w        x_fp8 [T, E] (e4m3), a scale for each token or one; w_fp8ᵀ [F, E] (e4m3), one scale
    backward   dx = dy wᵀ      dy_fp8 [T, F] (e5m2), a scale for each token or one; w_fp8 [E, F]
               dw = xᵀ dy      x_fp8ᵀ [E, T]; dy_fp8ᵀ [F, T] with the tokens' scales, relative to the largest, in it

Every operand is contracted along its last dimension, as NVIDIA's fp8 instructions need it. The sum
of dw runs over tokens, so their scales cannot be applied to its result; e5m2 has the range to hold
the relative ones.

Shapes: T tokens, E inputs, F outputs.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

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
    """What the backward pass needs of the operands."""

    x_fp8: Array  # [E, T] here; where XLA quantizes, as the tokens came
    x_scale: Array  # [T], or one of all tokens
    weights_fp8: list[Array]  # [E, F_i]
    weight_scale: Array  # one of all weights


def supports(
    x_shape: tuple[int, ...],
    weight_shapes: Sequence[tuple[int, ...]],
    input_dims: int,
    platform: str | None,
) -> bool:
    """Whether Triton quantizes and transposes tensors of these shapes: whole tiles, 32-bit offsets,
    and the conversion instructions to fp8 that NVIDIA GPUs have from compute capability 8.9 on."""
    tokens = math.prod(x_shape[: len(x_shape) - input_dims])
    inputs = math.prod(x_shape[len(x_shape) - input_dims :])
    outputs = [math.prod(shape[input_dims:]) for shape in weight_shapes]
    aligned = not any(size % TILE for size in (tokens, inputs, *outputs))
    addressable = max(tokens, inputs) * max(inputs, sum(outputs)) < 2**31
    supported = aligned and addressable and supports_triton(platform, (8, 9))
    if platform == "gpu":
        log_once(
            f"fp8: {'Triton kernels quantize' if supported else 'XLA quantizes'} the operands of matmuls"
        )
    return supported


def quantize_rowwise(matrices: Sequence[Array], dtype: Any) -> tuple[Array, Array, Array]:
    """`rowwise.quantize_rowwise`, also for rows that are too long for a program."""
    if sum(x.shape[1] for x in matrices) > MAX_COLUMNS:
        parts, scale = quantize_rows(matrices, 1, dtype)
        x_fp8 = jnp.concatenate(parts, axis=1)
        return x_fp8, scale, jnp.sum(jnp.square(x_fp8.astype(jnp.float32)), axis=1)
    return rowwise.quantize_rowwise(matrices, dtype)


def matmul_forward(
    x_fp8: Array, x_scale: Array, weights: Sequence[Array], dtype: Any
) -> tuple[list[Array], MatmulResiduals]:
    """x_fp8 [T, E] times each of weights [E, F_i]. The results are scaled if x has one scale, and
    not if tokens have their own: then they are to be multiplied by x_scale · weight_scale."""
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
    dtype: Any,
    weight_dtypes: Sequence[Any],
    dys_fp8_T: Sequence[Array] | None = None,
) -> tuple[Array, list[Array]]:
    """dx [T, E], scaled if dy has one scale, and each dw [E, F_i] in its dtype. `dys_fp8_T`: the
    gradients transposed with the tokens' relative scales in them, where that is done already."""
    scale = scalar_or_none(dy_scale * residuals.weight_scale)
    pairs = zip(dys_fp8, residuals.weights_fp8, strict=True)
    dxs = [contract(dy, w, LAST, dtype, scale) for dy, w in pairs]
    relative, largest = relative_scales(residuals.x_scale * dy_scale)
    dys_fp8_T = dys_fp8_T or [rowwise.transpose_fp8(dy, relative) for dy in dys_fp8]
    # The barrier keeps XLA:GPU from merging matmuls of the same tokens, which would copy the other
    # operands.
    operands = [jax.lax.optimization_barrier((residuals.x_fp8, dy_T)) for dy_T in dys_fp8_T]
    dws = [
        contract(x_T, dy_T, LAST, accum_dtype(weight_dtype), largest)
        for (x_T, dy_T), weight_dtype in zip(operands, weight_dtypes, strict=True)
    ]
    return sum_products(dxs), [dw.astype(each) for dw, each in zip(dws, weight_dtypes, strict=True)]


def merged_matmul_backward(
    residuals: MatmulResiduals,
    dy_fp8: Array,
    dy_scale: Array,
    dtype: Any,
    weight_dtypes: Sequence[Any],
) -> tuple[Array, list[Array]]:
    """`matmul_backward` of gradients side by side [T, sum F_i]: one matmul for all weights."""
    splits = np.cumsum([w.shape[1] for w in residuals.weights_fp8])[:-1]
    merged = residuals._replace(weights_fp8=[jnp.concatenate(residuals.weights_fp8, axis=1)])
    dx, [dw] = matmul_backward(merged, [dy_fp8], dy_scale, dtype, weight_dtypes[:1])
    # Each slice is of a value of its own: else XLA:GPU fuses the updates of the weights into one
    # pass, which does not write in place and copies its results.
    copies = [dw]
    for _ in splits:
        copies.append(jax.lax.optimization_barrier(copies[-1]))
    slices = zip(copies, (0, *splits), (*splits, None), weight_dtypes, strict=True)
    return dx, [copy[:, start:end].astype(dtype) for copy, start, end, dtype in slices]


def one_scale_matmul_backward(
    residuals: MatmulResiduals,
    dys: Sequence[Array],
    dy_scale: Array,
    dtype: Any,
    weight_dtypes: Sequence[Any],
) -> tuple[Array, list[Array]]:
    """`matmul_backward` of gradients that are not quantized yet, with one scale for all of them."""
    relative, _ = relative_scales(residuals.x_scale)
    pairs = [rowwise.quantize_and_transpose(dy, dy_scale, E5M2, relative) for dy in dys]
    dys_fp8, dys_fp8_T = zip(*pairs, strict=True)
    return matmul_backward(residuals, dys_fp8, dy_scale, dtype, weight_dtypes, dys_fp8_T)


def scalar_or_none(scale: Array) -> Array | None:
    """A scale if it is one for all tokens: then it can be part of a matmul."""
    return scale if scale.ndim == 0 else None
