"""Logical axis rules: every tensor dimension has a name, and the rules say which mesh axes may
split it.

Rules of one name are tried in order; a mesh axis that another dimension of the tensor uses already
is skipped, and so is a rule whose axes do not divide the dimension.
"""

import contextlib
import contextvars
import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxtext.configs.types import MaxTextConfig

Axes = Sequence[str | None]


@dataclass(frozen=True)
class AxisRules:
    mesh: Mesh
    rules: tuple[tuple[str, tuple[str, ...]], ...]
    one_of_several: bool = (
        False  # the mesh's device stands for one of them: what only a lone one can do, it does not
    )

    @classmethod
    def of(cls, config: MaxTextConfig, mesh: Mesh) -> "AxisRules":
        return cls(mesh, tuple((name, tuple(axes)) for name, axes in config.logical_axis_rules))

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
        """`allowed`: the mesh axes that may be used; all of them, if None."""
        if allowed is None:
            return NamedSharding(self.mesh, self.spec(axes, shape))
        rules = tuple(
            (name, tuple(axis for axis in axes if axis in allowed)) for name, axes in self.rules
        )
        return NamedSharding(self.mesh, AxisRules(self.mesh, rules).spec(axes, shape))

    def shardings(self, axes: Any, weights: Any) -> Any:
        """A tree of shardings for a tree of abstract weights and one of their axis names."""
        return jax.tree.map(lambda leaf, names: self.sharding(names, leaf.shape), weights, axes)

    def over_devices(self) -> NamedSharding:
        """One entry of an array for each device."""
        return NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))

    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())


_ACTIVE: contextvars.ContextVar[AxisRules | None] = contextvars.ContextVar(
    "axis_rules", default=None
)


@contextlib.contextmanager
def use_rules(rules: AxisRules | None) -> Iterator[None]:
    """While a step is traced: what `constrain` goes by. None: nothing is constrained."""
    token = _ACTIVE.set(rules)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def active_rules() -> AxisRules | None:
    return _ACTIVE.get()


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Lay an activation out by the names of its dimensions. Without rules, or on one device, it
    stays as it is.
    """
    rules = active_rules()
    if rules is None or rules.mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, rules.sharding(axes, x.shape))
