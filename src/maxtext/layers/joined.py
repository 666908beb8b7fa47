"""Kernels as one GPU reads them fastest: those of products with the same input in one array, and
for a single row with the numbers that a product adds up side by side.

In the tree of a model's weights, a `Joined` with all of them stands where the first kernel was, and
one without numbers where each of the others was. `linear.together` takes both that and plain
kernels.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from types import EllipsisType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.common.gpu import is_nvidia, target_capability
from maxtext.kernels.decode import gemv
from maxtext.layers.parameters import Template, Tree
from maxtext.sharding.manual import only_platform

# As layers give them to `together`; of the first three a layer has one.
GROUPS = (
    ("query", "key", "value"),
    ("query", "key"),
    ("wi_0", "wi_1"),
    ("out",),
    ("wo",),
    ("head",),
)
SMALL = 2**20  # of kernels with fewer numbers, it does not matter


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["values"],
    meta_fields=["shapes", "rank", "by_column"],
)
@dataclass(frozen=True)
class Joined:
    values: Any  # [inputs, all outputs]; None: where the first kernel was, there are all
    shapes: tuple[tuple[int, ...], ...]  # of each kernel, (*inputs, *outputs)
    rank: int  # how many dimensions inputs have
    by_column: bool = False  # values are [all outputs, inputs]

    def __getitem__(self, index: EllipsisType) -> "Joined":
        """Itself, as a parameter's `kernel[...]` asks for it."""
        if index is not Ellipsis:
            raise TypeError("joined kernels are used as a whole: kernel[...]")
        return self

    def products(self, x: jax.Array, dtype: Any) -> list[jax.Array]:
        """x [..., *inputs] times each kernel."""
        outer = x.shape[: x.ndim - self.rank]
        found = jnp.split(self.product(x, dtype), self.ends, axis=-1)
        return [
            y.reshape(*outer, *shape[self.rank :])
            for y, shape in zip(found, self.shapes, strict=True)
        ]

    def product(self, x: jax.Array, dtype: Any) -> jax.Array:
        """x [..., *inputs] times all kernels, [..., all outputs]."""
        outer, values = x.shape[: x.ndim - self.rank], self.values.astype(dtype)
        alone = math.prod(outer) == 1 and x.dtype == self.values.dtype == jnp.dtype(dtype)
        if alone and self.by_column and self.for_one_row:
            return gemv.gemv(x.reshape(-1), values).reshape(*outer, -1)
        return x.reshape(*outer, -1) @ (values.T if self.by_column else values)

    def turned(self) -> "Joined":
        return replace(self, values=transposed(self.values), by_column=not self.by_column)

    @property
    def for_one_row(self) -> bool:
        """Whether it is what products of a single row can take, by column."""
        depth, dtype = math.prod(self.shapes[0][: self.rank]), self.values.dtype
        known = all(
            gemv.supports(depth, math.prod(shape[self.rank :]), dtype) for shape in self.shapes
        )
        return known and is_nvidia(target_capability())

    @property
    def ends(self) -> list[int]:
        return list(accumulate(math.prod(shape[self.rank :]) for shape in self.shapes[:-1]))

    def apart(self) -> list[np.ndarray]:
        """Each kernel, in the host's memory: the device may have no room for them."""
        values = np.asarray(self.values)
        parts = np.split(values.T if self.by_column else values, self.ends, axis=1)
        return [part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)]


@partial(jax.jit, static_argnums=1)
def side_by_side(kernels: list[jax.Array], rank: int) -> jax.Array:
    return jnp.concatenate(
        [kernel.reshape(math.prod(kernel.shape[:rank]), -1) for kernel in kernels], axis=1
    )


@jax.jit
def transposed(values: jax.Array) -> jax.Array:
    return values.T


def join(template: Template, weights: Tree) -> Tree:
    """On one GPU, with such kernels of floats joined. The weights that are given are gone."""
    if only_platform() != "gpu":
        return weights

    def walk(tree: Tree, contracted: Tree, axes: Tree) -> Tree:
        if not isinstance(tree, dict):
            return tree
        made = {name: walk(branch, contracted[name], axes[name]) for name, branch in tree.items()}
        for names in groups(made, contracted, axes):
            kernels = [made[name]["kernel"] for name in names]
            shapes, rank = (
                tuple(kernel.shape for kernel in kernels),
                len(contracted[names[0]]["kernel"]),
            )
            for name in names:
                made[name] = made[name] | {"kernel": Joined(None, shapes, rank)}
            made[names[0]]["kernel"] = Joined(side_by_side(kernels, rank), shapes, rank)
            for kernel in kernels:
                kernel.delete()  # now, not when the whole tree is: there may not be room for both
        return made

    return walk(weights, template.contracted, template.axes)


def groups(tree: Tree, contracted: Tree, axes: Tree) -> Iterator[tuple[str, ...]]:
    """Of a layer: the names of its products whose kernels can be joined, if there are any."""

    def plain(name: str) -> bool:
        kernel = tree[name].get("kernel") if isinstance(tree.get(name), dict) else None
        if not isinstance(kernel, jax.Array) or not jnp.issubdtype(kernel.dtype, jnp.floating):
            return False
        over = tuple(contracted[name]["kernel"])
        return (
            bool(over) and over == tuple(range(len(over))) and "layers" not in axes[name]["kernel"]
        )

    for names in GROUPS:
        # An indexer's queries and keys are of different inputs.
        if all(map(plain, names)) and len({axes[name]["kernel"][0] for name in names}) == 1:
            yield names


def lay_out(weights: Tree, dtype: Any, alone: bool) -> bool:
    """In place, joined kernels as products want them where rows of `dtype` come alone, or several
    together. Returns whether products of a single row are fast now."""
    leaves = jax.tree_util.tree_leaves_with_path(
        weights, is_leaf=lambda leaf: isinstance(leaf, Joined)
    )
    if not any(isinstance(leaf, Joined) for _, leaf in leaves):
        return False
    fast = alone and all(is_fast(path, leaf, dtype) for path, leaf in leaves)
    del leaves
    turn(weights, by_column=fast)
    return fast


def is_fast(path: Any, leaf: Any, dtype: Any) -> bool:
    """Whether a product with a single row is, by column. Embeddings are looked up, or else they lie
    as they should.
    """
    if isinstance(leaf, Joined):
        return leaf.values is None or (leaf.values.dtype == jnp.dtype(dtype) and leaf.for_one_row)
    return leaf.size < SMALL or path[0].key == "embedder"


def turn(tree: Tree, by_column: bool) -> None:
    for name, leaf in tree.items():
        if isinstance(leaf, dict):
            turn(leaf, by_column)
        elif isinstance(leaf, Joined) and leaf.values is not None and leaf.by_column != by_column:
            tree[name] = leaf.turned()  # the other goes at once, if nobody else has it


def apart(weights: Tree) -> Tree:
    """With each kernel in its own place again; what was joined stays as it is."""
    if not isinstance(weights, dict):
        return weights
    made = {name: apart(branch) for name, branch in weights.items()}
    for names in GROUPS:
        first = made[names[0]].get("kernel") if isinstance(made.get(names[0]), dict) else None
        if isinstance(first, Joined) and len(first.shapes) == len(names):
            for name, kernel in zip(names, first.apart(), strict=True):
                made[name] = made[name] | {"kernel": kernel}
    return made
