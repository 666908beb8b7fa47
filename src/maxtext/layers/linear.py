"""Matrix products over weights, the order of their gradients, and dropout."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.custom_derivatives import SymbolicZero

from maxtext.kernels.fp8.quantize import sum_products
from maxtext.kernels.quantized_matmul import quantized_matmul
from maxtext.kernels.weight_only import QuantizedWeight, weight_only_matmul
from maxtext.layers.joined import Joined
from maxtext.layers.parameters import Initializer
from maxtext.sharding.manual import only_platform


class Linear(nnx.Module):
    """x[..., inputs] -> [..., outputs]: a kernel of shape (*inputs, *outputs), an optional bias of
    shape outputs.

    Weights are kept in their own dtype and cast to the computation's on use; a kernel may be
    `QuantizedWeight`. `exact`: not in eight bits, whatever the initializer's recipe is.
    """

    def __init__(
        self,
        initializer: Initializer,
        *,
        in_shape: Sequence[int],
        out_shape: Sequence[int],
        axes: Sequence[str | None],
        dtype: Any,
        bias: bool = False,
        exact: bool = False,
    ):
        self.rank, self.dtype, self.recipe = (
            len(in_shape),
            dtype,
            "" if exact else initializer.recipe,
        )
        self.kernel = initializer.weight(
            "weight", in_shape, out_shape, axes, contracted=range(self.rank)
        )
        self.bias = initializer.constant(out_shape, 0.0, axes[len(in_shape) :]) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        return together(x, self)[0]


def together(x: jax.Array, *linears: Linear, weights_early: bool = False) -> list[jax.Array]:
    """Each of x; by one program where that is faster. All have the same inputs and dtype.

    `weights_early`: going back, see `weights_first`.
    """
    rank, dtype, recipe = linears[0].rank, linears[0].dtype, linears[0].recipe
    kernels = [linear.kernel[...] for linear in linears]
    if isinstance(kernels[0], Joined):
        return with_biases(kernels[0].products(x, dtype), linears)
    # Cast first, so that gradients wait in the dtype of the product and not in the weights' own.
    kernels = [
        kernel if isinstance(kernel, QuantizedWeight) else kernel.astype(dtype)
        for kernel in kernels
    ]
    if weights_early:
        x, kernels = weights_first(x, kernels)
    if recipe and not isinstance(kernels[0], QuantizedWeight):
        found = [*quantized_matmul(x, tuple(kernels), rank, recipe, dtype, only_platform())]
    elif len(kernels) > 2 and not isinstance(kernels[0], QuantizedWeight):
        each = zip(copies(x, len(kernels)), kernels, strict=True)
        found = [
            weight_only_matmul(x, [kernel], rank, dtype, only_platform())[0] for x, kernel in each
        ]
    else:
        found = weight_only_matmul(x, kernels, rank, dtype, only_platform())
    return with_biases(found, linears)


def with_biases(found: Sequence[jax.Array], linears: Sequence[Linear]) -> list[jax.Array]:
    return [
        y if linear.bias is None else y + linear.bias[...].astype(linear.dtype)
        for y, linear in zip(found, linears, strict=True)
    ]


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def copies(x: jax.Array, count: int) -> tuple[jax.Array, ...]:
    """x, for so many products. Going back, their gradients are added in the order in which the
    compiler for GPUs can make each addition a part of a product; autodiff's own leaves one for a
    pass of its own."""
    return (x,) * count


copies.defvjp(
    lambda x, count: ((x,) * count, None), lambda count, kept, gradients: (sum_products(gradients),)
)


@jax.custom_jvp
def weights_first(x: Any, weights: Any) -> tuple[Any, Any]:
    """Both as they are. Going back, the gradients of the weights are there before those of x are
    used.

    A compiler may put off a weight's gradient, which nothing waits for, and keep the activations
    that it needs until then: for the weights of the head, the gradient of all logits through the
    layers' whole backward pass.
    """
    return x, weights


def tangents_together(primals: tuple, tangents: tuple) -> tuple[tuple, tuple]:
    """The transpose of a barrier is a barrier: only the backward pass has one. Frozen weights need
    no gradient.
    """
    leaves, tree = jax.tree.flatten(tangents, is_leaf=lambda leaf: isinstance(leaf, SymbolicZero))
    moving = [place for place, leaf in enumerate(leaves) if not isinstance(leaf, SymbolicZero)]
    if len(moving) > 1:
        held = jax.lax.optimization_barrier([leaves[place] for place in moving])
        for place, leaf in zip(moving, held, strict=True):
            leaves[place] = leaf
    return weights_first(*primals), jax.tree.unflatten(tree, leaves)


weights_first.defjvp(tangents_together, symbolic_zeros=True)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zeroes a fraction of the values and scales up the rest; nothing without a key
    (evaluation).
    """
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)
