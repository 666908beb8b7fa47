"""Grouped matmul in fp8 for training.

    forward    y[n]  = x[n] w[g(n)]          x and w in e4m3
    backward   dx[n] = dy[n] w[g(n)]ᵀ        dy and w in e4m3
               dw[g] = Σ x[n]ᵀ dy[n]         in the dtype of x

x and dy have one scale a row, w has one scale; all are powers of two of the current tensors. With
a scale a row, undefined values in rows of no group do not affect other rows, and gradients, whose
rows differ in magnitude, need no e5m2.

On one Hopper GPU, y and dx are fp8 matmuls (`grouped_matmul_hopper`) if E and M are multiples of
128. Elsewhere the quantized values are multiplied in the dtype of x, with the same result.

Shapes: N rows, X groups, E inputs, M outputs.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from maxtext.common.log import log_once
from maxtext.common.types import Tree
from maxtext.kernels.fp8.quantize import E4M3, QuantizedTensor, accum_dtype, quantize
from maxtext.kernels.grouped_matmul import (
    grouped_matmul,
    hopper_supports,
    is_hopper,
    zero_cotangent,
)

FP8_BLOCK_K = 128  # fp8 values that the Hopper kernel contracts at a time


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul_fp8(
    x: Array, weights: Array, group_sizes: Array, platform: str | None = None
) -> Array:
    """As `grouped_matmul`: x [N, E], weights [X, E, M], group_sizes [X] -> [N, M]."""
    return forward(x, weights, group_sizes, platform)[0]


def forward(
    x: Array, weights: Array, group_sizes: Array, platform: str | None
) -> tuple[Array, Tree]:
    weights_fp8 = quantize(weights, E4M3)
    y = quantized_grouped_matmul(x, weights_fp8, group_sizes, platform)
    return y, (x, weights_fp8, group_sizes)


def backward(
    platform: str | None, residuals: tuple[Array, QuantizedTensor, Array], dy: Array
) -> tuple[Array, Array, Tree]:
    x, weights_fp8, group_sizes = residuals
    dx = quantized_grouped_matmul(dy, weights_fp8, group_sizes, platform, transposed=True)
    # dw does not depend on the values of the weights: only their shape and dtype are used.
    weights_like = weights_fp8.qvalue.astype(x.dtype)
    _, weight_vjp = jax.vjp(lambda w: grouped_matmul(x, w, group_sizes, platform), weights_like)
    return dx, *weight_vjp(dy), zero_cotangent(group_sizes)


grouped_matmul_fp8.defvjp(forward, backward)


def quantized_grouped_matmul(
    x: Array,
    weights: QuantizedTensor,
    group_sizes: Array,
    platform: str | None,
    transposed: bool = False,
) -> Array:
    """x, quantized here, times quantized weights [X, E, M], or times [X, M, E] if `transposed`."""
    x_fp8 = quantize(x, E4M3, (1,))
    weights_like = jax.ShapeDtypeStruct(weights.qvalue.shape, x.dtype)
    hopper = is_hopper(platform) and hopper_supports(x, weights_like)
    hopper = hopper and not any(dim % FP8_BLOCK_K for dim in weights.qvalue.shape[1:])
    weights_T = weights.qvalue.swapaxes(1, 2)
    if platform == "gpu":
        log_once(f"experts are multiplied in {'fp8' if hopper else x.dtype.name}, rounded to fp8")
    if hopper:
        from maxtext.kernels import grouped_matmul_hopper

        # The Hopper kernel takes fp8 weights as [X, outputs, inputs].
        w_fp8 = weights.qvalue if transposed else weights_T
        y = grouped_matmul_hopper.grouped_matmul(
            x_fp8.qvalue, w_fp8, group_sizes, transposed=True, dtype=x.dtype
        )
    else:
        w_fp8 = weights_T if transposed else weights.qvalue
        dtype = accum_dtype(x.dtype)
        y = grouped_matmul(x_fp8.qvalue.astype(dtype), w_fp8.astype(dtype), group_sizes, platform)
    scale = x_fp8.scale * weights.scale
    if platform is None:
        # `grouped_matmul` promises zeros after the last group; a scale there may be NaN.
        scale = jnp.where(jnp.arange(len(x)) < jnp.sum(group_sizes), scale, 0)
    return (y * scale[:, None].astype(y.dtype)).astype(x.dtype)
