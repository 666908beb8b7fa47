"""The output head in fp8 and its cross-entropy, on one NVIDIA GPU.

    logits = x w;   loss = logsumexp(logits) - logits[target]

Shapes: T tokens, E embed_dim, V vocabulary.

Probabilities are at most one, so the scales of dlogits follow from the cotangents, and the kernel
that computes dlogits quantizes it.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from maxtext.common.types import Tree
from maxtext.kernels import cross_entropy as triton_cross_entropy
from maxtext.kernels.fp8.matmul import matmul_backward, matmul_forward, quantize_rowwise
from maxtext.kernels.fp8.quantize import (
    E4M3,
    E5M2,
    accum_dtype,
    flatten_2d,
    rescale,
    scale_from_amax,
    shape_residual,
)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def head_cross_entropy(
    x: Array, weight: Array, targets: Array, dtype: DTypeLike
) -> tuple[Array, Array]:
    """(loss, log of the partition sum) [...] of x [..., E] times weight [E, V], in `dtype`, at
    targets [...].
    """
    return head_cross_entropy_forward(x, weight, targets, dtype)[0]


def head_cross_entropy_forward(
    x: Array, weight: Array, targets: Array, dtype: DTypeLike
) -> tuple[Tree, Tree]:
    x_fp8, x_scale, _ = quantize_rowwise([flatten_2d(x, x.ndim - 1)], E4M3)
    (logits,), matmul_residuals = matmul_forward(x_fp8, x_scale, [weight], accum_dtype(dtype))
    flat = targets.reshape(-1)
    largest, log_sum, target_logit = triton_cross_entropy.log_sums(
        logits, flat, x_scale * matmul_residuals.weight_scale
    )
    outputs = log_sum - target_logit, log_sum + largest
    residuals = (
        matmul_residuals,
        logits,
        flat,
        largest,
        log_sum,
        shape_residual(x),
        shape_residual(weight),
    )
    return tuple(output.reshape(targets.shape) for output in outputs), residuals


def head_cross_entropy_backward(
    dtype: DTypeLike, residuals: Tree, cotangents: tuple[Array, Array]
) -> tuple[Array, Array, None]:
    matmul_residuals, logits, targets, largest, log_sum, x, weight = residuals
    dloss, dpartition = (cotangent.reshape(-1) for cotangent in cotangents)
    scale = scale_from_amax(jnp.abs(dloss) + jnp.abs(dpartition), E5M2)
    factors = -dloss / scale, (dloss + dpartition) / scale
    logit_scale = matmul_residuals.x_scale * matmul_residuals.weight_scale
    dlogits_fp8 = triton_cross_entropy.logits_backward(
        logits, targets, largest, log_sum, *factors, E5M2, logit_scale
    )
    dx, [dw] = matmul_backward(
        matmul_residuals, [dlogits_fp8], scale, accum_dtype(x.dtype), [weight.dtype]
    )
    return (
        rescale(dx, scale * matmul_residuals.weight_scale, x.dtype).reshape(x.shape[1:]),
        dw,
        None,
    )


head_cross_entropy.defvjp(head_cross_entropy_forward, head_cross_entropy_backward)
