"""The weights of a training checkpoint as named tensors, one layer at a time, read on the host.

Conversion, inspection and inference on one machine read them so. Training restores its shards
directly (trainers/checkpointing/restore.py). Layers that were saved as one stack are read as one
array and sliced. The arrays read last are cached, since neighbouring layers are read together.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import jax
import numpy as np

from maxtext.checkpoint.restack import to_tree_path
from maxtext.checkpoint.saved_step import SavedStep
from maxtext.checkpoint.state import WEIGHTS, TreePath, join_path
from maxtext.checkpoint.tensors import TensorInfo
from maxtext.checkpoint.weights import ParamInfo, find_param_infos
from maxtext.common.errors import UserError
from maxtext.common.types import Json
from maxtext.configs.derive import Devices
from maxtext.configs.provenance import Layer
from maxtext.configs.sources import from_python
from maxtext.models.configuration import load
from maxtext.models.registry import segments
from maxtext.models.transformer import make_template

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
