"""The parameters of a model by name, one layer at a time, whether layers are stacked or not.

A model stores the parameters of its layers stacked (scanned) or separately (unrolled). By name,
every layer has its own: `layers/{i}/attention/query/weight`, where i counts over the whole model.
A parameter outside the layers is named by its path in the model: `embedder/embedding`. So one
weight folder serves a scanned and an unrolled model, on any mesh.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from maxtext.checkpoint.tensors import (
    Progress,
    Shape,
    TensorInfo,
    TensorSource,
    check_names_and_shapes,
)
from maxtext.common.trees import flatten_dict
from maxtext.common.types import Tree
from maxtext.kernels.weight_only import QuantizedWeight
from maxtext.layers.parameters import Template
from maxtext.layers.specs import Segment

ParamPath = tuple[str | int, ...]
Bounds = tuple[tuple[int, int], ...]  # of a block of an array: (start, stop) along each axis
# (path, named parameters of the leaf, the leaf's info, its sharding, host_bytes) -> leaf
LoadLeaf = Callable[[ParamPath, Mapping[str, "ParamInfo"], TensorInfo, Tree, int], Tree]


@dataclass(frozen=True)
class ParamInfo:
    """Where a named parameter is stored in a model's tree, and what it is."""

    path: ParamPath
    stack_index: int | None  # of its layer along the stack axis; None: it is not stacked
    stack_axis: int
    shape: Shape  # of one layer
    dtype: np.dtype
    fixed_dtype: bool = False  # it keeps this dtype whatever the others have


def param_dtypes(param_infos: Mapping[str, ParamInfo], dtype: np.dtype) -> dict[str, np.dtype]:
    """The dtypes of a model's parameters if floats are to be `dtype`."""
    return {name: info.dtype if info.fixed_dtype else dtype for name, info in param_infos.items()}


def find_param_infos(template: Template, segments: Sequence[Segment]) -> dict[str, ParamInfo]:
    """All parameters of a model by name: those outside the layers, then layer by layer."""
    param_infos: dict[str, ParamInfo] = {}
    layers: dict[int, dict[str, ParamInfo]] = {}
    first_layers = [0, *itertools.accumulate(segment.layers for segment in segments)]
    axes, fixed = flatten_dict(template.axes), flatten_dict(template.fixed_dtype)
    for path, leaf in flatten_dict(template.weights).items():
        dtype = np.dtype(leaf.dtype)
        if path[0] != "layers":
            info = ParamInfo(path, None, 0, leaf.shape, dtype, fixed[path])
            param_infos[join(path)] = info
            continue
        _, segment_index, _, block, *rest = path
        segment = segments[int(segment_index)]
        if "layers" in axes[path]:
            axis = axes[path].index("layers")
            shape = leaf.shape[:axis] + leaf.shape[axis + 1 :]
            infos = [
                (repeat, ParamInfo(path, repeat, axis, shape, dtype, fixed[path]))
                for repeat in range(segment.repeats)
            ]
        else:
            repeat, *rest = rest
            infos = [(int(repeat), ParamInfo(path, None, 0, leaf.shape, dtype, fixed[path]))]
        for repeat, info in infos:
            layer = first_layers[int(segment_index)] + repeat * len(segment.pattern) + int(block)
            layers.setdefault(layer, {})[join(("layers", layer, *rest))] = info
    for layer in sorted(layers):
        param_infos |= layers[layer]
    return param_infos


def join(path: ParamPath) -> str:
    return "/".join(map(str, path))


@dataclass(frozen=True)
class ModelWeights:
    """The weights of a model in memory as a source of named, dequantized tensors."""

    weights: Tree
    param_infos: Mapping[str, ParamInfo]
    title: str = "the model"

    @cached_property
    def leaves(self) -> dict[ParamPath, Tree]:
        return flatten_dict(self.weights)

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        tensors = {}
        for name, info in self.param_infos.items():
            leaf = self.leaves[info.path]
            dtype = info.dtype if isinstance(leaf, QuantizedWeight) else np.dtype(leaf.dtype)
            tensors[name] = TensorInfo(dtype, info.shape)
        return tensors

    def get(self, name: str) -> jax.Array | QuantizedWeight:
        """A parameter as the model stores it, possibly quantized."""
        info = self.param_infos[name]
        leaf = self.leaves[info.path]
        if info.stack_index is None:
            return leaf
        # The index is traced, so that one compiled slice serves all layers.
        return jax.tree.map(
            lambda array: jax.lax.dynamic_index_in_dim(
                array, info.stack_index, info.stack_axis, keepdims=False
            ),
            leaf,
        )

    def read(self, name: str) -> np.ndarray:
        weight = self.get(name)
        if isinstance(weight, QuantizedWeight):
            return np.asarray(weight.astype(self.param_infos[name].dtype))
        return np.asarray(weight)

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        for name in self.param_infos:
            yield name, self.read(name)


def load_weights(
    source: TensorSource,
    param_infos: Mapping[str, ParamInfo],
    template: Template,
    shardings: Tree | None = None,
    dtype: DTypeLike | None = None,
    progress: Progress | None = None,
    host_bytes: int = 4 * 10**9,
    load: LoadLeaf | None = None,
) -> Tree:
    """Load a model's weights from a source that must have exactly these parameters.

    Weights get the template's dtype, or `dtype` where that is floating, and are sharded by
    `shardings` (a tree like the weights; None: on the first device). The host holds one parameter
    of a layer and as many blocks for devices as fit into host_bytes, but at least one. `load`
    replaces the loading of a leaf, to quantize it for example.
    """
    load = load or (lambda path, *rest: load_leaf(source, *rest))
    check_names_and_shapes(source, {name: info.shape for name, info in param_infos.items()})
    params_of_leaf: dict[ParamPath, dict[str, ParamInfo]] = {}
    for name, info in param_infos.items():
        params_of_leaf.setdefault(info.path, {})[name] = info
    leaves, fixed = flatten_dict(template.weights), flatten_dict(template.fixed_dtype)
    leaf_shardings = flatten_dict(shardings) if shardings is not None else {}
    total_bytes = sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in leaves.values())
    loaded_bytes = 0
    tree: dict = {}
    for path, leaf in leaves.items():
        casts = dtype is not None and jnp.issubdtype(leaf.dtype, jnp.floating) and not fixed[path]
        leaf_info = TensorInfo(np.dtype(dtype if casts else leaf.dtype), leaf.shape)
        sharding = leaf_shardings.get(path) or SingleDeviceSharding(jax.local_devices()[0])
        branch = tree
        for key in path[:-1]:
            branch = branch.setdefault(key, {})
        branch[path[-1]] = load(path, params_of_leaf[path], leaf_info, sharding, host_bytes)
        loaded_bytes += leaf.size * np.dtype(leaf.dtype).itemsize
        if progress:
            progress(loaded_bytes, total_bytes, join(path))
    return tree


def load_leaf(
    source: TensorSource,
    params: Mapping[str, ParamInfo],
    leaf: TensorInfo,
    sharding: Sharding,
    host_bytes: int,
) -> jax.Array:
    """Load one leaf of the tree from the named parameters that it consists of."""
    devices: dict[Bounds, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        bounds = tuple(
            part.indices(size)[:2] for part, size in zip(index or (), leaf.shape, strict=True)
        )
        devices.setdefault(bounds, []).append(device)
    block_bytes = TensorInfo(leaf.dtype, sharding.shard_shape(leaf.shape)).nbytes
    blocks_at_once = max(1, host_bytes // max(1, block_bytes))
    arrays: list[jax.Array] = []
    for start in range(0, len(devices), blocks_at_once):
        blocks = {
            bounds: np.empty([stop - first for first, stop in bounds], leaf.dtype)
            for bounds in list(devices)[start : start + blocks_at_once]
        }
        for name, info in params.items():
            copy_into_blocks(blocks, info, source, name)
        on_devices = [
            jax.device_put(block, SingleDeviceSharding(device, memory_kind=sharding.memory_kind))
            for bounds, block in blocks.items()
            for device in devices[bounds]
        ]
        # Wait, so that the host does not hold the blocks of the next round as well.
        arrays += jax.block_until_ready(on_devices)
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, arrays, dtype=leaf.dtype)


def copy_into_blocks(
    blocks: Mapping[Bounds, np.ndarray], info: ParamInfo, source: TensorSource, name: str
) -> None:
    """Copy a parameter into the blocks that contain a part of it. It is read only if there are
    any.
    """
    array = None
    for bounds, block in blocks.items():
        if info.stack_index is not None:
            first, stop = bounds[info.stack_axis]
            if not first <= info.stack_index < stop:
                continue
            bounds = bounds[: info.stack_axis] + bounds[info.stack_axis + 1 :]
            block = np.moveaxis(block, info.stack_axis, 0)[info.stack_index - first, ...]
        array = source.read(name) if array is None else array
        block[...] = array[tuple(slice(*part) for part in bounds)]
