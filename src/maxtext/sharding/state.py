"""How the training state lies on the mesh: splits beyond the rules, host memory, and whether enough
of it is split.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxtext.common.errors import ConfigError
from maxtext.sharding.rules import AxisRules

HOST, DEVICE = "pinned_host", "device"


def split_further(sharding: NamedSharding, shape: Sequence[int], axis: str) -> NamedSharding:
    """Also over `axis`, along the first dimension that it divides; as it is where none does or the
    axis is used.
    """
    entries = [as_tuple(entry) for entry in sharding.spec] + [()] * (
        len(shape) - len(sharding.spec)
    )
    size = sharding.mesh.shape.get(axis, 1)
    if size == 1 or any(axis in entry for entry in entries):
        return sharding
    for place, (entry, length) in enumerate(zip(entries, shape, strict=True)):
        if length % (size * math.prod(sharding.mesh.shape[name] for name in entry)) == 0:
            entries[place] = (*entry, axis)
            return NamedSharding(
                sharding.mesh, PartitionSpec(*(entry or None for entry in entries))
            )
    return sharding


def on_host(sharding: NamedSharding) -> NamedSharding:
    return sharding.with_memory_kind(HOST)


def on_device(sharding: NamedSharding) -> NamedSharding:
    return sharding.with_memory_kind(DEVICE)


def to_device(tree: Any) -> Any:
    """Under jit: the same values in device memory, laid out as they are."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf, jax.memory.Space.Device), tree)


def check_split(rules: AxisRules, axes: Any, weights: Any, tolerance: float) -> None:
    """Refuse a layout that leaves more than `tolerance` of the weights' bytes whole on every device
    although an axis that splits other weights could split them."""
    names = {name for leaf in jax.tree.leaves(axes, is_leaf=is_axes) for name in leaf}
    splitting = {axis for name, axes in rules.rules if name in names for axis in axes}
    splitting = {axis for axis in splitting if rules.mesh.shape.get(axis, 1) > 1}
    whole, total = [], 0
    for path, leaf, sharding in placed_leaves(rules, axes, weights):
        size = math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
        total += size
        could = any(
            length % rules.mesh.shape[axis] == 0
            for axis in splitting
            for length in leaf.shape
            if length > 1
        )
        if could and not any(as_tuple(entry) for entry in sharding.spec):
            whole.append((size, path, leaf.shape))
    fraction = sum(size for size, _, _ in whole) / max(total, 1)
    if fraction > tolerance:
        worst = ", ".join(
            f"{path} {list(shape)}" for _, path, shape in sorted(whole, reverse=True)[:3]
        )
        raise ConfigError(
            f"{fraction:.1%} of the weights would be whole on every device, more than sharding_tolerance="
            f"{tolerance:g}: {worst}; choose mesh sizes that divide their dimensions, change logical_axis_rules, or "
            "raise the tolerance"
        )


def check_batch(rules: AxisRules, rows: int, key: str) -> None:
    """Refuse a batch that does not divide: it would be whole on every device, and all would do the
    same work. A part of a sequence for each device (per_device_batch_size=0.25) is meant so."""
    split = rules.axes_of(("activation_batch",), (rules.mesh.size,))[0]
    parts = math.prod(rules.mesh.shape[axis] for axis in split)
    if rows % parts and parts % rows:
        raise ConfigError(
            f"a batch of {rows} sequences does not divide over the {parts} devices of {' x '.join(split)}: change "
            f"{key}, or give devices to axes that split a sequence (ici_context_parallelism, ici_tensor_parallelism)"
        )


def describe(rules: AxisRules, axes: Any, weights: Any) -> Iterable[str]:
    """A line for each weight: logical axes, mesh axes, and the shape of a shard."""
    by_path = dict(zip(paths(weights), jax.tree.leaves(axes, is_leaf=is_axes), strict=True))
    for path, leaf, sharding in placed_leaves(rules, axes, weights):
        logical = ", ".join(name or "-" for name in by_path[path])
        physical = ", ".join("+".join(as_tuple(entry)) or "-" for entry in sharding.spec)
        yield f"{path} {list(leaf.shape)}: ({logical}) -> ({physical}), shards {list(sharding.shard_shape(leaf.shape))}"


def placed_leaves(
    rules: AxisRules, axes: Any, weights: Any
) -> Iterable[tuple[str, Any, NamedSharding]]:
    shardings = jax.tree.leaves(rules.shardings(axes, weights))
    return zip(paths(weights), jax.tree.leaves(weights), shardings, strict=True)


def paths(weights: Any) -> list[str]:
    return [
        "/".join(str(step.key) for step in path) for path, _ in jax.tree.leaves_with_path(weights)
    ]


def is_axes(leaf: Any) -> bool:
    return isinstance(leaf, tuple)


def as_tuple(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())
