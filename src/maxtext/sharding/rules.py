"""Logical axis rules: every tensor dimension has a name, and the rules say which mesh axes may split it.

Rules of one name are tried in order; a mesh axis that another dimension of the tensor uses already is skipped, and so
is a rule whose axes do not divide the dimension.
"""

import contextlib
import contextvars
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Axes = Sequence[str | None]


@dataclass(frozen=True)
class AxisRules:
    mesh: Mesh
    rules: tuple[tuple[str, tuple[str, ...]], ...]

    @classmethod
    def of(cls, config: Any, mesh: Mesh) -> "AxisRules":
        return cls(mesh, tuple((name, tuple(axes)) for name, axes in config.logical_axis_rules))

    def spec(self, axes: Axes, shape: Sequence[int]) -> PartitionSpec:
        used: set[str] = set()
        entries: list[tuple[str, ...] | None] = []
        for name, size in zip(axes, shape, strict=True):
            chosen = self.mesh_axes(name, size, used)
            used |= set(chosen)
            entries.append(chosen or None)
        return PartitionSpec(*entries)

    def mesh_axes(self, name: str | None, size: int, used: set[str]) -> tuple[str, ...]:
        if name is None:
            return ()
        for rule, axes in self.rules:
            if rule != name:
                continue
            free = tuple(axis for axis in axes if self.mesh.shape.get(axis, 1) > 1 and axis not in used)
            if free and size % math.prod(self.mesh.shape[axis] for axis in free) == 0:
                return free
        return ()

    def sharding(self, axes: Axes, shape: Sequence[int]) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(axes, shape))

    def shardings(self, axes: Any, weights: Any) -> Any:
        """A tree of shardings for a tree of abstract weights and one of their axis names."""
        return jax.tree.map(lambda leaf, names: self.sharding(names, leaf.shape), weights, axes)

    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())


_ACTIVE: contextvars.ContextVar[AxisRules | None] = contextvars.ContextVar("axis_rules", default=None)


@contextlib.contextmanager
def use_rules(rules: AxisRules) -> Iterator[None]:
    """While a step is traced: what `constrain` goes by."""
    token = _ACTIVE.set(rules)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Lay an activation out by the names of its dimensions. Without rules, or on one device, it stays as it is."""
    rules = _ACTIVE.get()
    if rules is None or rules.mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, rules.sharding(axes, x.shape))
