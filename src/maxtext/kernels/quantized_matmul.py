"""fp8 and int8 matmuls for training, forward and backward, with dynamic scales.

    y = x w,   dx = dy wᵀ,   dw = xᵀ dy

`fp8`: activations and weights are e4m3, gradients e5m2. Each token has a scale, and all weights of
a call share one; scales are powers of two (`fp8/quantize.py`). All three matmuls are fp8, and so
are the residuals. dw sums over tokens, so dy is multiplied by the scales of its token, relative to
the largest, and rounded again. (The Triton kernels use one scale for all tokens if it is known in
advance, or cheaper.)

`int8`: a scale for each row and each column, so that one outlier does not affect all others. Each
matmul contracts other dimensions, so its operands are quantized again; dw, which sums over all
tokens and suffers most, stays in the dtype of the inputs.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from maxtext.common.types import Tree
from maxtext.kernels.fp8 import matmul
from maxtext.kernels.fp8.matmul import MatmulResiduals
from maxtext.kernels.fp8.quantize import (
    E4M3,
    E5M2,
    QuantizedTensor,
    accum_dtype,
    contract,
    flatten_2d,
    quantize,
    quantize_rows,
    relative_scales,
    rescale,
    shape_residual,
    shared_scale,
    sum_products,
)

INT8_TILE = 16  # values that an int8 matmul contracts at a time
Weights = tuple[Array, ...]


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def quantized_matmul(
    x: Array,
    weights: Weights,
    input_dims: int,
    precision: str,
    dtype: DTypeLike,
    platform: str | None = None,
) -> Weights:
    """x [..., inputs] times each weight [inputs, outputs], in `dtype`; `input_dims`: the number of
    input dimensions.

    `precision` is fp8 or int8. `platform` is that of the only device; None if there are several, or
    any will do.
    """
    return forward(x, weights, input_dims, precision, dtype, platform)[0]


def forward(
    x: Array,
    weights: Weights,
    input_dims: int,
    precision: str,
    dtype: DTypeLike,
    platform: str | None,
) -> tuple[Weights, Tree]:
    row_dims, inputs = x.ndim - input_dims, range(input_dims)
    axes = (range(row_dims, x.ndim), inputs)
    if precision == "int8":
        x_int8 = quantize(x, jnp.int8, axes[0])
        return tuple(
            int8_matmul(x_int8, quantize(w, jnp.int8, inputs), axes, dtype) for w in weights
        ), (x, weights)
    shapes = shape_residual(x), tuple(map(shape_residual, weights))
    if matmul.supports(x.shape, [w.shape for w in weights], input_dims, platform):
        x_fp8, x_scale, _ = matmul.quantize_rowwise([flatten_2d(x, row_dims)], E4M3)
        products, matmul_residuals = matmul.matmul_forward(
            x_fp8, x_scale, [flatten_2d(w, input_dims) for w in weights], accum_dtype(dtype)
        )
        ys = [rescale(y, x_scale * matmul_residuals.weight_scale, dtype) for y in products]
        y_shapes = [(*x.shape[:row_dims], *w.shape[input_dims:]) for w in weights]
        return tuple(y.reshape(shape) for y, shape in zip(ys, y_shapes, strict=True)), (
            matmul_residuals,
            *shapes,
        )
    (x_fp8,), x_scale = quantize_rows([x], row_dims, E4M3)
    weight_scale = shared_scale(weights, E4M3)
    weights_fp8 = [(w.astype(jnp.float32) / weight_scale).astype(E4M3) for w in weights]
    ys = [
        rescale(contract(x_fp8, w, axes, accum_dtype(dtype)), x_scale * weight_scale, dtype)
        for w in weights_fp8
    ]
    return tuple(ys), (MatmulResiduals(x_fp8, x_scale, weights_fp8, weight_scale), *shapes)


def backward(
    input_dims: int,
    precision: str,
    dtype: DTypeLike,
    platform: str | None,
    residuals: Tree,
    dys: Weights,
) -> tuple[Array, Weights]:
    if precision == "int8":
        int8_dxs, dws = zip(
            *map(int8_backward(input_dims, platform, *residuals), range(len(dys)), dys), strict=True
        )
        return sum_products(int8_dxs), dws
    matmul_residuals, x, weights = residuals
    x_shape, shapes = x.shape[1:], [w.shape[1:] for w in weights]
    row_dims, dtypes = len(x_shape) - input_dims, [w.dtype for w in weights]
    if matmul.supports(x_shape, shapes, input_dims, platform):
        return triton_backward(
            matmul_residuals, [flatten_2d(dy, row_dims) for dy in dys], x, weights
        )
    dys_fp8, dy_scale = quantize_rows(dys, row_dims, E5M2)
    dxs = [
        contract(dy, w, output_axes(dy, row_dims, input_dims), accum_dtype(x.dtype))
        for dy, w in zip(dys_fp8, matmul_residuals.weights_fp8, strict=True)
    ]
    relative, largest = relative_scales(matmul_residuals.x_scale * dy_scale)
    dys_fp8 = [rescale(dy.astype(jnp.float32), relative, E5M2) for dy in dys_fp8]
    tokens = range(row_dims), range(row_dims)
    return rescale(sum_products(dxs), dy_scale * matmul_residuals.weight_scale, x.dtype), tuple(
        rescale(contract(matmul_residuals.x_fp8, dy, tokens, accum_dtype(dtype)), largest, dtype)
        for dy, dtype in zip(dys_fp8, dtypes, strict=True)
    )


def triton_backward(
    residuals: MatmulResiduals, dys: Sequence[Array], x: Array, weights: Weights
) -> tuple[Array, Weights]:
    """dx and dws from gradients [T, outputs]; x and weights are `shape_residual`s."""
    x_shape, dtype, dtypes = x.shape[1:], accum_dtype(x.dtype), [w.dtype for w in weights]
    if sum(dy.size for dy in dys) <= math.prod(x_shape):
        # One more pass over the gradients computes a single scale, and saves a pass that scales the
        # larger dx.
        dx, dws = matmul.one_scale_matmul_backward(
            residuals, dys, shared_scale(dys, E5M2), dtype, dtypes
        )
    else:
        dy_fp8, dy_scale, _ = matmul.quantize_rowwise(dys, E5M2)
        dx, dws = matmul.packed_matmul_backward(residuals, dy_fp8, dy_scale, dtype, dtypes)
        dx = rescale(dx, dy_scale * residuals.weight_scale, dtype)
    return dx.astype(x.dtype).reshape(x_shape), tuple(
        dw.reshape(w.shape[1:]) for dw, w in zip(dws, weights, strict=True)
    )


def int8_backward(
    input_dims: int, platform: str | None, x: Array, weights: Weights
) -> Callable[[int, Array], tuple[Array, Array]]:
    """A function from the index of a weight and its dy to dx and dw."""
    row_dims = x.ndim - input_dims
    rows = range(row_dims)

    def backward_of_weight(index: int, dy: Array) -> tuple[Array, Array]:
        weight, axes = weights[index], output_axes(dy, row_dims, input_dims)
        dw = contract(x, dy.astype(x.dtype), (rows, rows), jnp.float32).astype(weight.dtype)
        if platform == "gpu":
            # The weight is transposed, so that its first dimension is contracted, as in the forward
            # pass. To contract the last one, XLA would choose a layout of the weight that makes the
            # matmul ten times slower.
            weight_T = jax.lax.optimization_barrier(flatten_2d(weight, input_dims).T)
            operands = (
                quantize(flatten_2d(dy, row_dims), jnp.int8, (1,)),
                quantize(weight_T, jnp.int8, (0,)),
            )
            return int8_matmul(*operands, ((1,), (0,)), x.dtype).reshape(x.shape), dw
        operands = quantize(dy, jnp.int8, axes[0]), quantize(weight, jnp.int8, axes[1])
        return int8_matmul(*operands, axes, x.dtype), dw

    return backward_of_weight


quantized_matmul.defvjp(forward, backward)


def int8_matmul(
    lhs: QuantizedTensor,
    rhs: QuantizedTensor,
    axes: tuple[Sequence[int], Sequence[int]],
    dtype: DTypeLike,
) -> Array:
    """Accumulated in int32, then scaled."""
    qvalues = pad_int8(lhs.qvalue, axes[0]), pad_int8(rhs.qvalue, axes[1])
    sums = contract(*qvalues, axes, jnp.int32).astype(jnp.float32)
    lhs_scale = lhs.scale.reshape(*lhs.scale.shape, *[1] * rhs.scale.ndim)
    return (sums * (lhs_scale * rhs.scale)).astype(dtype)


def pad_int8(x: Array, axes: Sequence[int]) -> Array:
    """x zero-padded to a multiple of 16 values along all `axes`. For other int8 matmuls (seen: 6 x
    33 x 5003), XLA's Triton GEMM of jax 0.11.2 on an H200 sums elements out of bounds."""
    missing = -x.shape[axes[-1]] % INT8_TILE
    if not missing or not math.prod(x.shape[axis] for axis in axes) % INT8_TILE:
        return x
    return jnp.pad(x, [(0, missing if axis == axes[-1] else 0) for axis in range(x.ndim)])


def output_axes(dy: Array, row_dims: int, input_dims: int) -> tuple[Sequence[int], Sequence[int]]:
    """The output dimensions of dy and of the weight."""
    return range(row_dims, dy.ndim), range(input_dims, input_dims + dy.ndim - row_dims)
