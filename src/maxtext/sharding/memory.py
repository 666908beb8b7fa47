"""Bytes per device, computed from shapes and shardings, without devices or allocation."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh
from jax.typing import DTypeLike

from maxtext.common.types import Tree
from maxtext.configs.types import MaxTextConfig
from maxtext.sharding.rules import AxisRules
from maxtext.sharding.state import HOST


def abstract_mesh(config: MaxTextConfig) -> AbstractMesh:
    """The mesh of a configuration without devices, which is enough for the shapes of shards."""
    sizes = [
        ici * dcn for ici, dcn in zip(config.ici_parallelism, config.dcn_parallelism, strict=True)
    ]
    return AbstractMesh(tuple(sizes), tuple(config.mesh_axes))


def single_device_rules(platform: str, num_devices: int) -> AxisRules:
    """Rules to trace an unsharded program for one of `num_devices` devices, which need not
    exist.
    """
    mesh: Any = SimpleNamespace(
        size=1, shape={}, devices=np.array([SimpleNamespace(platform=platform)])
    )
    return AxisRules(mesh, (), one_of_several=num_devices > 1)


@dataclass(frozen=True)
class MemoryBytes:
    """Bytes of one device: in its own memory, and in its host's."""

    device: int = 0
    host: int = 0

    def __add__(self, other: "MemoryBytes") -> "MemoryBytes":
        return MemoryBytes(self.device + other.device, self.host + other.host)


def shard_bytes(
    tree: Tree, shardings: Tree | None = None, dtype: DTypeLike | None = None
) -> MemoryBytes:
    """Bytes of a tree of arrays on one device.

    `shardings` is needed if the leaves have none; `dtype` overrides the leaves' dtype.
    """
    total = MemoryBytes()
    leaves = jax.tree.leaves(tree)
    if shardings is None:
        leaf_shardings = [leaf.sharding for leaf in leaves]
    else:
        leaf_shardings = jax.tree.leaves(shardings)
    for leaf, sharding in zip(leaves, leaf_shardings, strict=True):
        nbytes = math.prod(sharding.shard_shape(leaf.shape)) * item_bytes(dtype or leaf.dtype)
        on_host = sharding.memory_kind == HOST
        total += MemoryBytes(host=nbytes) if on_host else MemoryBytes(device=nbytes)
    return total


def item_bytes(dtype: DTypeLike) -> int:
    """Bytes of one element; for a random key, of its key data."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
        return math.prod(data.shape) * data.dtype.itemsize
    return np.dtype(dtype).itemsize


@dataclass(frozen=True)
class ActivationSharding:
    """Sharding of activations by the sizes of their dimensions, as the rules ask for it.

    `rows` is the batch size of the traced program, a prime that divides no other size, so that a
    multiple of it is a batch dimension. `features` maps other sizes to logical names.
    """

    rules: AxisRules
    rows: int
    length: int
    features: Mapping[int, str]

    def is_activation(self, shape: Sequence[int]) -> bool:
        """Whether an array has a batch dimension."""
        return any(size % self.rows == 0 for size in shape)

    def num_shards(self, shape: Sequence[int], batch: int) -> int:
        """The number of devices over which the rules shard an activation of `batch` rows."""
        used: set[str] = set()
        has_rows = has_length = False
        is_residual = len(shape) <= 4 and self.features.get(shape[-1]) == "activation_embed"
        length_axis = "activation_norm_length" if is_residual else "activation_length"
        for size in shape:
            if size % self.rows == 0 and not has_rows:
                has_rows = True
                used |= set(self.rules.mesh_axes("activation_batch", batch, used))
                if size % (self.rows * self.length) == 0:  # batch and length merged
                    has_length = True
                    used |= set(self.rules.mesh_axes(length_axis, self.length, used))
            elif size == self.length and not has_length:
                has_length = True
                used |= set(self.rules.mesh_axes(length_axis, size, used))
            elif size in self.features:
                used |= set(self.rules.mesh_axes(self.features[size], size, used))
        return math.prod(self.rules.mesh.shape[axis] for axis in used)

    def bytes(self, shape: Sequence[int], dtype: DTypeLike, batch: int) -> int:
        """Bytes on one device for a batch of `batch` rows."""
        total = math.prod(shape) * item_bytes(dtype) // self.rows * batch
        return total // self.num_shards(shape, batch)


def max_gathered_bytes(rules: AxisRules, weights: Tree, axes: Tree, dtype: DTypeLike) -> int:
    """The largest all-gather of weights for a matmul: one layer, or one weight outside the layers.

    Weights are gathered over the mesh axes that shard the tokens.
    """
    token_axes = set(rules.mesh_axes("activation_batch", rules.mesh.size, set()))
    token_axes |= set(rules.mesh_axes("activation_length", rules.mesh.size, token_axes))
    layer, largest = 0.0, 0.0
    leaf_axes = jax.tree.leaves(axes, is_leaf=lambda node: isinstance(node, tuple))
    for leaf, names in zip(jax.tree.leaves(weights), leaf_axes, strict=True):
        weight_axes: set[str] = set()
        for name, size in zip(names, leaf.shape, strict=True):
            weight_axes |= set(rules.mesh_axes(name, size, weight_axes))
        if not weight_axes & token_axes:
            continue  # nothing to gather
        num_shards = math.prod(rules.mesh.shape[axis] for axis in weight_axes - token_axes)
        gathered = math.prod(leaf.shape) * item_bytes(dtype) / num_shards
        if "layers" in names:
            layer += gathered / leaf.shape[names.index("layers")]
        else:
            largest = max(largest, gathered)
    return int(max(layer, largest))
