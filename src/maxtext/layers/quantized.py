"""Models with quantized weights, for inference (fp8, int8, int4 or mxfp4) and under adapters
(QLoRA: int8, int4 or nf4): which weights, and their sharding.

A weight may be quantized if its metadata names the dimensions that its matmul sums over
(`Initializer.weight`): those of `Linear` and of experts do; in mxfp4, experts alone. Embeddings,
norms, biases, routers and everything small stay in floats. In the tree of a model's weights, a
`QuantizedWeight` stands in place of the array; `Template.bind` takes both.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.experimental.layout import Format, Layout
from jax.typing import DTypeLike

from maxtext.common.trees import Path, flatten_dict, unflatten_dict
from maxtext.common.types import Tree
from maxtext.kernels.weight_matmul import EIGHT_BIT
from maxtext.kernels.weight_only import INT8, MXFP4, QuantizedWeight, quantize_weight
from maxtext.layers.adapters import HEAD
from maxtext.layers.context import BuildContext
from maxtext.layers.parameters import Initializer, Quantize, Template


def quantize_weights(
    template: Template,
    weights: Tree,
    dtype: DTypeLike | None,
    group: int | None = None,
    head: bool = True,
) -> Tree:
    """The weights, quantized to `dtype` where that is possible; unchanged if `dtype` is None.
    `group` is as in `quantize_weight`. Without `head`, as under adapters, the output head stays in
    floats, and four-bit values are packed."""
    if dtype is None:
        return weights
    return map_quantizable(
        lambda leaf, contracted, packed: quantize_weight(leaf, contracted, dtype, group, packed),
        template,
        weights,
        dtype,
        head,
    )


def initial_quantizer(
    dtype: DTypeLike | None, group: int | None = None, head: bool = True
) -> Quantize | None:
    """For `Initializer.quantize`; the same weights are quantized as in `quantize_weights`."""
    if dtype is None:
        return None

    def quantize(values: jax.Array, contracted: tuple[int, ...], initializer: Initializer) -> Tree:
        if not head and initializer.paths == (HEAD,):
            return values
        if not quantizes(dtype, initializer.paths[0].split("/")):
            return values
        stacked_last = initializer.stack_axis is not None and initializer.stack_axis >= values.ndim
        return quantize_weight(values, contracted, dtype, group, not head and not stacked_last)

    return quantize


def quantize_base(template: Template, weights: Tree, dtype: str, group: int) -> Tree:
    """The frozen weights under adapters (QLoRA) in int8, int4 or nf4, but for the output head. The
    arrays that are given are deleted one after the other, so that one weight at a time exists
    twice."""
    program = jax.jit(quantize_weight, static_argnums=(1, 2, 3, 4))

    def quantize(leaf: jax.Array, contracted: tuple[int, ...], packed: bool) -> QuantizedWeight:
        quantized = jax.block_until_ready(program(leaf, contracted, dtype, group, packed))
        leaf.delete()
        return quantized

    return map_quantizable(quantize, template, weights, dtype, head=False)


def abstract_quantized(
    template: Template, dtype: DTypeLike | None, group: int | None = None, head: bool = True
) -> tuple[Tree, Tree]:
    """The logical axes and the abstract weights of the model quantized to `dtype`, if not None;
    `group` and `head` are as in `quantize_weights`.

    A scale is sharded like its weight along outputs, and replicated along contracted dimensions.
    """
    if dtype is None:
        return template.axes, template.weights
    weights = jax.eval_shape(
        lambda weights: quantize_weights(template, weights, dtype, group, head), template.weights
    )

    def axes_of(leaf: Tree, names: tuple[str | None, ...], contracted: tuple[int, ...]) -> Tree:
        if not isinstance(leaf, QuantizedWeight):
            return names
        if leaf.format == MXFP4:
            *outer, _, columns = names
            return QuantizedWeight((*outer, columns, None), (*outer, columns, None), leaf.packed)
        scale_names = tuple(None if i in contracted else name for i, name in enumerate(names))
        return QuantizedWeight(names, scale_names, leaf.packed)

    axes = jax.tree.map(
        axes_of,
        weights,
        template.axes,
        template.contracted,
        is_leaf=lambda leaf: isinstance(leaf, QuantizedWeight),
    )
    return axes, weights


def layout_for_decode(template: Template, weights: Tree, context: BuildContext) -> Tree:
    """fp8 and int8 weights with the contracted dimensions minor in memory, as the kernels for few
    rows and 8-bit products read them on one GPU; weights of a `WeightLayout` are so already. The
    kernel for int8 experts reads rows of outputs. The arrays that are given are donated."""
    if context.only_platform != "gpu":
        return weights

    def set_layout(path: Path, weight: Tree) -> Tree:
        dims = contracted[path]
        if not dims or not isinstance(weight, QuantizedWeight) or weight.format not in EIGHT_BIT:
            return weight
        if weight.format == INT8 and "experts" in path:
            return weight
        order = (*(axis for axis in range(weight.ndim) if axis not in dims), *dims)
        layout = Format(Layout(order), weight.qvalue.sharding)
        return replace(weight, qvalue=jax.device_put(weight.qvalue, layout, donate=True))

    contracted = flatten_dict(template.contracted)
    flat = flatten_dict(weights)
    return unflatten_dict({path: set_layout(path, weight) for path, weight in flat.items()})


def quantizes(dtype: DTypeLike, path: Sequence[Any]) -> bool:
    """Whether weights at this path are quantized, if their metadata allows it: mxfp4 is the format
    of experts, and other matmuls have no kernels for it."""
    return dtype != MXFP4 or "experts" in path


def map_quantizable(
    function: Callable[[Tree, tuple[int, ...], bool], Tree],
    template: Template,
    tree: Tree,
    dtype: DTypeLike,
    head: bool = True,
) -> Tree:
    """A tree like the weights, with `function(leaf, contracted dimensions, packed)` for each weight
    that may be quantized to `dtype`. Without `head`, the output head may not be, and other weights
    are packed, unless layers are stacked along their last dimension."""
    contracted = {
        path: dims if quantizes(dtype, path) and (head or path[0] != HEAD) else ()
        for path, dims in flatten_dict(template.contracted).items()
    }
    return jax.tree.map(
        lambda _, leaf, dims, axes: (
            function(leaf, dims, not head and axes[-1] != "layers") if dims else leaf
        ),
        template.weights,
        tree,
        unflatten_dict(contracted),
        template.axes,
    )
