"""Weights as NNX parameters that know their logical axes, and models as pure trees of arrays.

A model is described once (`Template`): its NNX graph and, for every weight, shape, dtype and axes;
no memory is touched. Steps run on the weights alone, a nested dict, and `Template.bind` makes a
callable model of them.
"""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxtext.common import hash_rng

Tree = Any


@dataclass(frozen=True)
class Initializer:
    """Creates the parameters of a module: their random values, dtype and initial scale.

    Without a key it creates arrays of the right shape without values, to describe a model.
    """

    key: jax.Array | None
    dtype: Any
    init_scale: float = 1.0  # variance of a weight times its fan-in
    recipe: str = ""  # of products in eight bits, see kernels/quantized_matmul.py
    loop: bool = False  # weights of equal layers are created in a loop, see `alike`

    def child(self, name: str) -> "Initializer":
        """The initializer of a submodule: its key is folded with the submodule's name."""
        return replace(self, key=self.fold(name))

    def fold(self, name: str) -> jax.Array | None:
        if self.key is None:
            return None
        return hash_rng.fold_in(self.key, np.uint32(zlib.crc32(name.encode())))

    def standard_normal(
        self, name: str, shape: tuple[int, ...], cut: float | None = None
    ) -> jax.Array:
        """Standard normal values, truncated at +-`cut` if that is given."""
        key = self.fold(name)
        return jnp.zeros(shape) if key is None else hash_rng.normal(key, shape, cut)

    def weight(
        self,
        name: str,
        in_shape: Sequence[int],
        out_shape: Sequence[int],
        axes: Sequence[str | None],
        contracted: Sequence[int] = (),
    ) -> nnx.Param:
        """A weight [*in_shape, *out_shape]: truncated normal with variance init_scale / fan-in.

        `contracted`: the dimensions that its matmul sums over, if its consumer also takes a
        quantized weight.
        """
        deviation = math.sqrt(self.init_scale / math.prod(in_shape))
        # The divisor restores the variance that truncation at two deviations takes away.
        unit = self.standard_normal(name, (*in_shape, *out_shape), cut=2.0)
        values = (unit * deviation / 0.87962566103423978).astype(self.dtype)
        return nnx.Param(values, axes=tuple(axes), contracted=tuple(contracted))

    def normal(
        self, name: str, shape: Sequence[int], deviation: float, axes: Sequence[str | None]
    ) -> nnx.Param:
        unit = self.standard_normal(name, tuple(shape))
        return nnx.Param((unit * deviation).astype(self.dtype), axes=tuple(axes))

    def constant(
        self,
        shape: Sequence[int],
        value: float,
        axes: Sequence[str | None],
        trained: bool = True,
        dtype: Any = None,
    ) -> nnx.Param:
        """`trained`: false for a parameter that no optimizer may update. `dtype`: fixes the dtype
        of this parameter in every model and folder, whatever `weight_dtype` is."""
        values = jnp.full(shape, value, dtype or self.dtype)
        return nnx.Param(values, axes=tuple(axes), trained=trained, fixed_dtype=dtype is not None)


def stack(
    make: Callable[[Initializer], nnx.Module], initializers: Sequence[Initializer], axis: int
) -> nnx.Module:
    """Equal modules as one whose weights have a further dimension, "layers", at `axis` (or last
    where that is less).
    """

    single, weights = described(make, initializers[0])
    places = jax.tree.map(lambda value: min(axis, value.ndim), single.weights)
    keys = [initializer.key for initializer in initializers if initializer.key is not None]
    if keys:
        stacked = jax.vmap(weights, out_axes=places)(jnp.stack(keys))
    else:
        stacked = jax.tree.map(
            lambda value, place: jnp.zeros(
                (*value.shape[:place], len(initializers), *value.shape[place:]), value.dtype
            ),
            single.weights,
            places,
        )
    for _, variable in nnx.to_flat_state(single.state):
        facts = variable.get_metadata()
        axes = list(facts["axes"])
        place = min(axis, len(axes))
        axes.insert(place, "layers")
        contracted = tuple(one if one < place else one + 1 for one in facts.get("contracted", ()))
        variable.set_metadata(axes=tuple(axes), contracted=contracted)
    return single.bind(stacked)


def alike(
    make: Callable[[Initializer], nnx.Module], initializers: Sequence[Initializer]
) -> list[nnx.Module]:
    """Equal modules, each with weights of its own. As part of a program, what makes them is traced
    once. With `Initializer.loop` those that all modules have are made one after the other, by a loop:
    with a copy of what makes them for each module, XLA for GPUs took ten seconds. But then all of
    them are there before any is used."""
    single, weights = described(make, initializers[0])
    if initializers[0].key is None:
        return [
            single.bind(
                jax.tree.map(lambda value: jnp.zeros(value.shape, value.dtype), single.weights)
            )
            for _ in initializers
        ]
    once = jax.jit(weights) if isinstance(initializers[0].key, jax.core.Tracer) else weights
    if len(initializers) == 1 or once is weights or not initializers[0].loop:
        return [single.bind(once(initializer.key)) for initializer in initializers]
    keys = jnp.stack(
        [initializer.key for initializer in initializers if initializer.key is not None]
    )
    places = range(len(jax.tree.leaves(single.weights)))
    leaves = []
    for place in places:
        stacked = jax.lax.map(lambda key, place=place: jax.tree.leaves(once(key))[place], keys)
        apart = [
            jax.lax.index_in_dim(stacked, number, keepdims=False)
            for number in range(len(initializers))
        ]
        keys, apart = jax.lax.optimization_barrier(
            (keys, apart)
        )  # else all stacks may be there at once
        leaves.append(apart)
    tree = jax.tree.structure(single.weights)
    return [single.bind(jax.tree.unflatten(tree, row)) for row in zip(*leaves, strict=True)]


def described(
    make: Callable[[Initializer], nnx.Module], initializer: Initializer
) -> "tuple[Template, Callable[[jax.Array | None], Tree]]":
    """A module, and its weights of a key."""

    def weights(key: jax.Array | None) -> Tree:
        return nnx.to_pure_dict(nnx.state(make(replace(initializer, key=key))))

    return Template.of(lambda: make(replace(initializer, key=None))), weights


def slices(module: nnx.Module, axis: int) -> tuple[nnx.GraphDef, nnx.State]:
    """A stacked module as its graph and its weights with "layers" first, ready to be scanned
    over.
    """
    graph, state = nnx.split(module)
    return graph, jax.tree.map(
        lambda value: jnp.moveaxis(value, min(axis, value.ndim - 1), 0), state
    )


@dataclass(frozen=True)
class Template:
    """A model without its weights."""

    graph: nnx.GraphDef
    state: nnx.State  # of abstract arrays

    @classmethod
    def of(cls, make: Callable[[], nnx.Module]) -> "Template":
        graph, state = nnx.split(nnx.eval_shape(make))
        return cls(graph, state)

    @property
    def weights(self) -> Tree:
        """Nested dict of jax.ShapeDtypeStruct."""
        return nnx.to_pure_dict(self.state)

    @property
    def axes(self) -> Tree:
        """Nested dict of tuples of logical axis names, of the same structure."""
        return self.metadata(lambda facts: facts["axes"])

    @property
    def trained(self) -> Tree:
        """Nested dict of bools: which weights an optimizer may touch."""
        return self.metadata(lambda facts: facts.get("trained", True))

    @property
    def fixed_dtype(self) -> Tree:
        """Nested dict of bools: which weights have a dtype of their own, whatever weight_dtype
        is.
        """
        return self.metadata(lambda facts: facts.get("fixed_dtype", False))

    @property
    def contracted(self) -> Tree:
        """Nested dict of tuples: over which dimensions a kernel's product adds up; none: it is
        never quantized.
        """
        return self.metadata(lambda facts: facts.get("contracted", ()))

    def metadata(self, read: Callable[[dict], Any]) -> Tree:
        tree: dict = {}
        for path, variable in nnx.to_flat_state(self.state):
            branch = tree
            for name in path[:-1]:
                branch = branch.setdefault(name, {})
            branch[path[-1]] = read(variable.get_metadata())
        return tree

    def bind(self, weights: Tree) -> Any:
        """The model with these weights."""
        state = jax.tree.map(lambda value: value, self.state)
        nnx.replace_by_pure_dict(state, weights)
        return nnx.merge(self.graph, state)
