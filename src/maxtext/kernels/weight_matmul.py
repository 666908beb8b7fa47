"""Matmuls with quantized weights (`weight_only.py`), for inference and over the frozen weights
under adapters (QLoRA).

    y = x w,   w ≈ qvalue · scale

With few rows, as in decode steps, time is spent on reading the weight, and codes are converted to
floats in registers, on NVIDIA GPUs by the kernels of `decode/`. With many rows, fp8 and int8
weights can be multiplied in 8 bits: each row of x is quantized like the weight, dynamically, and
the product is multiplied by both scales. Other weights are dequantized for XLA's matmul.

Quantized weights have no gradient. The gradient of x dequantizes the weight again, so that no
dequantized weight is saved from the forward to the backward pass.

Shapes: M rows, K inputs, N outputs.
"""

import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from maxtext.common.hardware import is_nvidia, target_capability
from maxtext.common.types import Tree
from maxtext.kernels.decode import small_batch_matmul as decode_matmul
from maxtext.kernels.fp8.quantize import QuantizedTensor, accum_dtype, contract, quantize
from maxtext.kernels.quantized_matmul import int8_matmul
from maxtext.kernels.weight_only import FP8, INT8, STORAGE, QuantizedWeight

EIGHT_BIT = (FP8, INT8)  # formats whose matmuls may quantize x
WEIGHT_ONLY_ROWS = 16  # up to which x is not quantized: reading the weight dominates
LAST = ((1,), (1,))  # contract the last dimension of two matrices


def weight_matmul(
    x: jax.Array,
    weights: Sequence[Tree],
    input_dims: int,
    dtype: DTypeLike,
    platform: str | None = None,
    quantize_rows: bool = False,
) -> list[jax.Array]:
    """x [..., inputs] times each weight [inputs, outputs], an array or a QuantizedWeight;
    `input_dims`: the number of input dimensions.

    `platform` is that of the only device; None if there are several, or any will do.
    `quantize_rows`: multiply in 8 bits if x has more than WEIGHT_ONLY_ROWS rows.
    """
    if weights and all(isinstance(weight, QuantizedWeight) for weight in weights):
        return frozen_matmuls(
            x.astype(dtype), tuple(weights), input_dims, dtype, platform, quantize_rows
        )
    return [
        frozen_matmuls(x.astype(dtype), (weight,), input_dims, dtype, platform, quantize_rows)[0]
        if isinstance(weight, QuantizedWeight)
        else xla_matmul(x, weight, input_dims, dtype)
        for weight in weights
    ]


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def frozen_matmuls(
    x: jax.Array,
    weights: tuple[QuantizedWeight, ...],
    input_dims: int,
    dtype: DTypeLike,
    platform: str | None,
    quantize_rows: bool,
) -> list[jax.Array]:
    """x in `dtype` times each weight, without gradients of the weights."""
    outer, inputs = x.shape[: x.ndim - input_dims], range(input_dims)
    rows, depth = math.prod(outer), math.prod(x.shape[x.ndim - input_dims :])
    quantize_rows = quantize_rows and rows > WEIGHT_ONLY_ROWS
    if all(w.format in EIGHT_BIT and w.has_output_scale(inputs) for w in weights):
        if quantize_rows:
            axes = (range(len(outer), x.ndim), inputs)
            return eight_bit_matmuls(x, weights, axes, dtype)
        weights_T = [transpose_weight(weight, input_dims) for weight in weights]
        if uses_kernel(rows, weights_T, dtype, platform):
            ys = decode_matmul.small_batch_matmul(x.reshape(rows, depth), weights_T)
            shapes = [(*outer, *weight.shape[input_dims:]) for weight in weights]
            return [y.reshape(shape).astype(dtype) for y, shape in zip(ys, shapes, strict=True)]
    return [xla_matmul(x, weight, input_dims, dtype) for weight in weights]


def frozen_matmuls_forward(
    x: jax.Array,
    weights: tuple[QuantizedWeight, ...],
    input_dims: int,
    dtype: DTypeLike,
    platform: str | None,
    quantize_rows: bool,
) -> tuple[list[jax.Array], tuple[QuantizedWeight, ...]]:
    return frozen_matmuls(x, weights, input_dims, dtype, platform, quantize_rows), weights


def frozen_matmuls_backward(
    input_dims: int,
    dtype: DTypeLike,
    platform: str | None,
    quantize_rows: bool,
    weights: tuple[QuantizedWeight, ...],
    grads: Sequence[jax.Array],
) -> tuple[jax.Array, None]:
    dx = None
    # A compiler that sees both dequantizations would keep the first for the second.
    weights = jax.lax.optimization_barrier(weights)
    for weight, dy in zip(weights, grads, strict=True):
        outputs = tuple(range(input_dims, weight.ndim))
        dimensions = ((tuple(range(dy.ndim - len(outputs), dy.ndim)), outputs), ((), ()))
        product = jax.lax.dot_general(dy, weight.astype(dtype), dimensions)
        dx = product if dx is None else dx + product
    assert dx is not None
    return dx, None


frozen_matmuls.defvjp(frozen_matmuls_forward, frozen_matmuls_backward)


def transposed_matmul(
    x: jax.Array, weight_T: QuantizedWeight, platform: str | None, quantize_rows: bool
) -> jax.Array:
    """x [..., K] times weight_T [N, K], in the dtype of x; see `weight_matmul`. For inference: it
    has no gradient."""
    outer, dtype = x.shape[:-1], x.dtype
    x = x.reshape(-1, x.shape[-1])
    quantize_rows = quantize_rows and weight_T.format in EIGHT_BIT
    if quantize_rows and len(x) > WEIGHT_ONLY_ROWS:
        [y] = eight_bit_matmuls(x, [weight_T], LAST, dtype)
    elif uses_kernel(len(x), [weight_T], dtype, platform):
        [y] = decode_matmul.small_batch_matmul(x, [weight_T])
    elif weight_T.has_output_scale((1,)):
        y = contract(x, weight_T.qvalue.astype(dtype), LAST, jnp.float32) * weight_T.scale[:, 0]
    else:
        y = contract(x, weight_T.astype(dtype), LAST, accum_dtype(dtype))
    return y.astype(dtype).reshape(*outer, -1)


def uses_kernel(
    rows: int, weights_T: Sequence[QuantizedWeight], dtype: DTypeLike, platform: str | None
) -> bool:
    """Whether the kernels for few rows multiply by all weights."""
    if platform != "gpu" or not is_nvidia(target_capability()):
        return False
    return all(
        decode_matmul.supports(rows, weight_T, dtype, target_capability()) for weight_T in weights_T
    )


def transpose_weight(weight: QuantizedWeight, input_dims: int) -> QuantizedWeight:
    """[N, K] of a weight [inputs, outputs] with one scale for each output."""
    depth = math.prod(weight.shape[:input_dims])
    return QuantizedWeight(weight.qvalue.reshape(depth, -1).T, weight.scale.reshape(1, -1).T)


def eight_bit_matmuls(
    x: jax.Array,
    weights: Sequence[QuantizedWeight],
    axes: tuple[Sequence[int], Sequence[int]],
    dtype: DTypeLike,
) -> list[jax.Array]:
    """x times each fp8 or int8 weight, contracted over these axes of x and of the weights, with
    each row of x quantized; accumulated in float32 or int32."""
    outputs = []
    for weight in weights:
        x_quantized = quantize(x, STORAGE[weight.format], axes[0])
        y_shape = [size for axis, size in enumerate(weight.shape) if axis not in axes[1]]
        w_quantized = QuantizedTensor(weight.qvalue, weight.scale.reshape(y_shape))
        multiply = int8_matmul if weight.format == INT8 else fp8_matmul
        outputs.append(multiply(x_quantized, w_quantized, axes, dtype))
    return outputs


def fp8_matmul(
    lhs: QuantizedTensor,
    rhs: QuantizedTensor,
    axes: tuple[Sequence[int], Sequence[int]],
    dtype: DTypeLike,
) -> jax.Array:
    """Rounded to `dtype` before it is scaled, which is exact for scales that are powers of two."""
    y = contract(lhs.qvalue, rhs.qvalue, axes, accum_dtype(dtype)).astype(jnp.float32)
    lhs_scale = lhs.scale.reshape(*lhs.scale.shape, *[1] * rhs.scale.ndim)
    return (y * lhs_scale * rhs.scale).astype(dtype)


def xla_matmul(
    x: jax.Array, weight: jax.Array | QuantizedWeight, input_dims: int, dtype: DTypeLike
) -> jax.Array:
    """x times a weight as in `weight_matmul`, converted to `dtype`."""
    inputs = tuple(range(input_dims))
    dimensions = ((tuple(range(x.ndim - input_dims, x.ndim)), inputs), ((), ()))
    if not (isinstance(weight, QuantizedWeight) and weight.has_output_scale(inputs)):
        return jax.lax.dot_general(x, weight.astype(dtype), dimensions)
    # Sums of integers may overflow float16, and are rounded once only if scaled in float32.
    y = jax.lax.dot_general(
        x, weight.qvalue.astype(dtype), dimensions, preferred_element_type=jnp.float32
    )
    return (y * weight.scale.reshape(weight.scale.shape[input_dims:])).astype(dtype)
