"""Fused sublayers in fp8 on one NVIDIA GPU: norms, gates, RoPE and residual sums are part of the
quantizers.

    norm_qkv        q, k, v = RoPE(n w_q), RoPE(n w_k), n w_v           n = rms_norm(x) · norm_scale
    norm_mlp        y = (act(n w_gate) · (n w_up)) w_down
    out_norm_mlp    x' = x + context w_out;  y = norm_mlp(x')

Shapes: T tokens ([...] flattened), E embed_dim, F hidden_dim, H heads, D head_dim; they must
satisfy `matmul.supports`.

Each op also returns the residual stream, x or x', so that its gradient is added in the same pass as
the norm's dx.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from maxtext.common.types import Tree
from maxtext.kernels.fp8 import rowwise
from maxtext.kernels.fp8.matmul import (
    MatmulResiduals,
    matmul_backward,
    matmul_forward,
    one_scale_matmul_backward,
    packed_matmul_backward,
    quantize_rowwise,
)
from maxtext.kernels.fp8.quantize import (
    E4M3,
    E5M2,
    accum_dtype,
    flatten_2d,
    rescale,
    scale_from_amax,
    shape_residual,
)
from maxtext.kernels.fp8.rowwise import Activation
from maxtext.kernels.rms_norm import add_rms_norm_rows, rms_norm_rows, rms_norm_rows_backward

MAX_SLOPE = 1.2  # of any supported activation; and |activation(0)| <= 1
Weights = tuple[Array, ...]
CosSin = tuple[Array, ...]  # cosines and sines, or nothing
ApplyRope = Callable[[Array, Array, Array], Array]
Tag = Callable[[Array], Array]  # names an intermediate, for example for a remat policy


class NormResiduals(NamedTuple):
    """The values of a norm that its backward pass needs."""

    x: Array  # [T, E]
    scale: Array  # [E]
    inverse_rms: Array  # [T]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def norm_qkv(
    x: Array,
    norm_scale: Array,
    weights: Weights,
    cos_sin: CosSin,
    apply_rope: ApplyRope | None,
    epsilon: float,
    dtype: DTypeLike,
) -> tuple[Array, Weights]:
    """x [..., E], and rms_norm(x) · norm_scale times each of weights [E, H_i, D].

    With `cos_sin`, [..., 1, D/2] each, all but the last of the products are rotated by
    `apply_rope`; in the backward pass the inverse rotation is part of the quantizer.
    """
    return norm_qkv_forward(x, norm_scale, weights, cos_sin, apply_rope, epsilon, dtype)[0]


def norm_qkv_forward(
    x: Array,
    norm_scale: Array,
    weights: Weights,
    cos_sin: CosSin,
    apply_rope: ApplyRope | None,
    epsilon: float,
    dtype: DTypeLike,
) -> tuple[Tree, Tree]:
    x_fp8, scale, norm_residuals = quantize_normed(x, norm_scale, epsilon)
    products, matmul_residuals = matmul_forward(
        x_fp8, scale, [flatten_2d(w, 1) for w in weights], accum_dtype(dtype)
    )
    shapes = [(*x.shape[:-1], *w.shape[1:]) for w in weights]
    shaped = [y.astype(dtype).reshape(shape) for y, shape in zip(products, shapes, strict=True)]
    if apply_rope is not None:
        shaped[:-1] = [apply_rope(y, *cos_sin) for y in shaped[:-1]]
    return (x, tuple(shaped)), (
        matmul_residuals,
        norm_residuals,
        cos_sin,
        tuple(map(shape_residual, weights)),
    )


def norm_qkv_backward(
    apply_rope: ApplyRope | None,
    epsilon: float,
    dtype: DTypeLike,
    residuals: Tree,
    cotangents: Tree,
) -> tuple[Array, Array, Weights, None]:
    matmul_residuals, norm_residuals, cos_sin, weights = residuals
    dresidual, dys = cotangents
    shapes, dtypes = [w.shape[1:] for w in weights], [w.dtype for w in weights]
    tokens, row_dims = len(norm_residuals.x), dresidual.ndim - 1
    if apply_rope is None:
        dy_fp8, dy_scale, _ = quantize_rowwise([flatten_2d(dy, row_dims) for dy in dys], E5M2)
    else:
        halves = [dy.reshape(tokens, dy.shape[-2], 2, -1) for dy in dys]
        angles = [angle.reshape(tokens, -1) for angle in cos_sin]
        dy_fp8, dy_scale, _ = rowwise.quantize_rowwise(halves, E5M2, angles)
    dn, dws = packed_matmul_backward(
        matmul_residuals, dy_fp8, dy_scale, accum_dtype(dresidual.dtype), dtypes
    )
    dx, dnorm_scale, _ = norm_backward(
        norm_residuals, dn, dresidual, dy_scale * matmul_residuals.weight_scale
    )
    return (
        dx,
        dnorm_scale,
        tuple(dw.reshape(shape) for dw, shape in zip(dws, shapes, strict=True)),
        None,
    )


norm_qkv.defvjp(norm_qkv_forward, norm_qkv_backward)


def quantize_normed(
    x: Array, norm_scale: Array, epsilon: float
) -> tuple[Array, Array, NormResiduals]:
    """rms_norm(x) · norm_scale in fp8, and its scale."""
    flat, scale = flatten_2d(x, x.ndim - 1), scale_of_normed(norm_scale)
    x_fp8, inverse_rms = rms_norm_rows(flat, norm_scale.astype(jnp.float32) / scale, epsilon, E4M3)
    return x_fp8, scale, NormResiduals(flat, norm_scale, inverse_rms)


def scale_of_normed(norm_scale: Array) -> Array:
    """One scale for all tokens, known before the norm: no element of a normed row exceeds √E ·
    max|norm_scale|.
    """
    return scale_from_amax(
        math.sqrt(len(norm_scale)) * jnp.max(jnp.abs(norm_scale.astype(jnp.float32))), E4M3
    )


def norm_backward(
    residuals: NormResiduals, dn: Array, dresidual: Array, row_factor: Array
) -> tuple[Array, Array, Array]:
    """dx of the norm plus `dresidual`, dnorm_scale, and amax(|dx|) [T], from dn times row_factor
    [T].
    """
    flat = dresidual.reshape(residuals.x.shape)
    dx, dnorm_scale, amax = rms_norm_rows_backward(
        residuals.x, dn, flat, residuals.inverse_rms, residuals.scale, row_factor
    )
    return dx.reshape(dresidual.shape), dnorm_scale, amax


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def norm_mlp(
    x: Array,
    norm_scale: Array,
    weights: Weights,
    epsilon: float,
    activation: Activation,
    tags: tuple[Tag, Tag],
    dtype: DTypeLike,
) -> tuple[Array, Array]:
    """x [..., E], and (activation(n gate) · (n up)) down of n = rms_norm(x) · norm_scale; weights
    [E, F], [E, F], [F, E]. `tags` are applied to n gate and n up."""
    return norm_mlp_forward(x, norm_scale, weights, epsilon, activation, tags, dtype)[0]


def norm_mlp_forward(
    x: Array,
    norm_scale: Array,
    weights: Weights,
    epsilon: float,
    activation: Activation,
    tags: tuple[Tag, Tag],
    dtype: DTypeLike,
) -> tuple[Tree, Tree]:
    y, residuals = mlp_forward(
        *quantize_normed(x, norm_scale, epsilon), weights, activation, tags, dtype
    )
    return (x, y.reshape(x.shape)), residuals


def norm_mlp_backward(
    epsilon: float,
    activation: Activation,
    tags: tuple[Tag, Tag],
    dtype: DTypeLike,
    residuals: Tree,
    cotangents: Tree,
) -> tuple[Array, Array, Weights]:
    dx, dnorm_scale, dweights, _ = mlp_backward(activation, residuals, cotangents)
    return dx, dnorm_scale, dweights


norm_mlp.defvjp(norm_mlp_forward, norm_mlp_backward)


def mlp_forward(
    x_fp8: Array,
    x_scale: Array,
    norm_residuals: NormResiduals,
    weights: Weights,
    activation: Activation,
    tags: tuple[Tag, ...],
    dtype: DTypeLike,
) -> tuple[Array, Tree]:
    """[T, E] of the normed tokens x_fp8 [T, E], and the residuals of `mlp_backward`."""
    products, gate_up_residuals = matmul_forward(x_fp8, x_scale, weights[:2], accum_dtype(dtype))
    gate, up = (tag(y) for tag, y in zip(tags, products, strict=True))
    h_fp8, h_scale = rowwise.quantize_gated_rows(gate, up, activation, E4M3)
    (y,), down_residuals = matmul_forward(h_fp8, h_scale, weights[2:], accum_dtype(dtype))
    y = rescale(y, h_scale * down_residuals.weight_scale, dtype)
    return y, (
        gate_up_residuals,
        down_residuals,
        gate,
        up,
        norm_residuals,
        tuple(map(shape_residual, weights)),
    )


def mlp_backward(
    activation: Activation, residuals: Tree, cotangents: Tree
) -> tuple[Array, Array, Weights, Array]:
    """dx, dnorm_scale, dweights, and amax(|dx|) [T]."""
    gate_up_residuals, down_residuals, gate, up, norm_residuals, weights = residuals
    dresidual, dy = cotangents
    dtypes = [w.dtype for w in weights]
    dy_fp8, dy_scale, squares = quantize_rowwise([flatten_2d(dy, dy.ndim - 1)], E5M2)
    dh, ddown = matmul_backward(down_residuals, [dy_fp8], dy_scale, gate.dtype, dtypes[2:])
    bound = gate_gradient_scale(gate_up_residuals, down_residuals, jnp.sqrt(squares))
    dgates_fp8 = rowwise.gated_backward_rows(gate, up, dh, 1 / bound, activation, E5M2)
    dgate_scale = dy_scale * down_residuals.weight_scale * bound
    dn, dgate_up = matmul_backward(
        gate_up_residuals, dgates_fp8, dgate_scale, accum_dtype(dresidual.dtype), dtypes[:2]
    )
    dx, dnorm_scale, amax = norm_backward(
        norm_residuals, dn, dresidual, dgate_scale * gate_up_residuals.weight_scale
    )
    return dx, dnorm_scale, (*dgate_up, *ddown), amax


def gate_gradient_scale(
    gate_up_residuals: MatmulResiduals, down_residuals: MatmulResiduals, dy_norms: Array
) -> Array:
    """Scales [T] for dgate and dup, before they are computed, from the norms [T] of dy_fp8.

    By Cauchy-Schwarz, |dh| <= |dy| · max row norm of w_down, and the gate and up projections are
    bounded likewise. The bound may be a few thousand times too large, which leaves e5m2 eighteen
    powers of two at full precision.
    """
    largest = float(jnp.finfo(E4M3).max)
    inputs = len(gate_up_residuals.weights_fp8[0])
    gate_or_up = (
        largest
        * gate_up_residuals.x_scale
        * largest
        * gate_up_residuals.weight_scale
        * math.sqrt(inputs)
    )
    down_norms = jnp.sum(jnp.square(down_residuals.weights_fp8[0].astype(jnp.float32)), axis=1)
    # Rounding may have increased the operands, and so the bound, by a quarter.
    bound = 1.25 * dy_norms * jnp.sqrt(jnp.max(down_norms)) * (1 + MAX_SLOPE * gate_or_up)
    return scale_from_amax(bound, E5M2)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8))
def out_norm_mlp(
    x: Array,
    context: Array,
    w_out: Array,
    norm_scale: Array,
    weights: Weights,
    epsilon: float,
    activation: Activation,
    tags: tuple[Tag, Tag, Tag],
    dtype: DTypeLike,
) -> tuple[Array, Array]:
    """x' = x [..., E] + context [..., H, D] times w_out [H, D, E], and `norm_mlp` of x'.

    The norm's kernel computes the residual sum, and in the backward pass the amax of its gradient,
    from which one scale for all tokens follows. The first of `tags` is applied to the unscaled
    product with `w_out`.
    """
    return out_norm_mlp_forward(
        x, context, w_out, norm_scale, weights, epsilon, activation, tags, dtype
    )[0]


def out_norm_mlp_forward(
    x: Array,
    context: Array,
    w_out: Array,
    norm_scale: Array,
    weights: Weights,
    epsilon: float,
    activation: Activation,
    tags: tuple[Tag, Tag, Tag],
    dtype: DTypeLike,
) -> tuple[Tree, Tree]:
    row_dims = x.ndim - 1
    context_fp8, context_scale, _ = quantize_rowwise([flatten_2d(context, row_dims)], E4M3)
    weights_2d = [flatten_2d(w_out, w_out.ndim - 1)]
    (product,), matmul_residuals = matmul_forward(
        context_fp8, context_scale, weights_2d, accum_dtype(dtype)
    )
    product, scale = tags[0](product), scale_of_normed(norm_scale)
    row_factor, norm_factor = (
        context_scale * matmul_residuals.weight_scale,
        norm_scale.astype(jnp.float32) / scale,
    )
    flat = flatten_2d(x, row_dims)
    total, n_fp8, inverse_rms = add_rms_norm_rows(
        flat, product, row_factor, norm_factor, epsilon, E4M3
    )
    norm_residuals = NormResiduals(total, norm_scale, inverse_rms)
    y, mlp_residuals = mlp_forward(
        n_fp8, scale, norm_residuals, weights, activation, tags[1:], dtype
    )
    outputs = total.reshape(x.shape), y.reshape(x.shape)
    return outputs, (
        matmul_residuals,
        mlp_residuals,
        shape_residual(context),
        shape_residual(w_out),
    )


def out_norm_mlp_backward(
    epsilon: float,
    activation: Activation,
    tags: tuple[Tag, Tag, Tag],
    dtype: DTypeLike,
    residuals: Tree,
    cotangents: Tree,
) -> tuple[Array, Array, Array, Array, Weights]:
    matmul_residuals, mlp_residuals, context, w_out = residuals
    dx, dnorm_scale, dweights, amax = mlp_backward(activation, mlp_residuals, cotangents)
    flat, scale = flatten_2d(dx, dx.ndim - 1), scale_from_amax(jnp.max(amax), E5M2)
    dcontext, [dw_out] = one_scale_matmul_backward(
        matmul_residuals, [flat], scale, accum_dtype(context.dtype), [w_out.dtype]
    )
    dcontext = dcontext.astype(context.dtype).reshape(context.shape[1:])
    return dx, dcontext, dw_out.reshape(w_out.shape[1:]), dnorm_scale, dweights


out_norm_mlp.defvjp(out_norm_mlp_forward, out_norm_mlp_backward)
