"""Logical axis rules: each tensor dimension has a name, and rules map names to mesh axes.

The rules of a name are tried in order. A mesh axis that another dimension of the tensor uses is
skipped, and so is a rule whose axes do not divide the dimension.
"""

import contextlib
import contextvars
import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxtext.common.types import Tree
from maxtext.configs.types import MaxTextConfig

Axes = Sequence[str | None]


@dataclass(frozen=True)
class AxisRules:
    mesh: Mesh
    rules: tuple[tuple[str, tuple[str, ...]], ...]
    # The mesh's only device represents one of several: single-device kernels are not used.
    one_of_several: bool = False

    @classmethod
    def from_config(cls, config: MaxTextConfig, mesh: Mesh) -> "AxisRules":
        return cls(mesh, tuple((name, tuple(axes)) for name, axes in config.logical_axis_rules))

    def for_evaluation(self, config: MaxTextConfig) -> "AxisRules":
        """The rules of evaluation, on the same mesh."""
        rules = config.logical_axis_rules_for_eval or config.logical_axis_rules
        return replace(self, rules=tuple((name, tuple(axes)) for name, axes in rules))

    def spec(self, axes: Axes, shape: Sequence[int]) -> PartitionSpec:
        return PartitionSpec(*(chosen or None for chosen in self.axes_of(axes, shape)))

    def axes_of(self, axes: Axes, shape: Sequence[int]) -> tuple[tuple[str, ...], ...]:
        """For each dimension, the mesh axes that split it."""
        used: set[str] = set()
        entries: list[tuple[str, ...]] = []
        for name, size in zip(axes, shape, strict=True):
            entries.append(self.mesh_axes(name, size, used))
            used |= set(entries[-1])
        return tuple(entries)

    def mesh_axes(self, name: str | None, size: int, used: set[str]) -> tuple[str, ...]:
        """The mesh axes of a dimension, without those in `used`; empty if none fits."""
        if name is None:
            return ()
        for rule, axes in self.rules:
            if rule != name:
                continue
            free = tuple(
                axis for axis in axes if self.mesh.shape.get(axis, 1) > 1 and axis not in used
            )
            if free and size % math.prod(self.mesh.shape[axis] for axis in free) == 0:
                return free
        return ()

    def sharding(
        self, axes: Axes, shape: Sequence[int], allowed: Container[str] | None = None
    ) -> NamedSharding:
        """The sharding of an array; `allowed` restricts the mesh axes (None: all)."""
        if allowed is None:
            return NamedSharding(self.mesh, self.spec(axes, shape))
        rules = tuple(
            (name, tuple(axis for axis in axes if axis in allowed)) for name, axes in self.rules
        )
        return NamedSharding(self.mesh, AxisRules(self.mesh, rules).spec(axes, shape))

    def shardings(self, axes: Tree, weights: Tree) -> Tree:
        """A tree of shardings from trees of abstract weights and of their axis names."""
        return jax.tree.map(lambda leaf, names: self.sharding(names, leaf.shape), weights, axes)

    def one_per_device(self) -> NamedSharding:
        """The sharding of an array with one entry per device."""
        return NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))

    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())


_ACTIVE: contextvars.ContextVar[AxisRules | None] = contextvars.ContextVar(
    "axis_rules", default=None
)


@contextlib.contextmanager
def use_rules(rules: AxisRules | None) -> Iterator[None]:
    """The rules of `constrain` while a step is traced; with None it has no effect."""
    token = _ACTIVE.set(rules)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def active_rules() -> AxisRules | None:
    return _ACTIVE.get()


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrain the sharding of an activation by the logical names of its dimensions.

    Without rules, or on one device, returns x.
    """
    rules = active_rules()
    if rules is None or rules.mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, rules.sharding(axes, x.shape))
