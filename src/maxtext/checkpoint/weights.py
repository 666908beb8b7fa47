"""Our weights by name, a layer at a time, however a model keeps them.

A model keeps the weights of its layers stacked (scanned) or one by one (unrolled); by name every
layer has its own: `layers/{i}/attention/query/kernel`, i counted over the whole model. A weight
outside the layers is named by its path in the model: `embedder/embedding`. So one folder of weights
serves a model either way, on any mesh.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from maxtext.checkpoint.tensors import (
    Progress,
    Shape,
    TensorInfo,
    TensorSource,
    check_names_and_shapes,
)
from maxtext.kernels.weight_only import QuantizedWeight
from maxtext.layers.parameters import Template, Tree
from maxtext.layers.stack import Segment

Path = tuple[str | int, ...]
Bounds = tuple[
    tuple[int, int], ...
]  # a block of an array: where it starts and ends along each axis
# (path, named weights that it consists of, what it is as a whole, its sharding, host_bytes) -> a
# weight of the tree
Load = Callable[[Path, Mapping[str, "ParamInfo"], TensorInfo, Any, int], Any]


@dataclass(frozen=True)
class ParamInfo:
    """Where a named weight lies in a model."""

    path: Path
    layer: int | None  # its number along the stack; None: it is not stacked
    axis: int  # of the stack
    shape: Shape
    dtype: np.dtype
    fixed_dtype: bool = (
        False  # it has this dtype whatever the others have, see `Initializer.constant`
    )


def param_dtypes(param_infos: Mapping[str, ParamInfo], dtype: np.dtype) -> dict[str, np.dtype]:
    """The dtypes of a model's named weights where floats are to be `dtype`."""
    return {
        name: place.dtype if place.fixed_dtype else dtype for name, place in param_infos.items()
    }


def find_param_infos(template: Template, segments: Sequence[Segment]) -> dict[str, ParamInfo]:
    """All weights of a model by name: those outside the layers, then layer by layer."""
    outside: dict[str, ParamInfo] = {}
    inside: dict[int, dict[str, ParamInfo]] = {}
    firsts = [0, *itertools.accumulate(segment.layers for segment in segments)]
    axes, fixed = flatten(template.axes), flatten(template.fixed_dtype)
    for path, leaf in flatten(template.weights).items():
        dtype = np.dtype(leaf.dtype)
        if path[0] != "layers":
            outside["/".join(map(str, path))] = ParamInfo(
                path, None, 0, leaf.shape, dtype, fixed[path]
            )
            continue
        _, number, _, place, *rest = path
        segment = segments[int(number)]
        stacked = "layers" in axes[path]
        if stacked:
            axis = axes[path].index("layers")
            shape = leaf.shape[:axis] + leaf.shape[axis + 1 :]
            repeats = [
                (repeat, ParamInfo(path, repeat, axis, shape, dtype, fixed[path]))
                for repeat in range(segment.repeats)
            ]
        else:
            repeat, *rest = rest
            repeats = [(int(repeat), ParamInfo(path, None, 0, leaf.shape, dtype, fixed[path]))]
        for repeat, found in repeats:
            layer = firsts[int(number)] + repeat * len(segment.pattern) + int(place)
            inside.setdefault(layer, {})["/".join(map(str, ("layers", layer, *rest)))] = found
    for layer in sorted(inside):
        outside |= inside[layer]
    return outside


def flatten(tree: Tree, path: Path = ()) -> dict[Path, Any]:
    """The leaves of a nested dict by their paths."""
    if not isinstance(tree, dict):
        return {path: tree}
    return {
        where: leaf
        for name, branch in tree.items()
        for where, leaf in flatten(branch, (*path, name)).items()
    }


@dataclass(frozen=True)
class ModelWeights:
    """The weights of a model in memory as a source of named, plain tensors."""

    weights: Tree
    param_infos: Mapping[str, ParamInfo]
    title: str = "the model"

    @cached_property
    def leaves(self) -> dict[Path, Any]:
        return flatten(self.weights)

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        kinds = {name: self.leaves[place.path] for name, place in self.param_infos.items()}
        return {
            name: TensorInfo(
                place.dtype
                if isinstance(kinds[name], QuantizedWeight)
                else np.dtype(kinds[name].dtype),
                place.shape,
            )
            for name, place in self.param_infos.items()
        }

    def take(self, name: str) -> jax.Array | QuantizedWeight:
        """A weight as the model keeps it."""
        place = self.param_infos[name]
        leaf = self.leaves[place.path]
        if place.layer is None:
            return leaf
        # The number is an argument of the compiled slice, so that one serves all layers.
        return jax.tree.map(
            lambda part: jax.lax.dynamic_index_in_dim(
                part, place.layer, place.axis, keepdims=False
            ),
            leaf,
        )

    def read(self, name: str) -> np.ndarray:
        weight = self.take(name)
        return np.asarray(
            weight.astype(self.param_infos[name].dtype)
            if isinstance(weight, QuantizedWeight)
            else weight
        )

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        for name in self.param_infos:
            yield name, self.read(name)


def load_weights(
    source: TensorSource,
    param_infos: Mapping[str, ParamInfo],
    template: Template,
    shardings: Tree | None = None,
    dtype: Any = None,
    progress: Progress | None = None,
    host_bytes: int = 4 * 10**9,
    load: Load | None = None,
) -> Tree:
    """A model's weights from a source that must have exactly these, in the template's dtype (or
    `dtype`, where that is floating), laid out by `shardings` (a tree like the weights; None: on the
    first device).

    The host holds one weight of a layer and as many blocks for devices as fit into host_bytes, but
    at least one. `load` makes a weight of the tree in another way than from its floats alone.
    """
    load = load or (lambda path, *rest: load_leaf(source, *rest))
    check_names_and_shapes(source, {name: place.shape for name, place in param_infos.items()})
    named: dict[Path, dict[str, ParamInfo]] = {}
    for name, place in param_infos.items():
        named.setdefault(place.path, {})[name] = place
    leaves, fixed = flatten(template.weights), flatten(template.fixed_dtype)
    layout = flatten(shardings) if shardings is not None else {}
    total = sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in leaves.values())
    done = 0
    tree: dict = {}
    for path, leaf in leaves.items():
        casts = dtype is not None and jnp.issubdtype(leaf.dtype, jnp.floating) and not fixed[path]
        kind = np.dtype(dtype if casts else leaf.dtype)
        sharding = layout.get(path) or SingleDeviceSharding(jax.local_devices()[0])
        branch = tree
        for step in path[:-1]:
            branch = branch.setdefault(step, {})
        branch[path[-1]] = load(
            path, named[path], TensorInfo(kind, leaf.shape), sharding, host_bytes
        )
        done += leaf.size * np.dtype(leaf.dtype).itemsize
        if progress:
            progress(done, total, "/".join(map(str, path)))
    return tree


def load_leaf(
    source: TensorSource,
    named: Mapping[str, ParamInfo],
    whole: TensorInfo,
    sharding: Sharding,
    host_bytes: int,
) -> jax.Array:
    """One weight of the tree, from the named weights that it consists of."""
    devices: dict[Bounds, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(whole.shape).items():
        bounds = tuple(
            part.indices(size)[:2] for part, size in zip(index or (), whole.shape, strict=True)
        )
        devices.setdefault(bounds, []).append(device)
    block_bytes = TensorInfo(whole.dtype, sharding.shard_shape(whole.shape)).nbytes
    at_once = max(1, host_bytes // max(1, block_bytes))
    arrays: list[jax.Array] = []
    for start in range(0, len(devices), at_once):
        blocks = {
            bounds: np.empty([end - first for first, end in bounds], whole.dtype)
            for bounds in list(devices)[start : start + at_once]
        }
        for name, place in named.items():
            fill(blocks, place, source, name)
        placed = [
            jax.device_put(block, SingleDeviceSharding(device, memory_kind=sharding.memory_kind))
            for bounds, block in blocks.items()
            for device in devices[bounds]
        ]
        arrays += jax.block_until_ready(
            placed
        )  # or blocks of the next round would come on top of these
    return jax.make_array_from_single_device_arrays(
        whole.shape, sharding, arrays, dtype=whole.dtype
    )


def fill(
    blocks: Mapping[Bounds, np.ndarray], place: ParamInfo, source: TensorSource, name: str
) -> None:
    """Write a named weight into the blocks that have a part in it; it is read only if there are
    any.
    """
    array = None
    for bounds, block in blocks.items():
        if place.layer is not None:
            first, end = bounds[place.axis]
            if not first <= place.layer < end:
                continue
            bounds = bounds[: place.axis] + bounds[place.axis + 1 :]
            block = np.moveaxis(block, place.axis, 0)[place.layer - first, ...]
        array = source.read(name) if array is None else array
        block[...] = array[tuple(slice(*part) for part in bounds)]
