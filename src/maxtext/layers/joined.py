"""Kernels that multiply the same input, side by side in one array: a GPU reads them faster in one product than in more.

In the tree of a model's weights, a `Joined` with all of them stands where the first kernel was, and one without
numbers where each of the others was. `linear.together` takes both that and plain kernels.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from types import EllipsisType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.layers.parameters import Template, Tree
from maxtext.sharding.manual import only_platform

GROUPS = (("query", "key", "value"), ("query", "key"), ("wi_0", "wi_1"))  # as layers give them to `together`


@partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["shapes"])
@dataclass(frozen=True)
class Joined:
    values: Any  # [inputs, all outputs]; None: where the first kernel was, there are all
    shapes: tuple[tuple[int, ...], ...]  # of each kernel

    def __getitem__(self, index: EllipsisType) -> "Joined":
        """Itself, as a parameter's `kernel[...]` asks for it."""
        if index is not Ellipsis:
            raise TypeError("joined kernels are used as a whole: kernel[...]")
        return self

    def products(self, x: jax.Array, dtype: Any) -> list[jax.Array]:
        """x [..., inputs] times each kernel."""
        found = jnp.split(x @ self.values.astype(dtype), self.ends, axis=-1)
        return [y.reshape(*x.shape[:-1], *shape[1:]) for y, shape in zip(found, self.shapes, strict=True)]

    @property
    def ends(self) -> list[int]:
        return list(accumulate(math.prod(shape[1:]) for shape in self.shapes[:-1]))

    def apart(self) -> list[np.ndarray]:
        """Each kernel, in the host's memory: the device may have no room for them."""
        parts = np.split(np.asarray(self.values), self.ends, axis=-1)
        return [part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)]


@jax.jit
def side_by_side(kernels: list[jax.Array]) -> jax.Array:
    return jnp.concatenate([kernel.reshape(len(kernel), -1) for kernel in kernels], axis=1)


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
            shapes = tuple(kernel.shape for kernel in kernels)
            for name in names:
                made[name] = made[name] | {"kernel": Joined(None, shapes)}
            made[names[0]]["kernel"] = Joined(side_by_side(kernels), shapes)
            for kernel in kernels:
                kernel.delete()  # now, not when the whole tree is: there may not be room for both
        return made

    return walk(weights, template.contracted, template.axes)


def groups(tree: Tree, contracted: Tree, axes: Tree) -> Iterator[tuple[str, ...]]:
    """Of a layer: the names of its products whose kernels can be joined, if there are any."""

    def plain(name: str) -> bool:
        kernel = tree[name].get("kernel") if isinstance(tree.get(name), dict) else None
        floats = isinstance(kernel, jax.Array) and jnp.issubdtype(kernel.dtype, jnp.floating)
        return floats and tuple(contracted[name]["kernel"]) == (0,) and "layers" not in axes[name]["kernel"]

    for names in GROUPS:
        # An indexer's queries and keys are of different inputs.
        if all(map(plain, names)) and len({axes[name]["kernel"][0] for name in names}) == 1:
            yield names
            return


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
