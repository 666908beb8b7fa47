"""A training state as named arrays: what a checkpoint holds, whatever classes the trainer and its
optimizer keep it in.

A name is the path of an array in the state: ("weights", "embedder", "embedding"), ("optimizer", …,
"mu", "embedder", "embedding"), ("step",), ("key",). On disk names are nested folders of one tree,
so other programs can read it, too.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from maxtext.checkpoint.tensors import TensorInfo

Name = tuple[str, ...]
WEIGHTS, OPTIMIZER = "weights", "optimizer"


def to_flat_dict(tree: Any) -> dict[Name, Any]:
    """The leaves of a tree by name."""
    return {tuple(map(word, path)): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def word(key: Any) -> str:
    """One step of a path, of whatever kind of container."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    raise TypeError(f"{key!r} is no step of a path")


def unflatten_like(like: Any, leaves: Mapping[Name, Any]) -> Any:
    """A tree like another, with these leaves."""
    return jax.tree.map_with_path(lambda path, _: leaves[tuple(map(word, path))], like)


def from_flat_dict(leaves: Mapping[Name, Any]) -> dict[str, Any]:
    """Named leaves as a tree of dicts."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        branch = tree
        for step in name[:-1]:
            branch = branch.setdefault(step, {})
        branch[name[-1]] = leaf
    return tree


def join_path(name: Name) -> str:
    return "/".join(name)


def tensor_infos(leaves: Mapping[Name, Any]) -> dict[Name, TensorInfo]:
    """What arrays are, abstract or not."""
    return {
        name: TensorInfo(np.dtype(leaf.dtype), tuple(leaf.shape)) for name, leaf in leaves.items()
    }


def compare_trees(saved: Mapping[Name, TensorInfo], wanted: Mapping[Name, TensorInfo]) -> list[str]:
    """What a checkpoint has otherwise than a run wants it, in words; dtypes may differ, for floats
    are cast.
    """
    problems = []
    for name in in_order(saved, wanted):
        there, here = saved.get(name), wanted.get(name)
        if there is None:
            problems.append(
                f"{join_path(name)} {list(here.shape)} is not in the checkpoint" if here else ""
            )
        elif here is None:
            problems.append(f"{join_path(name)} {list(there.shape)} is only in the checkpoint")
        elif there.shape != here.shape:
            problems.append(
                f"{join_path(name)} has shape {list(there.shape)} in the checkpoint and {list(here.shape)} here"
            )
    return problems


def in_order(*names: Iterable[Name]) -> list[Name]:
    return list(dict.fromkeys(name for some in names for name in some))
