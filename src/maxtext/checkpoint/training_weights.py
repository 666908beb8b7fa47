"""The weights of a training checkpoint by our names, a layer at a time, read on the host.

For whatever works on one tensor after the other: conversion, inspection, inference on one machine.
Training restores its shards directly (trainers/restore.py). Layers that were saved as one stack are
read as one array and cut; a few such arrays are kept, since neighbours are asked for together.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np

from maxtext.checkpoint.restack import words
from maxtext.checkpoint.saved_step import SavedStep
from maxtext.checkpoint.state import WEIGHTS, Name, join_path
from maxtext.checkpoint.tensors import TensorInfo
from maxtext.checkpoint.weights import ParamInfo, find_param_infos
from maxtext.common.errors import UserError
from maxtext.configs.derive import Devices
from maxtext.configs.load import load
from maxtext.configs.provenance import Layer
from maxtext.configs.sources import from_python
from maxtext.models.registry import segments
from maxtext.models.transformer import make_template

KEPT_BYTES = 4 * 10**9


@dataclass
class TrainingWeights:
    stored: SavedStep
    settings: Layer  # of its model
    kept: OrderedDict[Name, np.ndarray] = field(default_factory=OrderedDict)

    @property
    def title(self) -> str:
        return str(self.stored.path)

    @cached_property
    def param_infos(self) -> Mapping[str, ParamInfo]:
        keys: dict[str, Any] = dict(self.stored.run["layout"])
        if learned := self.settings.get("trainable_position_size"):
            keys["max_target_length"] = learned.value
        config = load(None, from_python(keys), environ={}, devices=Devices(1), model=self.settings)
        param_infos = find_param_infos(make_template(config), segments(config))
        stored = self.stored.tensors_named_as(set(map(self.leaf, param_infos.values())))
        for place in param_infos.values():
            if self.leaf(place) not in stored:
                raise UserError(
                    f"{self.title} has no {join_path(self.leaf(place))}, though its settings describe it"
                )
        return param_infos

    def leaf(self, place: ParamInfo) -> Name:
        return (WEIGHTS, *words(place.path))

    @cached_property
    def arrays(self) -> dict[Name, TensorInfo]:
        """The stored arrays by their names in the model."""
        return self.stored.tensors_named_as(set(map(self.leaf, self.param_infos.values())))

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        return {
            name: TensorInfo(self.arrays[self.leaf(place)].dtype, place.shape)
            for name, place in self.param_infos.items()
        }

    def read(self, name: str) -> np.ndarray:
        place = self.param_infos[name]
        array = self.whole(self.leaf(place))
        return array if place.layer is None else np.take(array, place.layer, place.axis)

    def whole(self, name: Name) -> np.ndarray:
        if name not in self.kept:
            tensor = self.arrays[name]
            self.kept[name] = self.stored.restore(
                {name: jax.ShapeDtypeStruct(tensor.shape, tensor.dtype)}
            )[name]
            while (
                len(self.kept) > 1
                and sum(array.nbytes for array in self.kept.values()) > KEPT_BYTES
            ):
                self.kept.popitem(last=False)
        self.kept.move_to_end(name)
        return self.kept[name]

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        for name in sorted(
            self.param_infos, key=lambda name: self.leaf(self.param_infos[name])
        ):  # array by array
            yield name, self.read(name)
