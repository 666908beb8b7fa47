"""A training state as a dict of arrays by path, the form in which a checkpoint stores it.

`to_flat_dict` flattens a state. The paths do not depend on the classes of the trainer or the
optimizer: ("weights", "embedder", "embedding"), ("optimizer", …, "mu", "embedder", "embedding"),
("step",), ("key",). On disk they are nested folders of one tree, so that other programs can also
read it.

`match_names` finds parameters that a checkpoint has under a former name. Names on disk are never
rewritten: when a path component of the model is renamed, it gets an entry in RENAMED_COMPONENTS.
This applies to weights and to the optimizer state that belongs to them, in training checkpoints and
in weight folders.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np

from maxtext.checkpoint.tensors import TensorInfo
from maxtext.common.types import Tree

TreePath = tuple[str, ...]
WEIGHTS, OPTIMIZER = "weights", "optimizer"


def to_flat_dict(tree: Tree) -> dict[TreePath, Tree]:
    """The leaves of a pytree by path."""
    return {tree_path(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def tree_path(key_path: tuple[Any, ...]) -> TreePath:
    return tuple(map(key_string, key_path))


def key_string(key: Any) -> str:
    """A key of a JAX key path as a string, whatever the kind of container."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    raise TypeError(f"{key!r} is not a key of a pytree")


def unflatten_like(target: Tree, leaves: Mapping[TreePath, Tree]) -> Tree:
    """A pytree with the structure of `target` and these leaves."""
    return jax.tree.map_with_path(lambda path, _: leaves[tree_path(path)], target)


def join_path(path: TreePath) -> str:
    return "/".join(path)


def tensor_infos(leaves: Mapping[TreePath, Tree]) -> dict[TreePath, TensorInfo]:
    """The dtypes and shapes of arrays, abstract or not."""
    return {
        path: TensorInfo(np.dtype(leaf.dtype), tuple(leaf.shape)) for path, leaf in leaves.items()
    }


def compare_trees(
    saved: Mapping[TreePath, TensorInfo], expected: Mapping[TreePath, TensorInfo]
) -> list[str]:
    """How the tensors of a checkpoint differ from those that a run expects, a sentence each.
    Dtypes may differ, since floats are cast.
    """
    problems = []
    for path in dict.fromkeys([*saved, *expected]):
        stored, wanted = saved.get(path), expected.get(path)
        if stored is None:
            assert wanted is not None
            problems.append(f"{join_path(path)} {list(wanted.shape)} is not in the checkpoint")
        elif wanted is None:
            problems.append(f"{join_path(path)} {list(stored.shape)} is only in the checkpoint")
        elif stored.shape != wanted.shape:
            problems.append(
                f"{join_path(path)} has shape {list(stored.shape)} in the checkpoint and "
                f"{list(wanted.shape)} here"
            )
    return problems


# Former path component -> current path component
RENAMED_COMPONENTS = {"kernel": "weight"}

NameT = TypeVar("NameT", str, tuple[str, ...])  # "a/b/kernel" or ("a", "b", "kernel")


def current_name(name: NameT) -> NameT:
    """Replace every renamed component of a name.

    The last component may have a suffix, as in "kernel.scale" and "kernel[0:4,0:8]".
    """
    if isinstance(name, str):
        return "/".join(map(current_component, name.split("/")))
    return tuple(map(current_component, name))


def current_component(component: str) -> str:
    stem = re.split(r"[.\[]", component, maxsplit=1)[0]
    return RENAMED_COMPONENTS.get(stem, stem) + component[len(stem) :]


def match_names(stored: Iterable[NameT], expected: Collection[NameT]) -> dict[NameT, NameT]:
    """The stored name of every tensor of a checkpoint by its name in the model: {name: stored}.

    A stored name is replaced only if the model expects its current form and not the stored one,
    and if the checkpoint has no tensor of that name already. Other names map to themselves.
    """
    stored = list(stored)
    taken = set(stored)
    names = {}
    for name in stored:
        current = current_name(name)
        renamed = name not in expected and current in expected and current not in taken
        names[current if renamed else name] = name
    return names
