"""Nested dicts of arrays, the form of a model's weights: flat and nested, merged, and compared.

A leaf is whatever is not a dict: an array, or an object such as a quantized weight.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.common.types import Tree

Path = tuple[Any, ...]
Array = np.ndarray | jax.Array  # on the host, or on a device


def flatten_dict(tree: Tree, path: Path = ()) -> dict[Path, Tree]:
    """The leaves of a nested dict by their paths, in its order."""
    if not isinstance(tree, dict):
        return {path: tree}
    return {
        leaf_path: leaf
        for name, branch in tree.items()
        for leaf_path, leaf in flatten_dict(branch, (*path, name)).items()
    }


def unflatten_dict(leaves: Mapping[Any, Any]) -> dict[Any, Any]:
    """The inverse of `flatten_dict`."""
    tree: dict[Any, Any] = {}
    for path, leaf in leaves.items():
        branch = tree
        for name in path[:-1]:
            branch = branch.setdefault(name, {})
        branch[path[-1]] = leaf
    return tree


def merge_dicts(base: dict, other: dict) -> dict:
    """A nested dict with the leaves of both; where both have one, that of `other`."""
    merged = dict(base)
    for name, branch in other.items():
        merged[name] = (
            merge_dicts(merged.get(name, {}), branch) if isinstance(branch, dict) else branch
        )
    return merged


@jax.jit
def checksum(tree: Tree) -> jax.Array:
    """A uint32 of the bits of all leaves, the same for every mesh: sums of integers are exact."""
    total = jnp.uint32(0)
    for index, leaf in enumerate(jax.tree.leaves(tree)):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            leaf = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}"))
        total += jnp.sum(leaf.astype(jnp.uint32), dtype=jnp.uint32) * jnp.uint32(2 * index + 1)
    return total


def common_prefix_length(first: Sequence[object], second: Sequence[object]) -> int:
    """The number of leading elements that two sequences have in common."""
    shorter = min(len(first), len(second))
    return next((index for index in range(shorter) if first[index] != second[index]), shorter)
