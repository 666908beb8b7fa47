"""Copies of the trainer's weights on the devices of a sampler, with their own layout.

Weights that are trained are copied in every sync. Frozen ones, the base of adapters, are copied
once. reshard_chunk_size tensors are copied at a time, so that only their copies are in flight.
"""

from collections.abc import Collection, Set

import jax

from maxtext.common.errors import UserError
from maxtext.common.trees import checksum
from maxtext.common.types import Tree

Path = jax.tree_util.KeyPath


class WeightSync:
    """`shardings`: of the sampler; `trained`: bools in the tree of the weights. `chunk_size`:
    tensors at a time, all if None."""

    def __init__(self, shardings: Tree, trained: Tree, chunk_size: int | None = None):
        self.shardings = dict(jax.tree.leaves_with_path(shardings))
        self.trained = jax.tree.leaves_with_path(trained)
        self.chunk_size = chunk_size
        self.frozen: dict[Path, jax.Array] = {}

    def is_frozen(self, path: Path) -> bool:
        """A leaf of `trained` may stand for a subtree, such as a quantized weight."""
        return any(not flag and path[: len(prefix)] == prefix for prefix, flag in self.trained)

    def copy(self, weights: Tree) -> Tree:
        """The weights on the sampler's devices. Raises UserError if they are not those of the
        sampler's model."""
        leaves, structure = jax.tree.flatten_with_path(weights)
        check_same_tensors({path for path, _ in leaves}, self.shardings.keys())
        copies = dict(self.frozen)
        missing = [(path, leaf) for path, leaf in leaves if path not in copies]
        size = self.chunk_size or max(len(missing), 1)
        for start in range(0, len(missing), size):
            chunk = missing[start : start + size]
            paths = [path for path, _ in chunk]
            arrays = jax.device_put(
                [leaf for _, leaf in chunk],
                [self.shardings[path] for path in paths],
                may_alias=False,  # updates delete the trainer's arrays
            )
            copies |= zip(paths, arrays, strict=True)
            if self.chunk_size is not None:
                jax.block_until_ready(arrays)
        if not self.frozen:
            self.frozen = {path: copies[path] for path, _ in leaves if self.is_frozen(path)}
        return jax.tree.unflatten(structure, [copies[path] for path, _ in leaves])


def check_synced(trainer_weights: Tree, sampler_weights: Tree) -> None:
    """Raise UserError if the sampler has other tensors than the trainer, or other values in one:
    otherwise the policy would train on samples of stale weights."""
    expected, actual = (
        dict(jax.tree.leaves_with_path(tree)) for tree in (trainer_weights, sampler_weights)
    )
    check_same_tensors(expected.keys(), actual.keys())
    copied = [path for path in expected if expected[path] is not actual[path]]
    # Their devices differ, so values are compared on the host.
    stale = [p for p in copied if int(checksum(expected[p])) != int(checksum(actual[p]))]
    if stale:
        raise UserError(
            "weight sync failed: the sampler has other values than the trainer in "
            f"{describe_paths(stale)}"
        )


def check_same_tensors(trainer: Set[Path], sampler: Set[Path]) -> None:
    """Raise UserError if one has a tensor that the other lacks."""
    if different := trainer ^ sampler:
        raise UserError(
            f"weight sync failed: only one of trainer and sampler has {describe_paths(different)}"
        )


def describe_paths(paths: Collection[Path]) -> str:
    first = sorted(jax.tree_util.keystr(path, simple=True, separator="/") for path in paths)[0]
    return first if len(paths) == 1 else f"{first} and {len(paths) - 1} more tensors"
