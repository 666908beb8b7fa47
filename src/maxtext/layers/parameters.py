"""Parameters with logical axes, and models as pure trees of arrays.

A `Template` describes a model: its NNX graph and the shape, dtype and logical axes of every
parameter; no memory is allocated. Steps run on the weights alone, a nested dict, and
`Template.bind` returns a callable model with them.
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
from jax.typing import DTypeLike

from maxtext.common import hash_rng
from maxtext.common.types import Tree
from maxtext.layers.context import REFERENCE, BuildContext

# quantize(weight, its contracted dimensions, initializer) -> an array, or quantized parts
Quantize = Callable[[jax.Array, tuple[int, ...], "Initializer"], Tree]


@dataclass(frozen=True)
class Initializer:
    """Creates the parameters of a module: their random values, dtype and initial scale.

    Without a key it creates arrays of the right shape without values, to describe a model.
    """

    key: jax.Array | None
    dtype: DTypeLike
    init_scale: float = 1.0  # variance of a weight times its fan-in
    context: BuildContext = REFERENCE
    # The weights of equal layers are created in a loop: with a copy of the code for each layer, XLA
    # for GPUs took ten seconds. But then those of all layers exist before any is used.
    loop: bool = False
    quantize: Quantize | None = None  # quantizes weights as they are created, one at a time
    stack_axis: int | None = None  # along which the parameters of several layers will be stacked
    # The native path of the module, for each of the layers that share it.
    paths: tuple[str, ...] = ("",)

    def child(self, name: str, path: str | None = None) -> "Initializer":
        """The initializer of a submodule: its key is folded with the submodule's name, and `path`
        (by default the name) is appended to its path."""
        paths = tuple(f"{parent}/{path or name}".removeprefix("/") for parent in self.paths)
        return replace(self, key=self.fold(name), paths=paths)

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
        cast_to: DTypeLike | None = None,
    ) -> nnx.Param:
        """A weight [*in_shape, *out_shape]: truncated normal with variance init_scale / fan-in.

        `contracted`: the dimensions that its matmul sums over, if its consumer also takes a
        quantized weight. `cast_to`: the dtype to which its layer casts it before every use.
        """
        deviation = math.sqrt(self.init_scale / math.prod(in_shape))
        # The divisor restores the variance that truncation at two deviations takes away.
        unit = self.standard_normal(name, (*in_shape, *out_shape), cut=2.0)
        values: jax.Array = (unit * deviation / 0.87962566103423978).astype(self.dtype)
        if self.quantize is not None and self.key is not None and contracted:
            values = self.quantize(values, tuple(contracted), self)
        return nnx.Param(values, axes=tuple(axes), contracted=tuple(contracted), cast_to=cast_to)

    def normal(
        self,
        name: str,
        shape: Sequence[int],
        deviation: float,
        axes: Sequence[str | None],
        cast_to: DTypeLike | None = None,
    ) -> nnx.Param:
        """`cast_to`: as in `weight`."""
        unit = self.standard_normal(name, tuple(shape))
        values = (unit * deviation).astype(self.dtype)
        return nnx.Param(values, axes=tuple(axes), cast_to=cast_to)

    def constant(
        self,
        shape: Sequence[int],
        value: float,
        axes: Sequence[str | None],
        trained: bool = True,
        dtype: DTypeLike | None = None,
    ) -> nnx.Param:
        """`trained`: false for a parameter that no optimizer may update. `dtype`: fixes the dtype
        of this parameter in every model and folder, whatever `weight_dtype` is."""
        values = jnp.full(shape, value, dtype or self.dtype)
        return nnx.Param(values, axes=tuple(axes), trained=trained, fixed_dtype=dtype is not None)


Make = Callable[[Initializer], nnx.Module]


def build_stacked(make: Make, initializers: Sequence[Initializer], axis: int) -> nnx.Module:
    """Equal modules as one, whose parameters are stacked along a new dimension "layers" at `axis`
    (or last, if they have fewer dimensions)."""
    single, weights = abstract_module(make, replace(for_all(initializers), stack_axis=axis))
    axes = jax.tree.map(lambda value: min(axis, value.ndim), single.weights)
    keys = [initializer.key for initializer in initializers if initializer.key is not None]
    if keys and initializers[0].quantize is not None:
        parts = [
            jnp.moveaxis(leaf, 0, min(axis, leaf.ndim - 1))
            for leaf in initialize_in_loop(weights, jnp.stack(keys))
        ]
        stacked = jax.tree.unflatten(jax.tree.structure(jax.eval_shape(weights, keys[0])), parts)
    elif keys:
        stacked = jax.jit(jax.vmap(weights, out_axes=axes))(jnp.stack(keys))
    else:
        stacked = jax.tree.map(
            lambda value, axis: jnp.zeros(
                (*value.shape[:axis], len(initializers), *value.shape[axis:]), value.dtype
            ),
            single.weights,
            axes,
        )
    for _, variable in nnx.to_flat_state(single.state):
        metadata = variable.get_metadata()
        names = list(metadata["axes"])
        index = min(axis, len(names))
        names.insert(index, "layers")
        contracted = tuple(i if i < index else i + 1 for i in metadata.get("contracted", ()))
        variable.set_metadata(axes=tuple(names), contracted=contracted)
    return single.bind(stacked)


def build_each(make: Make, initializers: Sequence[Initializer]) -> list[nnx.Module]:
    """Equal modules, each with its own parameters. Their initialization is traced once; inside a
    program it is a loop if the initializers say so, and otherwise a program of its own, which runs
    once for each module.
    """
    single, weights = abstract_module(make, for_all(initializers))
    if initializers[0].key is None:
        return [
            single.bind(jax.tree.map(lambda v: jnp.zeros(v.shape, v.dtype), single.weights))
            for _ in initializers
        ]
    initialize = jax.jit(weights)
    if len(initializers) == 1 or not initializers[0].loop:
        return [single.bind(initialize(initializer.key)) for initializer in initializers]
    keys = jnp.stack([init.key for init in initializers if init.key is not None])
    leaves = initialize_in_loop(initialize, keys, split=True)
    tree = jax.tree.structure(jax.eval_shape(initialize, keys[0]))
    return [single.bind(jax.tree.unflatten(tree, module)) for module in zip(*leaves, strict=True)]


def initialize_in_loop(
    initialize: Callable[[jax.Array], Tree], keys: jax.Array, split: bool = False
) -> list[Tree]:
    """The leaves of `initialize(key)` of all keys, stacked along a new first dimension; with
    `split`, a list of arrays each. One leaf of one key is computed at a time."""
    leaves: list[Tree] = []
    for i in range(len(jax.tree.leaves(jax.eval_shape(initialize, keys[0])))):
        leaf: Tree = jax.lax.map(lambda key, i=i: jax.tree.leaves(initialize(key))[i], keys)
        if split:
            leaf = [jax.lax.index_in_dim(leaf, j, keepdims=False) for j in range(len(keys))]
        # Without the barrier all stacked arrays may exist at once.
        keys, leaf = jax.lax.optimization_barrier((keys, leaf))
        leaves.append(leaf)
    return leaves


def for_all(initializers: Sequence[Initializer]) -> Initializer:
    """The first initializer with the paths of all: equal modules share one graph."""
    paths = tuple(path for initializer in initializers for path in initializer.paths)
    return replace(initializers[0], paths=paths)


def abstract_module(
    make: Make, initializer: Initializer
) -> "tuple[Template, Callable[[jax.Array | None], Tree]]":
    """The template of a module, and a function from a key to its weights."""

    def weights(key: jax.Array | None) -> Tree:
        return nnx.to_pure_dict(nnx.state(make(replace(initializer, key=key))))

    return Template.of(lambda: make(replace(initializer, key=None))), weights


def layers_first(module: nnx.Module, axis: int) -> tuple[nnx.GraphDef, nnx.State]:
    """The graph and the weights of a stacked module, with the dimension "layers" first, to be
    scanned over."""
    graph, state = nnx.split(module)
    return graph, jax.tree.map(
        lambda value: jnp.moveaxis(value, min(axis, value.ndim - 1), 0), state
    )


@dataclass(frozen=True)
class Template:
    """An abstract model: its graph and the metadata of its parameters."""

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
        return self.metadata(lambda metadata: metadata["axes"])

    @property
    def trained(self) -> Tree:
        """Nested dict of bools: which parameters an optimizer may update."""
        return self.metadata(lambda metadata: metadata.get("trained", True))

    @property
    def fixed_dtype(self) -> Tree:
        """Nested dict of bools: which parameters have a dtype of their own, whatever weight_dtype
        is."""
        return self.metadata(lambda metadata: metadata.get("fixed_dtype", False))

    @property
    def contracted(self) -> Tree:
        """Nested dict of tuples: the dimensions that a weight's matmul sums over; () if the weight
        is never quantized."""
        return self.metadata(lambda metadata: metadata.get("contracted", ()))

    def metadata(self, read: Callable[[dict], Tree]) -> Tree:
        tree: dict = {}
        for path, variable in nnx.to_flat_state(self.state):
            branch = tree
            for name in path[:-1]:
                branch = branch.setdefault(name, {})
            branch[path[-1]] = read(variable.get_metadata())
        return tree

    @property
    def cast_dtypes(self) -> Tree:
        """The dtype to which layers cast each weight before every use; "" if they use it as it
        is stored."""
        return self.metadata(lambda metadata: metadata.get("cast_to") or "")

    def cast(self, weights: Tree) -> Tree:
        """The weights in the smallest dtypes with which the model computes the same: those that
        layers cast are already cast, unless that would make them larger. All others, as norms
        and the biases of routers, keep their dtype."""

        def cast(dtype: DTypeLike, weight: Tree) -> Tree:
            is_smaller = dtype != "" and jnp.dtype(dtype).itemsize <= weight.dtype.itemsize
            return weight.astype(dtype) if is_smaller else weight

        return jax.tree.map(cast, self.cast_dtypes, weights)

    @property
    def for_cast(self) -> "Template":
        """The model with the weights that `cast` returns."""
        state = jax.tree.map(lambda value: value, self.state)
        nnx.replace_by_pure_dict(state, jax.eval_shape(self.cast, self.weights))
        return Template(self.graph, state)

    def bind(self, weights: Tree) -> Any:
        """The model with these weights."""
        state = jax.tree.map(lambda value: value, self.state)
        nnx.replace_by_pure_dict(state, weights)
        return nnx.merge(self.graph, state)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zeroes a fraction of the values and scales up the rest; the identity without a key."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)
