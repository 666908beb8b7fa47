"""A saved step on disk: its metadata, and its arrays restored directly into their shards."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from maxtext.checkpoint import steps
from maxtext.checkpoint.manager import RUN_FILE, StorageOptions, iterator_file, quiet_orbax
from maxtext.checkpoint.state import TreePath, match_names, to_flat_dict
from maxtext.checkpoint.tensors import TensorInfo
from maxtext.common.errors import UserError
from maxtext.common.trees import unflatten_dict
from maxtext.common.types import Json, Tree

ORBAX_ERRORS = (ValueError, OSError, KeyError, RuntimeError)


class CorruptCheckpoint(UserError):
    """A step cannot be read."""


@dataclass(frozen=True)
class SavedStep:
    """The folder of a step."""

    path: Path

    @property
    def step(self) -> int:
        return int(self.path.name)

    @cached_property
    def run(self) -> Json:
        """The metadata of the run that saved the step: layer layout, optimizer, mesh, processes."""
        return self.read_json(RUN_FILE)

    def iterator_states(self) -> list[Json]:
        """The data iterator's state of each process that saved the step, in their order."""
        return [self.read_json(iterator_file(process)) for process in range(self.run["processes"])]

    def read_json(self, name: str) -> Any:
        file = self.path / steps.RUN / name
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CorruptCheckpoint(
                f"{file} cannot be read: {getattr(error, 'strerror', None) or error}"
            ) from error

    @cached_property
    def metadata(self) -> dict[TreePath, Tree]:
        """Orbax's metadata of each array: shape, dtype, sharding, chunks."""
        quiet_orbax()
        try:
            with ocp.Checkpointer(StorageOptions().handler()) as reader:
                metadata = reader.metadata(self.path / steps.STATE).item_metadata
        except ORBAX_ERRORS as error:
            raise CorruptCheckpoint(f"{self.path} cannot be read: {error}") from error
        if metadata is None:
            raise CorruptCheckpoint(f"{self.path} cannot be read: its array metadata is damaged")
        return to_flat_dict(metadata.tree)

    @cached_property
    def tensors(self) -> dict[TreePath, TensorInfo]:
        return {
            path: TensorInfo(np.dtype(array.dtype), tuple(array.shape))
            for path, array in self.metadata.items()
        }

    def tensors_named_as(self, expected: Collection[TreePath]) -> dict[TreePath, TensorInfo]:
        """All stored tensors; those under a former name have the name that `expected` has."""
        matched = match_names(self.tensors, expected)
        return {path: self.tensors[stored] for path, stored in matched.items()}

    def restore(
        self,
        abstract: Mapping[TreePath, jax.ShapeDtypeStruct],
        storage: StorageOptions | None = None,
    ) -> dict[TreePath, Tree]:
        """Restore these arrays in their dtypes and shardings, or as NumPy arrays where no sharding
        is given. All must be stored, possibly under their former names.
        """
        matched = match_names(self.metadata, abstract)
        stored = {path: matched.get(path, path) for path in abstract}
        item = unflatten_dict({stored[path]: leaf for path, leaf in abstract.items()})
        args = unflatten_dict({stored[path]: restore_args(leaf) for path, leaf in abstract.items()})
        handler = (storage or StorageOptions()).handler()
        quiet_orbax()
        try:
            with ocp.Checkpointer(handler) as reader:
                restore = ocp.args.PyTreeRestore(item, restore_args=args, partial_restore=True)
                arrays = to_flat_dict(reader.restore(self.path / steps.STATE, args=restore))
        except ORBAX_ERRORS as error:
            raise CorruptCheckpoint(
                f"{self.path} cannot be read: {str(error).splitlines()[0][:300]}"
            ) from error
        return {path: arrays[stored[path]] for path in abstract}


def restore_args(leaf: Any) -> ocp.RestoreArgs:
    if getattr(leaf, "sharding", None) is None:
        return ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
    return ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)
