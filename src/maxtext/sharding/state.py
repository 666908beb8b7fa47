"""Sharding of the training state: further sharding of the optimizer, host memory, checks."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxtext.common.errors import ConfigError
from maxtext.common.types import Tree
from maxtext.sharding.rules import AxisRules

HOST, DEVICE = "pinned_host", "device"


def shard_over(sharding: NamedSharding, shape: Sequence[int], axis: str) -> NamedSharding:
    """Shard also over mesh axis `axis`, along the first dimension that it divides.

    Returns `sharding` if there is no such dimension or the axis is used already.
    """
    entries = [as_tuple(entry) for entry in sharding.spec] + [()] * (
        len(shape) - len(sharding.spec)
    )
    size = sharding.mesh.shape.get(axis, 1)
    if size == 1 or any(axis in entry for entry in entries):
        return sharding
    for dim, (entry, length) in enumerate(zip(entries, shape, strict=True)):
        if length % (size * math.prod(sharding.mesh.shape[name] for name in entry)) == 0:
            entries[dim] = (*entry, axis)
            return NamedSharding(
                sharding.mesh, PartitionSpec(*(entry or None for entry in entries))
            )
    return sharding


def on_host(sharding: NamedSharding) -> NamedSharding:
    return sharding.with_memory_kind(HOST)


def on_device(sharding: NamedSharding) -> NamedSharding:
    return sharding.with_memory_kind(DEVICE)


def to_device(tree: Tree) -> Tree:
    """Copy to device memory under jit; shardings stay the same."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf, jax.memory.Space.Device), tree)


def check_sharded_fraction(rules: AxisRules, axes: Tree, weights: Tree, tolerance: float) -> None:
    """Raise ConfigError if more than `tolerance` of the weights' bytes are needlessly replicated.

    A replicated weight counts if a mesh axis that shards other weights divides one of its
    dimensions.
    """
    names = {name for leaf in jax.tree.leaves(axes, is_leaf=is_axes) for name in leaf}
    mesh_axes = {axis for name, axes in rules.rules if name in names for axis in axes}
    sizes = [rules.mesh.shape.get(axis, 1) for axis in mesh_axes]
    sizes = [size for size in sizes if size > 1]
    replicated, total = [], 0
    for path, leaf, sharding in leaves_with_shardings(rules, axes, weights):
        nbytes = math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
        total += nbytes
        divides = any(dim % size == 0 for size in sizes for dim in leaf.shape if dim > 1)
        if divides and not any(as_tuple(entry) for entry in sharding.spec):
            replicated.append((nbytes, path, leaf.shape))
    fraction = sum(nbytes for nbytes, _, _ in replicated) / max(total, 1)
    if fraction > tolerance:
        largest = sorted(replicated, reverse=True)[:3]
        examples = ", ".join(f"{path} {list(shape)}" for _, path, shape in largest)
        raise ConfigError(
            f"{fraction:.1%} of the weights would be replicated on every device, more than "
            f"sharding_tolerance={tolerance:g}: {examples}; choose mesh sizes that divide their "
            "dimensions, change logical_axis_rules, or raise the tolerance"
        )


def check_batch_size(rules: AxisRules, rows: int, key: str) -> None:
    """Raise ConfigError if a batch of `rows` rows does not divide over the devices.

    It would be replicated, and all devices would do the same work. Fewer rows than devices are
    accepted if they divide them (per_device_batch_size=0.25): such rows are split along the
    sequence.
    """
    mesh_axes = rules.axes_of(("activation_batch",), (rules.mesh.size,))[0]
    num_shards = math.prod(rules.mesh.shape[axis] for axis in mesh_axes)
    if rows % num_shards and num_shards % rows:
        raise ConfigError(
            f"a batch of {rows} sequences does not divide over the {num_shards} devices of "
            f"{' x '.join(mesh_axes)}: change {key}, or give devices to axes that split a sequence "
            "(ici_context_parallelism, ici_tensor_parallelism)"
        )


def describe_shardings(rules: AxisRules, axes: Tree, weights: Tree) -> Iterable[str]:
    """A line per weight: logical axes, mesh axes, and the shape of a shard."""
    by_path = dict(zip(leaf_paths(weights), jax.tree.leaves(axes, is_leaf=is_axes), strict=True))
    for path, leaf, sharding in leaves_with_shardings(rules, axes, weights):
        logical = ", ".join(name or "-" for name in by_path[path])
        physical = ", ".join("+".join(as_tuple(entry)) or "-" for entry in sharding.spec)
        shard_shape = list(sharding.shard_shape(leaf.shape))
        yield f"{path} {list(leaf.shape)}: ({logical}) -> ({physical}), shards {shard_shape}"


def leaves_with_shardings(
    rules: AxisRules, axes: Tree, weights: Tree
) -> Iterable[tuple[str, Tree, NamedSharding]]:
    """(path, leaf, sharding) of each weight."""
    shardings = jax.tree.leaves(rules.shardings(axes, weights))
    return zip(leaf_paths(weights), jax.tree.leaves(weights), shardings, strict=True)


def leaf_paths(weights: Tree) -> list[str]:
    return [
        "/".join(str(step.key) for step in path) for path, _ in jax.tree.leaves_with_path(weights)
    ]


def is_axes(leaf: object) -> bool:
    return isinstance(leaf, tuple)


def as_tuple(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())
