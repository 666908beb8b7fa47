"""The adapters that a model serves: many in one batch, each sequence with its own.

The model is built with `slots` for adapters (max_adapters). Their factors are stacked, padded to
the largest rank, and loading or dropping an adapter replaces arrays of the same shapes, so nothing
is compiled again. An adapter that needs more (a larger rank, other layers, DoRA, modules saved in
full) needs a new build.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from maxtext.adapters.binding import LinearShape, padded
from maxtext.adapters.merge import delta_weight, magnitude_factor
from maxtext.adapters.modules import EMBEDDING, HEAD_WEIGHT, SAVED_MODULES
from maxtext.adapters.spec import MAGNITUDE, ROUTED_EXPERTS, Adapter, B, write_layer
from maxtext.checkpoint.open import model_param_infos
from maxtext.checkpoint.tensors import TensorSource
from maxtext.checkpoint.weights import ParamPath
from maxtext.common.errors import ConfigError, UserError
from maxtext.common.trees import unflatten_dict
from maxtext.common.types import Tree
from maxtext.configs.types import MaxTextConfig
from maxtext.layers.adapters import EMBEDDER, AdapterSpec, AdapterTarget
from maxtext.layers.lora import PackedAdapter, is_adapter, split_adapter
from maxtext.layers.parameters import Template
from maxtext.sharding import AxisRules

VERSIONS = itertools.count(1)
COPIES = {"head_copies": HEAD_WEIGHT, f"{EMBEDDER}/copies": EMBEDDING}


@dataclass(frozen=True)
class LoadedAdapter:
    name: str
    slot: int  # from 1
    version: int  # unique in this process
    adapter: Adapter


class AdapterSlots:
    """The adapters of a model by name, each in a slot."""

    def __init__(self, slots: int, dtype: str):
        """`dtype`: of the model's computations, in which their factors are stored."""
        self.slots = slots
        self.dtype = dtype
        self.loaded: dict[str, LoadedAdapter] = {}

    def add(self, name: str, adapter: Adapter) -> None:
        """Raises ConfigError if the name is taken, or all slots are."""
        if not name or name in self.loaded:
            raise ConfigError(f"there is an adapter {name!r} already: give each its own name")
        used = {loaded.slot for loaded in self.loaded.values()}
        free = [slot for slot in range(1, self.slots + 1) if slot not in used]
        if not free:
            raise ConfigError(
                f"max_adapters={self.slots} adapters are loaded already: drop one, or raise it"
            )
        nonfinite = [key for key, array in adapter.tensors.items() if not is_finite(array)]
        if nonfinite:
            raise UserError(f"the adapter {name} has values that are not finite in {nonfinite[0]}")
        self.loaded[name] = LoadedAdapter(name, free[0], next(VERSIONS), adapter)

    def remove(self, name: str) -> None:
        self.find(name)
        del self.loaded[name]

    def find(self, name: str | None) -> LoadedAdapter | None:
        """The adapter of a name; None: the first, if there is one; "": none. Raises UserError for
        an unknown name."""
        if name is None:
            return next(iter(self.loaded.values()), None)
        if name == "":
            return None
        if name not in self.loaded:
            names = ", ".join(self.loaded) or "none"
            raise UserError(f"there is no adapter {name!r}; loaded: {names}")
        return self.loaded[name]

    def ids(self, names: Sequence[str | None]) -> np.ndarray:
        loaded = [self.find(name) for name in names]
        return np.array([0 if item is None else item.slot for item in loaded], np.int32)

    @property
    def spec(self) -> AdapterSpec:
        """The adapter spec of a model that serves these adapters."""
        return serving_spec([item.adapter for item in self.loaded.values()], self.slots, self.dtype)


def is_finite(array: np.ndarray) -> bool:
    return bool(np.isfinite(array.astype(np.float32)).all())


def serving_spec(adapters: Iterable[Adapter], slots: int, dtype: str) -> AdapterSpec:
    """The union of the adapters' layers, each with its largest rank. A module that k adapters saved
    in full is listed k times."""
    adapters = list(adapters)
    ranks: dict[str, int] = {}
    for adapter in adapters:
        for path, target in adapter.spec.targets:
            ranks[path] = max(ranks.get(path, 0), target.rank)
    return AdapterSpec(
        targets=tuple((path, AdapterTarget(rank, rank)) for path, rank in sorted(ranks.items())),
        dora=any(adapter.spec.dora for adapter in adapters),
        saved=tuple(SAVED_MODULES[name] for adapter in adapters for name in sorted(adapter.saved)),
        slots=slots,
        dtype=dtype,
    )


def serves(spec: AdapterSpec | None, needed: AdapterSpec) -> bool:
    """Whether a model that was built with `spec` can serve what `needed` describes."""
    if spec is None or spec.slots != needed.slots or (needed.dora and not spec.dora):
        return False
    if any(needed.saved.count(module) > spec.saved.count(module) for module in needed.saved):
        return False
    ranks = {path: target.rank for path, target in spec.targets}
    return all(target.rank <= ranks.get(path, 0) for path, target in needed.targets)


def serving_weights(
    slots: AdapterSlots,
    template: Template,
    config: MaxTextConfig,
    base: TensorSource,
    linears: Mapping[str, LinearShape],
    rules: AxisRules,
) -> Tree:
    """The parameters of the adapters in a model that is built to serve them, on its devices. `base`
    has the weights that DoRA's norms depend on."""
    infos = model_param_infos(template, config)
    leaves: dict[ParamPath, np.ndarray] = {}
    adapters = list(slots.loaded.values())
    packed = {
        path: variable.get_metadata()["packed"]
        for path, variable in nnx.to_flat_state(template.state)
        if "packed" in variable.get_metadata()
    }
    for name, info in infos.items():
        if not is_adapter(info.path):
            continue
        path, _, kind = name.rpartition("/")
        if path in COPIES:
            layer = copies(adapters, COPIES[path], kind, info.shape, info.dtype)
        elif info.path in packed:
            layer = packed_factors(adapters, path, kind, packed[info.path])
        elif kind == "lora_factor":
            layer = dora_factors(adapters, path, info.shape, base, linears[path])
        elif ROUTED_EXPERTS in path:
            layer = stacked_factors(adapters, path, kind, info.shape)
        else:
            layer = joined_factors(adapters, path, kind, info.shape, slots.slots)
        write_layer(leaves, info, layer.astype(info.dtype), infos)
    _, shardings = split_adapter(rules.shardings(template.axes, template.weights))
    return jax.device_put(unflatten_dict(leaves), shardings)


def stacked_factors(
    adapters: Sequence[LoadedAdapter], path: str, kind: str, shape: Sequence[int]
) -> np.ndarray:
    """lora_a or lora_b of a layer for each slot, [n, ...]; B includes the scale."""
    stacked = np.zeros(shape, np.float32)
    for item in adapters:
        spec = item.adapter.spec
        if path not in spec.by_path:
            continue
        array = item.adapter.tensors[f"{path}/{kind}"].astype(np.float32)
        if kind == B:
            array = array * np.float32(spec.scale(spec.by_path[path]))
        stacked[item.slot - 1] = padded(array, tuple(shape[1:]), array.dtype)
    return stacked


def joined_factors(
    adapters: Sequence[LoadedAdapter], path: str, kind: str, shape: Sequence[int], slots: int
) -> np.ndarray:
    """lora_a [*inputs, n R] or lora_b [n R, *outputs] of a layer."""
    if kind == B:
        columns, *outputs = shape
        stacked = stacked_factors(adapters, path, kind, (slots, columns // slots, *outputs))
        return stacked.reshape(shape)
    *inputs, columns = shape
    stacked = stacked_factors(adapters, path, kind, (slots, *inputs, columns // slots))
    return np.moveaxis(stacked, 0, -2).reshape(shape)


def packed_factors(
    adapters: Sequence[LoadedAdapter], path: str, kind: str, packed: PackedAdapter
) -> np.ndarray:
    """lora_a or lora_b of the projections that the module at `path` computes by one matmul."""
    parent, slots, parts = path.rpartition("/")[0], packed.slots, []
    for name, rank, out_shape in zip(packed.names, packed.ranks, packed.out_shapes, strict=True):
        columns = slots * rank
        if kind == B:
            shape, matrix = (columns, *out_shape), (columns, math.prod(out_shape))
        else:
            shape, matrix = (*packed.in_shape, columns), (math.prod(packed.in_shape), columns)
        joined = joined_factors(adapters, f"{parent}/{name}", kind, shape, slots)
        parts.append(joined.reshape(matrix))
    return block_diagonal(parts) if kind == B else np.concatenate(parts, axis=1)


def block_diagonal(blocks: Sequence[np.ndarray]) -> np.ndarray:
    """The matrices along the diagonal of one, which may have no rows."""
    rows, columns = (sum(block.shape[axis] for block in blocks) for axis in (0, 1))
    matrix, row, column = np.zeros((rows, columns), blocks[0].dtype), 0, 0
    for block in blocks:
        matrix[row : row + block.shape[0], column : column + block.shape[1]] = block
        row, column = row + block.shape[0], column + block.shape[1]
    return matrix


def dora_factors(
    adapters: Sequence[LoadedAdapter],
    path: str,
    shape: Sequence[int],
    base: TensorSource,
    linear: LinearShape,
) -> np.ndarray:
    """lora_factor [n + 1, *outputs]: 1 for adapters without DoRA, and for the base."""
    factors = np.ones(shape, np.float32)
    for item in adapters:
        if f"{path}/{MAGNITUDE}" in item.adapter.tensors:
            weight = base.read(f"{path}/weight").astype(np.float32)
            merged = weight + delta_weight(item.adapter, path, linear).reshape(weight.shape)
            factors[item.slot] = magnitude_factor(item.adapter, path, merged, linear)
    return factors


def copies(
    adapters: Sequence[LoadedAdapter],
    weight: str,
    kind: str,
    shape: Sequence[int],
    dtype: DTypeLike,
) -> np.ndarray:
    """`SavedCopies`: lora_weight [k, ...], or lora_copy [n + 1], the copy of each adapter."""
    array = np.zeros(shape, dtype)
    owners = [item for item in adapters if weight in item.adapter.saved]
    for number, item in enumerate(owners):
        if kind == "lora_copy":
            array[item.slot] = number + 1
        else:
            array[number] = item.adapter.saved[weight].astype(dtype)
    return array
