"""The weights of a training checkpoint by layer, and their conversion between layouts of layers.

`TrainingWeights` is a source of named tensors, one layer at a time, read on the host. Conversion,
inspection and inference on one machine use it; training restores its shards directly
(trainers/checkpointing/restore.py). Layers that were saved as one stack are read as one array and
sliced. The arrays read last are cached, since neighbouring layers are read together.

`restack_layers` converts a restored state between layouts: layers scanned, unrolled, or stacked
along another axis. A parameter of a layer has one name in every layout (weights.py), and the
optimizer keeps its state of a parameter under the parameter's path behind a prefix. Arrays are
sliced and stacked on their devices, a few at a time. An array of the old layout is freed when all
its layers are taken.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.checkpoint.saved_step import SavedStep
from maxtext.checkpoint.state import WEIGHTS, TreePath, join_path
from maxtext.checkpoint.tensors import TensorInfo
from maxtext.checkpoint.weights import ParamInfo, ParamPath, find_param_infos
from maxtext.common.errors import UserError
from maxtext.common.types import Json, Tree
from maxtext.configs.derive import Devices
from maxtext.configs.provenance import Layer
from maxtext.configs.sources import from_python
from maxtext.models.configuration import load
from maxtext.models.registry import segments
from maxtext.models.transformer import make_template

# The path of an array in the old layout, and the parameter to take from it
LayerSlice = tuple[TreePath, ParamInfo]


def restack_layers(
    arrays: dict[TreePath, jax.Array],
    old: Mapping[str, ParamInfo],
    new: Mapping[str, ParamInfo],
    target: Mapping[TreePath, jax.ShapeDtypeStruct],
) -> dict[TreePath, jax.Array]:
    """Convert the arrays of the old layout to those of `target`, with its shardings. Removes the
    arrays from `arrays`.
    """
    slices = plan_slices(arrays, old, new, target)
    num_uses: dict[TreePath, int] = {}
    for layer_slices in slices.values():
        for source, _ in layer_slices:
            num_uses[source] = num_uses.get(source, 0) + 1
    stack_axes = {
        to_tree_path(info.path): info.stack_axis
        for info in new.values()
        if info.stack_index is not None
    }
    restacked: dict[TreePath, jax.Array] = {}
    # In the order of the old arrays, so that each can be freed early.
    for path in sorted(slices, key=lambda path: slices[path][0][0]):
        layers = [slice_layer(arrays[source], info) for source, info in slices[path]]
        _, stacked = split_prefix(path, stack_axes)
        axis = None if stacked is None else stack_axes[stacked]
        restacked[path] = stack_layers(layers, axis, target[path].sharding)
        for source, _ in slices[path]:
            num_uses[source] -= 1
            if not num_uses[source]:
                del arrays[source]
    return {path: restacked[path] for path in target}


def plan_slices(
    arrays: Mapping[TreePath, Tree],
    old: Mapping[str, ParamInfo],
    new: Mapping[str, ParamInfo],
    target: Mapping[TreePath, Tree],
) -> dict[TreePath, list[LayerSlice]]:
    """For each target array, the slices of old arrays that it consists of, in order."""
    names_by_path: dict[TreePath, list[str]] = {}
    for name, info in new.items():
        names_by_path.setdefault(to_tree_path(info.path), []).append(name)
    slices: dict[TreePath, list[LayerSlice]] = {}
    for path in target:
        prefix, param_path = split_prefix(path, names_by_path)
        if param_path is None:  # not a parameter: a count, the step
            layer_slices = [(path, ParamInfo((), None, 0, (), target[path].dtype))]
        else:
            names = sorted(names_by_path[param_path], key=lambda name: new[name].stack_index or 0)
            layer_slices = [((*prefix, *to_tree_path(old[name].path)), old[name]) for name in names]
        missing = [source for source, _ in layer_slices if source not in arrays]
        if missing:
            raise UserError(
                f"the checkpoint has no {join_path(missing[0])}, which {join_path(path)} needs"
            )
        slices[path] = layer_slices
    return slices


def to_tree_path(path: ParamPath) -> TreePath:
    return tuple(map(str, path))


def split_prefix(
    path: TreePath, param_paths: Mapping[TreePath, object]
) -> tuple[TreePath, TreePath | None]:
    """(prefix, path of the parameter that `path` ends with, or None)."""
    for start in range(len(path)):
        if path[start:] in param_paths:
            return path[:start], path[start:]
    return path, None


def slice_layer(array: jax.Array, info: ParamInfo) -> jax.Array:
    return (
        array if info.stack_index is None else take_layer(array, info.stack_index, info.stack_axis)
    )


@partial(jax.jit, static_argnums=2)  # compiled once for all layers: `layer` is traced
def take_layer(array: jax.Array, layer: int, axis: int) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(array, layer, axis, keepdims=False)


def stack_layers(
    layers: list[jax.Array], axis: int | None, sharding: jax.sharding.Sharding
) -> jax.Array:
    if axis is None:
        (array,) = layers
        return jax.device_put(array, sharding)
    return stack_function(axis, sharding)(*layers)


@lru_cache
def stack_function(axis: int, sharding: jax.sharding.Sharding) -> Callable[..., jax.Array]:
    return jax.jit(lambda *layers: jnp.stack(layers, axis), out_shardings=sharding)


CACHE_BYTES = 4 * 10**9


@dataclass
class TrainingWeights:
    """A tensor source over a saved step; `settings` describe its model."""

    stored: SavedStep
    settings: Layer
    cache: OrderedDict[TreePath, np.ndarray] = field(default_factory=OrderedDict)

    @property
    def title(self) -> str:
        return str(self.stored.path)

    @cached_property
    def param_infos(self) -> Mapping[str, ParamInfo]:
        keys: Json = dict(self.stored.run["layout"])
        if max_positions := self.settings.get("trainable_position_size"):
            keys["max_target_length"] = max_positions.value
        config = load(None, from_python(keys), environ={}, devices=Devices(1), model=self.settings)
        return find_param_infos(make_template(config), segments(config))

    @cached_property
    def arrays(self) -> dict[TreePath, TensorInfo]:
        """The stored arrays by their paths in the model. All of the model's must be there."""
        paths = [stored_path(info) for info in self.param_infos.values()]
        arrays = self.stored.tensors_named_as(set(paths))
        for path in paths:
            if path not in arrays:
                raise UserError(
                    f"{self.title} has no {join_path(path)}, though its settings describe it; runs "
                    "with adapters or learn_to_init_mode leave their result in the folder adapter "
                    "or student of the run"
                )
        return arrays

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        return {
            name: TensorInfo(self.arrays[stored_path(info)].dtype, info.shape)
            for name, info in self.param_infos.items()
        }

    def read(self, name: str) -> np.ndarray:
        info = self.param_infos[name]
        array = self.read_array(stored_path(info))
        if info.stack_index is None:
            return array
        return np.take(array, info.stack_index, info.stack_axis)

    def read_array(self, path: TreePath) -> np.ndarray:
        if path not in self.cache:
            tensor = self.arrays[path]
            abstract = jax.ShapeDtypeStruct(tensor.shape, tensor.dtype)
            self.cache[path] = self.stored.restore({path: abstract})[path]
            while len(self.cache) > 1 and self.cached_bytes() > CACHE_BYTES:
                self.cache.popitem(last=False)
        self.cache.move_to_end(path)
        return self.cache[path]

    def cached_bytes(self) -> int:
        return sum(array.nbytes for array in self.cache.values())

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        # In the order of the stored arrays, so that each is read once.
        for name in sorted(self.param_infos, key=lambda name: stored_path(self.param_infos[name])):
            yield name, self.read(name)


def stored_path(info: ParamInfo) -> TreePath:
    return (WEIGHTS, *to_tree_path(info.path))
