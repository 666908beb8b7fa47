"""Models whose kernels are kept as integers: which weights that are, and how they lie on the mesh.

A kernel says itself that it may be quantized, by the dimensions that its product adds up over
(`Initializer.kernel`): those of `Linear` and of experts do. Embeddings, norms, biases, routers and all
that is small stay as they are. In the tree of a model's weights, a `QuantizedWeight` stands where the
array was, so `Template.bind` takes both.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout

from maxtext.kernels.weight_only import QuantizedWeight, quantize_weight
from maxtext.layers.parameters import Template, Tree
from maxtext.sharding.manual import only_platform


def quantize_weights(template: Template, weights: Tree, dtype: Any) -> Tree:
    """All kernels that may be quantized, in `dtype`; None: all weights as they are."""
    if dtype is None:
        return weights
    return by_kernel(
        lambda leaf, contracted: quantize_weight(leaf, contracted, dtype), template, weights
    )


def described(template: Template, dtype: Any) -> tuple[Tree, Tree]:
    """The axes and the abstract weights of the model with its kernels in `dtype`; None: with all
    weights as they are.

    A scale is split like its kernel along outputs; along what a product adds up, it is whole.
    """
    if dtype is None:
        return template.axes, template.weights
    weights = jax.eval_shape(
        lambda weights: quantize_weights(template, weights, dtype), template.weights
    )
    axes = by_kernel(
        lambda names, contracted: QuantizedWeight(
            names, tuple(None if place in contracted else name for place, name in enumerate(names))
        ),
        template,
        template.axes,
    )
    return axes, weights


def laid_out(template: Template, weights: Tree) -> Tree:
    """On one GPU, with the numbers that a product adds up side by side in memory, as products of
    few rows want them. The weights that are given are gone."""
    if only_platform() != "gpu":
        return weights

    def lay_out(kernel: Any, contracted: tuple[int, ...]) -> Any:
        if not isinstance(kernel, QuantizedWeight) or kernel.dtype != jnp.int8:
            return kernel
        order = (*(axis for axis in range(kernel.ndim) if axis not in contracted), *contracted)
        form = Format(Layout(order), kernel.qvalue.sharding)
        return replace(kernel, qvalue=jax.device_put(kernel.qvalue, form, donate=True))

    return by_kernel(lay_out, template, weights)


def by_kernel(
    change: Callable[[Any, tuple[int, ...]], Any], template: Template, tree: Tree
) -> Tree:
    """A tree like the weights, changed where a kernel may be quantized."""
    return jax.tree.map(
        lambda _, leaf, contracted: change(leaf, contracted) if contracted else leaf,
        template.weights,
        tree,
        template.contracted,
    )
