"""Bytes on one device, from shapes and how they are split; nothing is allocated, and the devices
need not be here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh

from maxtext.configs.types import MaxTextConfig
from maxtext.sharding.rules import AxisRules
from maxtext.sharding.state import HOST


def abstract_mesh(config: MaxTextConfig) -> AbstractMesh:
    """The mesh of a configuration without devices: enough to know the shape of every shard."""
    sizes = [
        inside * between
        for inside, between in zip(config.ici_parallelism, config.dcn_parallelism, strict=True)
    ]
    return AbstractMesh(tuple(sizes), tuple(config.mesh_axes))


def one_device(platform: str, of: int) -> AxisRules:
    """Rules to trace by what one device of so many computes, where nothing is split; it need not
    exist.
    """
    mesh: Any = SimpleNamespace(
        size=1, shape={}, devices=np.array([SimpleNamespace(platform=platform)])
    )
    return AxisRules(mesh, (), one_of_several=of > 1)


@dataclass(frozen=True)
class Bytes:
    """Of one device: in its own memory, and in its host's."""

    device: int = 0
    host: int = 0

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(self.device + other.device, self.host + other.host)


def shard_bytes(tree: Any, shardings: Any = None, dtype: Any = None) -> Bytes:
    """What one device holds of a tree of arrays; `shardings` unless the leaves know theirs; `dtype`
    in place of their own."""
    total = Bytes()
    leaves = jax.tree.leaves(tree)
    places = [leaf.sharding for leaf in leaves] if shardings is None else jax.tree.leaves(shardings)
    for leaf, sharding in zip(leaves, places, strict=True):
        size = math.prod(sharding.shard_shape(leaf.shape)) * item_bytes(dtype or leaf.dtype)
        total += Bytes(host=size) if sharding.memory_kind == HOST else Bytes(device=size)
    return total


def item_bytes(dtype: Any) -> int:
    """Of one element; a random key is as large as its data."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
        return math.prod(data.shape) * data.dtype.itemsize
    return np.dtype(dtype).itemsize


@dataclass(frozen=True)
class Activations:
    """Reads the dimensions of an activation: `rows` marks a batch, being a prime that no other size
    is a multiple of; `features` maps sizes to their logical names. The compiler may split
    otherwise; this is what the rules ask for."""

    rules: AxisRules
    rows: int
    length: int
    features: Mapping[int, str]

    def is_one(self, shape: Sequence[int]) -> bool:
        """Whether an array grows with the batch."""
        return any(size % self.rows == 0 for size in shape)

    def pieces(self, shape: Sequence[int], batch: int) -> int:
        """Over how many devices the rules split it, for a batch of so many rows."""
        used: set[str] = set()
        seen = {"rows": False, "length": False}
        stream = len(shape) <= 4 and self.features.get(shape[-1]) == "activation_embed"
        along = "activation_norm_length" if stream else "activation_length"
        for size in shape:
            if size % self.rows == 0 and not seen["rows"]:
                seen["rows"] = True
                used |= set(self.rules.mesh_axes("activation_batch", batch, used))
                if size % (self.rows * self.length) == 0:  # tokens in one row
                    seen["length"] = True
                    used |= set(self.rules.mesh_axes(along, self.length, used))
            elif size == self.length and not seen["length"]:
                seen["length"] = True
                used |= set(self.rules.mesh_axes(along, size, used))
            elif size in self.features:
                used |= set(self.rules.mesh_axes(self.features[size], size, used))
        return math.prod(self.rules.mesh.shape[axis] for axis in used)

    def bytes(self, shape: Sequence[int], dtype: Any, batch: int) -> int:
        """On one device, for a batch of so many rows."""
        whole = math.prod(shape) * item_bytes(dtype) // self.rows * batch
        return whole // self.pieces(shape, batch)


def gathered_bytes(rules: AxisRules, weights: Any, axes: Any, dtype: Any) -> int:
    """The most that is gathered at once for its product: the weights of one layer, or one weight
    outside the layers, joined over the mesh axes that split the tokens."""
    over = set(rules.mesh_axes("activation_batch", rules.mesh.size, set()))
    over |= set(rules.mesh_axes("activation_length", rules.mesh.size, over))
    layer, largest = 0.0, 0.0
    leaves = jax.tree.leaves(weights)
    for leaf, names in zip(
        leaves, jax.tree.leaves(axes, is_leaf=lambda node: isinstance(node, tuple)), strict=True
    ):
        split: set[str] = set()
        for name, size in zip(names, leaf.shape, strict=True):
            split |= set(rules.mesh_axes(name, size, split))
        if not split & over:
            continue  # it lies there whole
        whole = (
            math.prod(leaf.shape)
            * item_bytes(dtype)
            / math.prod(rules.mesh.shape[axis] for axis in split - over)
        )
        if "layers" in names:
            layer += whole / leaf.shape[names.index("layers")]
        else:
            largest = max(largest, whole)
    return int(max(layer, largest))
