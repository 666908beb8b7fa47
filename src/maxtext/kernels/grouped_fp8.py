"""Grouped products in fp8 for training: rows of tokens, and of their gradients, times kernels, all
as e4m3.

Rows have a scale each and kernels one for all, powers of two of the moment. So what stands in rows
of no group, which can be anything, does nothing to the others; and gradients, whose rows differ
much in size, need no format that reaches further. The gradient of the kernels is a product in the
dtype of the rows. On one Hopper GPU the other two are products of eight bits (`grouped_hopper`),
where widths are multiples of 128; elsewhere the rounded numbers are multiplied in the dtype of the
rows, to the same effect.

Shapes: N rows, X groups, E and M row widths.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from maxtext.common.log import say_once
from maxtext.kernels.fp8.quantize import E4M3, QuantizedTensor, quantize
from maxtext.kernels.grouped import grouped_product, hopper_has, is_hopper, no_gradient

WHOLE = 128  # numbers of eight bits that are added up at a time


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def product(rows: Array, kernels: Array, sizes: Array, platform: str | None = None) -> Array:
    """As `grouped_product`: rows [N, E], kernels [X, E, M], sizes [X] -> [N, M]."""
    return forward(rows, kernels, sizes, platform)[0]


def forward(rows: Array, kernels: Array, sizes: Array, platform: str | None) -> tuple[Array, Any]:
    values = quantize(kernels, E4M3)
    return times(rows, values, sizes, platform), (rows, values, sizes)


def backward(
    platform: str | None, kept: tuple[Array, QuantizedTensor, Array], cotangent: Array
) -> tuple[Array, Array, Any]:
    rows, values, sizes = kept
    of_rows = times(cotangent, values, sizes, platform, back=True)
    like = values.qvalue.astype(rows.dtype)  # the gradient does not depend on what they are
    _, pull = jax.vjp(lambda kernels: grouped_product(rows, kernels, sizes, platform), like)
    return of_rows, *pull(cotangent), no_gradient(sizes)


product.defvjp(forward, backward)


def times(
    rows: Array, kernels: QuantizedTensor, sizes: Array, platform: str | None, back: bool = False
) -> Array:
    """Rows, rounded, times kernels, or their transposes on the way back."""
    some = quantize(rows, E4M3, (1,))
    able = is_hopper(platform) and hopper_has(
        rows, jax.ShapeDtypeStruct(kernels.qvalue.shape, rows.dtype)
    )
    able = able and not any(size % WHOLE for size in kernels.qvalue.shape[1:])
    turned = kernels.qvalue.swapaxes(1, 2)
    if platform == "gpu":
        say_once(f"experts are multiplied in {'fp8' if able else rows.dtype.name}, rounded to fp8")
    if able:
        from maxtext.kernels import grouped_hopper

        numbers = kernels.qvalue if back else turned
        y = grouped_hopper.product(some.qvalue, numbers, sizes, transposed=True, dtype=rows.dtype)
    else:
        numbers = turned if back else kernels.qvalue
        wide = (
            jnp.float32 if rows.dtype == jnp.float16 else rows.dtype
        )  # whose largest number is soon reached
        y = grouped_product(some.qvalue.astype(wide), numbers.astype(wide), sizes, platform)
    scale = some.scale * kernels.scale
    if platform is None:
        scale = jnp.where(
            jnp.arange(len(rows)) < jnp.sum(sizes), scale, 0
        )  # there zeros are promised
    return (y * scale[:, None].astype(y.dtype)).astype(rows.dtype)
