"""The layout of weights for inference on one GPU, and conversions between layouts.

Projections of one input are packed into one weight (packed QKV, packed gate-up), and transposed
if they are quantized, or where a decode step has a single row. Checkpoints have each projection
under its own name. A model that is built with packed layers says in the metadata of a parameter
how it is stored (`WeightLayout`); `pack_weights`, `transpose_weights` and `unpack_weights` convert
the weights of one layout to another, array by array, and free what they consume.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from maxtext.common.trees import flatten_dict, unflatten_dict
from maxtext.common.types import Tree
from maxtext.kernels.decode import gemv
from maxtext.kernels.decode.gemv_products import GROUP
from maxtext.kernels.weight_only import (
    INT4,
    MAX_GROUP,
    PACKED_OFFSET,
    STORAGE,
    QuantizedWeight,
    groups_per_dim,
)
from maxtext.kernels.weight_only import pack as pack_codes
from maxtext.kernels.weight_only import unpack as unpack_codes
from maxtext.layers.context import BuildContext
from maxtext.layers.parameters import Template

SMALL = 2**20  # elements below which the layout of a weight does not matter
Path = tuple[Any, ...]


@dataclass(frozen=True)
class WeightLayout:
    """How the weight and the bias of one or several projections are stored."""

    names: tuple[str, ...]  # of packed projections, in the module that has them; (): one projection
    in_shape: tuple[int, ...]
    out_shapes: tuple[tuple[int, ...], ...]
    transposed: bool

    @property
    def splits(self) -> list[int]:
        """Where the outputs of each projection but the last end."""
        return list(accumulate(math.prod(shape) for shape in self.out_shapes[:-1]))

    @property
    def matrix_shape(self) -> tuple[int, int]:
        inputs, outputs = math.prod(self.in_shape), sum(map(math.prod, self.out_shapes))
        return (outputs, inputs) if self.transposed else (inputs, outputs)

    def weight(self, dtype: DTypeLike) -> nnx.Param:
        """A parameter of this layout, to be filled by `pack_weights`."""
        return nnx.Param(jnp.zeros(self.matrix_shape, dtype), axes=(None, None), layout=self)

    def bias(self, dtype: DTypeLike) -> nnx.Param:
        outputs = sum(map(math.prod, self.out_shapes))
        return nnx.Param(jnp.zeros(outputs, dtype), axes=(None,), layout=self)

    def use_gemv(self, weight_dtype: DTypeLike, dtype: DTypeLike, context: BuildContext) -> bool:
        """Whether the GEMV kernel takes each projection."""
        is_multiplied = context.quantized_weights or jnp.dtype(weight_dtype) == jnp.dtype(dtype)
        outputs = list(map(math.prod, self.out_shapes))
        supported = supports_gemv(self.in_shape, outputs, dtype, context)
        return bool(self.transposed and supported and is_multiplied)


def supports_gemv(
    in_shape: Sequence[int], outputs: Sequence[int], dtype: DTypeLike, context: BuildContext
) -> bool:
    """Whether the GEMV kernels take weights of these inputs and numbers of outputs. They read int4
    in groups of 128 inputs, and the groups of some shapes are smaller."""
    depth, weight_format = math.prod(in_shape), context.quantized_weights
    if weight_format == INT4:
        groups = groups_per_dim(in_shape, range(len(in_shape)), MAX_GROUP[INT4])
        if math.prod(groups) * GROUP != depth:
            return False
    return all(
        gemv.supports(depth, size, dtype, weight_format, context.capability) for size in outputs
    )


def is_transposed(context: BuildContext) -> bool:
    """Whether weights are stored as [N, K]."""
    return context.decode_rows == 1 or bool(context.quantized_weights)


def packing_unsupported_reason(context: BuildContext) -> str | None:
    """Why projections are not packed; None if they are."""
    if context.adapters is not None and context.adapters.dora:
        return "has DoRA adapters"
    if context.quantized_weights and context.adapters is not None:
        return "packs quantized weights without adapters only"
    if context.scanned:
        return "layers are stacked (scan_layers=true)"
    return context.single_gpu_unsupported_reason()


def leaf_layouts(template: Template) -> dict[Path, WeightLayout | None]:
    """The layout of each parameter by its path; None: as in a checkpoint."""
    return {
        path: variable.get_metadata().get("layout")
        for path, variable in nnx.to_flat_state(template.state)
    }


def source_paths(path: Path, names: Sequence[str]) -> list[Path]:
    """Where the checkpoint has the projections with these names of a packed parameter."""
    if not names:
        return [path]
    *parents, _, leaf = path
    return [(*parents, name, leaf) for name in names]


def pack_weights(template: Template, weights: Tree) -> Tree:
    """Weights as checkpoints have them, in the layout of `template`. Packed arrays are deleted: the
    device may not have the memory for both."""
    flat = flatten_dict(weights)
    packed = {}
    for path, layout in leaf_layouts(template).items():
        if layout is None:
            packed[path] = flat[path]
            continue
        packed[path] = jax.block_until_ready(pack(path, layout, flat))
        for source in source_paths(path, layout.names):
            delete(flat[source])
    return unflatten_dict(packed)


def delete(weight: Tree) -> None:
    for array in jax.tree.leaves(weight):
        array.delete()


def pack(path: Path, layout: WeightLayout, flat: dict[Path, Tree]) -> Tree:
    """The parameter at a path of the arrays that checkpoints have instead."""
    arrays = [flat[source] for source in source_paths(path, layout.names)]
    concatenate = concatenate_weights if path[-1] == "weight" else concatenate_biases
    return concatenate(arrays, len(layout.in_shape), layout.transposed)


@partial(jax.jit, static_argnums=(1, 2))
def concatenate_weights(weights: list[Tree], input_dims: int, transposed: bool) -> Tree:
    if all(isinstance(weight, QuantizedWeight) for weight in weights):
        assert transposed
        return transpose_quantized(weights, input_dims)
    matrices = [w.reshape(math.prod(w.shape[:input_dims]), -1) for w in weights]
    packed = jnp.concatenate(matrices, axis=1)
    return packed.T if transposed else packed


def transpose_quantized(weights: list[QuantizedWeight], input_dims: int) -> QuantizedWeight:
    """One weight [N, K] of weights [inputs, outputs]; int4 values are packed along the inputs."""

    def transposed(parts: list[jax.Array]) -> jax.Array:
        matrices = [part.reshape(math.prod(part.shape[:input_dims]), -1) for part in parts]
        return jnp.concatenate([matrix.T for matrix in matrices])

    qvalue = transposed([weight.qvalue for weight in weights])
    scale = transposed([weight.scale for weight in weights])
    if weights[0].format != INT4 or qvalue.shape[1] % 2:
        return QuantizedWeight(qvalue, scale)
    return QuantizedWeight(pack_codes(qvalue.astype(jnp.int8) + PACKED_OFFSET), scale, INT4)


@partial(jax.jit, static_argnums=(1, 2))
def concatenate_biases(biases: list[jax.Array], input_dims: int, transposed: bool) -> jax.Array:
    return jnp.concatenate([bias.reshape(-1) for bias in biases])


def transpose_weights(source: Template, target: Template, weights: Tree) -> Tree:
    """Weights of the template `source` in the layout of `target`; the two differ in which weights
    are transposed. Arrays that change are deleted."""
    flat, layouts, abstract = (
        flatten_dict(weights),
        leaf_layouts(source),
        flatten_dict(target.weights),
    )
    converted = {}
    for path, new in leaf_layouts(target).items():
        array, old = flat[path], layouts[path]
        if old == new:
            converted[path] = array
            continue
        converted[path] = change_layout(
            array,
            old is not None and old.transposed,
            new is not None and new.transposed,
            inputs_of(old or new),
            abstract[path].shape,
        )
        array.delete()
    return unflatten_dict(converted)


def inputs_of(layout: WeightLayout | None) -> int:
    assert layout is not None
    return math.prod(layout.in_shape)


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def change_layout(
    array: jax.Array, was_transposed: bool, transposed: bool, inputs: int, shape: tuple[int, ...]
) -> jax.Array:
    if array.ndim == 1 or len(shape) == 1:  # a bias
        return array.reshape(shape)
    matrix = array.T if was_transposed else array.reshape(inputs, -1)
    return (matrix.T if transposed else matrix).reshape(shape)


def unpack_weights(template: Template, weights: Tree) -> Tree:
    """Weights as checkpoints have them. Packed ones are in the host's memory: the device
    may not have the memory for both."""
    flat, unpacked = flatten_dict(weights), {}
    for path, layout in leaf_layouts(template).items():
        if layout is None:
            unpacked[path] = flat[path]
            continue
        if isinstance(flat[path], QuantizedWeight):
            unpacked |= unpack_quantized(path, layout, flat[path])
            continue
        array = np.asarray(flat[path])
        is_weight = path[-1] == "weight"
        if is_weight and layout.transposed:
            array = array.T
        in_shape = layout.in_shape if is_weight else ()
        parts = np.split(array, layout.splits, axis=-1)
        for source, part, shape in zip(
            source_paths(path, layout.names), parts, layout.out_shapes, strict=True
        ):
            unpacked[source] = part.reshape(*in_shape, *shape)
    return unflatten_dict(unpacked)


def unpack_quantized(
    path: Path, layout: WeightLayout, weight: QuantizedWeight
) -> dict[Path, QuantizedWeight]:
    """The inverse of `transpose_quantized`."""
    qvalue = np.asarray(weight.qvalue)
    if weight.packed:
        codes = np.asarray(unpack_codes(jnp.asarray(qvalue))).astype(np.int8) - PACKED_OFFSET
        qvalue = codes.astype(STORAGE[INT4])
    parts = {}
    for source, codes_T, scale_T, out_shape in zip(
        source_paths(path, layout.names),
        np.split(qvalue, layout.splits),
        np.split(np.asarray(weight.scale), layout.splits),
        layout.out_shapes,
        strict=True,
    ):
        shape = (*layout.in_shape, *out_shape)
        groups = groups_of(layout.in_shape, scale_T.shape[1])
        parts[source] = QuantizedWeight(
            codes_T.T.reshape(shape), scale_T.T.reshape(*groups, *out_shape)
        )
    return parts


def groups_of(in_shape: Sequence[int], count: int) -> tuple[int, ...]:
    """The groups along each input dimension: `count` together, of neighbours in the flat order."""
    group, groups = math.prod(in_shape) // count, []
    for size in reversed(in_shape):
        within = math.gcd(size, group)
        groups.append(size // within)
        group //= within
    return tuple(reversed(groups))


def gemv_unsupported_reason(
    template: Template, dtype: DTypeLike, context: BuildContext
) -> str | None:
    """Why the GEMV kernel does not take every large weight of a model that computes in `dtype`;
    None if it does. Embeddings are looked up, not multiplied, and experts have a kernel of their
    own."""
    for path, variable in nnx.to_flat_state(template.state):
        layout = variable.get_metadata().get("layout")
        size = math.prod(variable.get_value().shape)
        if path[0] == "embedder" or "experts" in path or size < SMALL or path[-1] == "bias":
            continue
        name = ".".join(map(str, path))
        if layout is None or not layout.transposed:
            return f"{name} is not transposed"
        if not layout.use_gemv(variable.get_value().dtype, dtype, context):
            return f"{name} has a shape or dtype that the GEMV kernel does not take"
    return None
