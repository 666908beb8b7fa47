"""A saved step as it lies on disk: what it holds, its descriptions, and its arrays, read straight
into their shards.
"""

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
from maxtext.checkpoint.former_names import match_names
from maxtext.checkpoint.manager import RUN_FILE, StorageOptions, position_file, quiet_orbax
from maxtext.checkpoint.state import Name, from_flat_dict, to_flat_dict
from maxtext.checkpoint.tensors import TensorInfo
from maxtext.common.errors import UserError


class CorruptCheckpoint(UserError):
    """A step cannot be read."""


@dataclass(frozen=True)
class SavedStep:
    """A step's folder."""

    path: Path

    @property
    def step(self) -> int:
        return int(self.path.name)

    @cached_property
    def run(self) -> dict[str, Any]:
        """What the run said of itself when it saved: its model, the layout of its weights, its
        optimizer, its mesh.
        """
        return self.read_json(RUN_FILE)

    def iterator_states(self) -> list[Any]:
        """The places in the data of all processes that saved the step, in their order."""
        return [self.read_json(position_file(process)) for process in range(self.run["processes"])]

    def read_json(self, name: str) -> Any:
        file = self.path / steps.RUN / name
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CorruptCheckpoint(
                f"{file} cannot be read: {getattr(error, 'strerror', None) or error}"
            ) from error

    @cached_property
    def metadata(self) -> dict[Name, Any]:
        """Orbax's own record of each array: shape, dtype, sharding, chunks."""
        quiet_orbax()
        try:
            with ocp.Checkpointer(StorageOptions().handler()) as reader:
                found = reader.metadata(self.path / steps.STATE).item_metadata
        except (ValueError, OSError, KeyError, RuntimeError) as error:
            raise CorruptCheckpoint(f"{self.path} cannot be read: {error}") from error
        if found is None:
            raise CorruptCheckpoint(
                f"{self.path} cannot be read: what it says of its arrays is damaged"
            )
        return to_flat_dict(found.tree)

    @cached_property
    def tensors(self) -> dict[Name, TensorInfo]:
        return {
            name: TensorInfo(np.dtype(one.dtype), tuple(one.shape))
            for name, one in self.metadata.items()
        }

    def tensors_named_as(self, expected: Collection[Name]) -> dict[Name, TensorInfo]:
        """All stored tensors; those under a former name have the name that `expected` has."""
        matched = match_names(self.tensors, expected)
        return {name: self.tensors[stored] for name, stored in matched.items()}

    def restore(
        self, wanted: Mapping[Name, jax.ShapeDtypeStruct], storage: StorageOptions | None = None
    ) -> dict[Name, Any]:
        """Restore these arrays in their dtypes and shardings, or as NumPy arrays where no sharding is
        given. All must be stored, possibly under their former names.
        """
        matched = match_names(self.metadata, wanted)
        stored_names = {name: matched.get(name, name) for name in wanted}
        tree = from_flat_dict({stored_names[name]: leaf for name, leaf in wanted.items()})
        how = from_flat_dict(
            {stored_names[name]: restore_args(leaf) for name, leaf in wanted.items()}
        )
        handler = (storage or StorageOptions()).handler()
        quiet_orbax()
        try:
            with ocp.Checkpointer(handler) as reader:
                arguments = ocp.args.PyTreeRestore(tree, restore_args=how, partial_restore=True)
                found = to_flat_dict(reader.restore(self.path / steps.STATE, args=arguments))
        except (ValueError, OSError, KeyError, RuntimeError) as error:
            raise CorruptCheckpoint(
                f"{self.path} cannot be read: {str(error).splitlines()[0][:300]}"
            ) from error
        return {name: found[stored_names[name]] for name in wanted}


def restore_args(leaf: Any) -> ocp.RestoreArgs:
    if getattr(leaf, "sharding", None) is None:
        return ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
    return ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)
