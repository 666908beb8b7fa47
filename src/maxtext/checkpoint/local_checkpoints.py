"""Checkpoints on each machine's own disk: every process saves its own shards and restores them
after a restart.

They are frequent and need no network. A process writes its blocks of a step to
DIRECTORY/RUN/process_N/STEP, a folder of safetensors that gets its name when all of it is on disk,
and keeps the newest two. A step is usable if every process has all of its blocks. It fits only the
same processes on the same mesh; any other run starts from the shared checkpoints.
"""

import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxtext.checkpoint import steps
from maxtext.checkpoint.multihost import allgather_int, allgather_ints, error_summary
from maxtext.checkpoint.safetensors_reader import NATIVE_STEM, SafetensorsFolder
from maxtext.checkpoint.safetensors_writer import write_native_folder
from maxtext.checkpoint.state import TreePath, join_path, match_names
from maxtext.checkpoint.steps import verify, write_digest
from maxtext.checkpoint.tensors import FLOATS, RenamedTensors, TensorInfo, TensorSource
from maxtext.checkpoint.weights import Bounds
from maxtext.common.errors import UserError
from maxtext.common.log import LOGGER
from maxtext.common.types import Json

MAX_TO_KEEP = 2
MAX_CANDIDATES = 4  # newest steps that are verified at a restart
METADATA_FILE = "part.json"
SHARD_BYTES = 2 * 10**9


class LocalCheckpointManager:
    """This process's part of a run's local checkpoints. `owner` names the run's folder and `mesh`
    its devices: steps of another owner or mesh are not restored.
    """

    def __init__(self, directory: Path, run_name: str, owner: str, mesh: Mapping[str, int]):
        self.folder = directory / run_name / f"process_{jax.process_index()}"
        self.owner = owner
        self.mesh = dict(mesh)
        self.thread: threading.Thread | None = None

    def all_steps(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdigit())

    def save(self, step: int, arrays: Mapping[TreePath, jax.Array], iterator_state: Any) -> None:
        """Copy this process's shards, and write them in the background."""
        self.wait()
        blocks = {path: copy_local_blocks(array) for path, array in arrays.items()}
        metadata = {
            "owner": self.owner,
            "processes": jax.process_count(),
            "mesh": self.mesh,
            "position": iterator_state,
        }
        self.thread = threading.Thread(
            target=self.write,
            args=(step, LocalBlocks(f"step {step}", blocks), metadata),
            name="maxtext-local",
            daemon=True,
        )
        self.thread.start()

    def write(self, step: int, blocks: "LocalBlocks", metadata: Json) -> None:
        folder = self.folder / str(step)
        try:
            steps.remove_leftovers(self.folder)
            for newer in self.all_steps():
                if newer >= step:  # from before the run went back to an older checkpoint
                    steps.delete_step(self.folder / str(newer))
            files = {METADATA_FILE: json.dumps(metadata)}
            write_native_folder(folder, blocks, files, (), SHARD_BYTES)
            write_digest(folder)
            for old in self.all_steps()[:-MAX_TO_KEEP]:
                steps.delete_step(self.folder / str(old))
        except (OSError, UserError) as error:
            LOGGER.warning(
                "step %d could not be saved to %s: %s", step, self.folder, error_summary(error)
            )

    def wait(self) -> None:
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def latest_step(self) -> int | None:
        """The newest step of which every process has all files, undamaged."""
        newest = self.all_steps()[-MAX_CANDIDATES:]
        complete = [step for step in newest if not verify(self.folder / str(step))]
        common = set.intersection(*map(set, allgather_ints(complete, MAX_CANDIDATES)))
        return max(common, default=None)

    def restore(
        self, step: int, abstract: Mapping[TreePath, jax.ShapeDtypeStruct]
    ) -> tuple[dict[TreePath, jax.Array], Json] | None:
        """The arrays of a step and this process's iterator state, or None if the step does not fit
        this run on some process.
        """
        problem, arrays, metadata = None, {}, {}
        try:
            folder = self.folder / str(step)
            metadata = json.loads((folder / METADATA_FILE).read_text(encoding="utf-8"))
            self.check_metadata(metadata)
            source = open_blocks(folder, abstract)
            arrays = {path: assemble(source, path, leaf) for path, leaf in abstract.items()}
        except (OSError, ValueError, KeyError, UserError) as error:
            problem = error_summary(error)
        if max(allgather_int(problem is not None)):
            LOGGER.info(
                "the local checkpoint of step %d is not used: %s",
                step,
                problem or "another process cannot read its part",
            )
            return None
        return arrays, metadata["position"]

    def check_metadata(self, metadata: Json) -> None:
        """Raise UserError if a step was saved by another run, or by other processes or devices."""
        if metadata["owner"] != self.owner:
            raise UserError(f"it is of another run, {metadata['owner']}")
        if metadata["processes"] != jax.process_count():
            raise UserError(
                f"it is of {metadata['processes']} processes, and there are "
                f"{jax.process_count()} now"
            )
        if metadata["mesh"] != self.mesh:
            raise UserError("it is of another mesh")


def copy_local_blocks(array: jax.Array) -> dict[Bounds, np.ndarray]:
    """Copies of the blocks of an array that this process holds, each once."""
    blocks: dict[Bounds, np.ndarray] = {}
    for shard in array.addressable_shards:
        bounds = bounds_of(shard.index, array.shape)
        if bounds not in blocks:
            # A copy, since the next step reuses the memory of the array.
            blocks[bounds] = np.array(shard.data, copy=True)
    return blocks


def bounds_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def block_name(path: TreePath, bounds: Bounds) -> str:
    return f"{join_path(path)}[{','.join(f'{start}:{stop}' for start, stop in bounds)}]"


@dataclass(frozen=True)
class LocalBlocks:
    """The blocks of one process as a source of named tensors."""

    title: str
    blocks: Mapping[TreePath, Mapping[Bounds, np.ndarray]]

    @cached_property
    def by_name(self) -> dict[str, np.ndarray]:
        return {
            block_name(path, bounds): block
            for path, blocks in self.blocks.items()
            for bounds, block in blocks.items()
        }

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo(block.dtype, block.shape) for name, block in self.by_name.items()}

    def read(self, name: str) -> np.ndarray:
        return self.by_name[name]

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        yield from self.by_name.items()


def open_blocks(folder: Path, abstract: Mapping[TreePath, jax.ShapeDtypeStruct]) -> TensorSource:
    """The blocks of a step under their current names."""
    opened = SafetensorsFolder.open(folder, NATIVE_STEM)
    expected = {
        block for path, leaf in abstract.items() for block in device_blocks(path, leaf).values()
    }
    return RenamedTensors(opened, match_names(opened.tensors, expected))


def device_blocks(path: TreePath, leaf: jax.ShapeDtypeStruct) -> dict[jax.Device, str]:
    """The name of the block that each device of this process holds."""
    assert leaf.sharding is not None
    return {
        device: block_name(path, bounds_of(index or (), leaf.shape))
        for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items()
    }


def assemble(source: TensorSource, path: TreePath, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """An array from the blocks of this process."""
    assert leaf.sharding is not None
    blocks: dict[str, np.ndarray] = {}
    shards = []
    for device, block in device_blocks(path, leaf).items():
        if block not in source.tensors:
            raise UserError(f"it has no {block}: the model or its layout is another")
        dtype = source.tensors[block].dtype
        widens = dtype in FLOATS and leaf.dtype in FLOATS and dtype.itemsize < leaf.dtype.itemsize
        if dtype != leaf.dtype and not widens:
            raise UserError(f"its {join_path(path)} is {dtype}, and this run has {leaf.dtype}")
        if block not in blocks:
            blocks[block] = source.read(block).astype(leaf.dtype, copy=False)
        memory_kind = leaf.sharding.memory_kind
        shards.append(
            jax.device_put(
                blocks[block], jax.sharding.SingleDeviceSharding(device, memory_kind=memory_kind)
            )
        )
    return jax.make_array_from_single_device_arrays(
        leaf.shape, leaf.sharding, shards, dtype=leaf.dtype
    )
