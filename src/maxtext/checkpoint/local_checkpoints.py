"""Checkpoints on each machine's own disk: every process keeps its own shards, and reads them back
after a restart.

They are made often and cost no network. A process writes its part of a step to
DIRECTORY/RUN/process_N/STEP, a folder of safetensors that takes its name when all of it is on disk,
and keeps the newest two. A step counts when every process has it whole. It fits only the same
processes on the same mesh; anything else starts from the shared checkpoints.
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
from maxtext.checkpoint.former_names import match_names
from maxtext.checkpoint.integrity import verify, write_digest
from maxtext.checkpoint.multihost import allgather_int, allgather_ints, reason
from maxtext.checkpoint.safetensors_reader import NATIVE_STEM, SafetensorsFolder
from maxtext.checkpoint.safetensors_writer import write_native_folder
from maxtext.checkpoint.state import Name, join_path
from maxtext.checkpoint.tensors import FLOATS, RenamedTensors, TensorInfo, TensorSource
from maxtext.checkpoint.weights import Bounds
from maxtext.common.errors import UserError
from maxtext.common.log import LOGGER

KEPT = 2
ABOUT = "part.json"
SHARD_BYTES = 2 * 10**9


class LocalCheckpointManager:
    """This process's part of a run's local checkpoints. `owner` names the run's folder and `mesh`
    its devices: what others saved is not taken."""

    def __init__(self, directory: Path, run_name: str, owner: str, mesh: Mapping[str, int]):
        self.folder = directory / run_name / f"process_{jax.process_index()}"
        self.owner, self.mesh = owner, dict(mesh)
        self.thread: threading.Thread | None = None

    def steps(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdigit())

    def save(self, step: int, arrays: Mapping[Name, jax.Array], position: Any) -> None:
        """Copy this process's shards, and write them in the background."""
        self.wait()
        part = Part(f"step {step}", {name: blocks_of(array) for name, array in arrays.items()})
        about = {
            "owner": self.owner,
            "processes": jax.process_count(),
            "mesh": self.mesh,
            "position": position,
        }
        self.thread = threading.Thread(
            target=self.write, args=(step, part, about), name="maxtext-local", daemon=True
        )
        self.thread.start()

    def write(self, step: int, part: "Part", about: dict[str, Any]) -> None:
        folder = self.folder / str(step)
        try:
            steps.remove_leftovers(self.folder)
            for other in self.steps():
                if other >= step:  # of a time before this run went back
                    steps.remove(self.folder / str(other))
            write_native_folder(folder, part, {ABOUT: json.dumps(about)}, (), SHARD_BYTES)
            write_digest(folder)
            for old in self.steps()[:-KEPT]:
                steps.remove(self.folder / str(old))
        except (OSError, UserError) as error:
            LOGGER.warning("step %d could not be saved to %s: %s", step, self.folder, reason(error))

    def wait(self) -> None:
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def latest_step(self) -> int | None:
        """The newest step that every process has whole."""
        whole = [step for step in self.steps()[-4:] if not verify(self.folder / str(step))]
        common = set.intersection(*map(set, allgather_ints(whole, 4)))
        return max(common, default=None)

    def restore(
        self, step: int, wanted: Mapping[Name, jax.ShapeDtypeStruct]
    ) -> tuple[dict[Name, jax.Array], dict[str, Any]] | None:
        """The arrays of a step and this process's place in the data; None where the step does not
        fit this run.
        """
        problem, arrays, about = None, {}, {}
        try:
            about = json.loads((self.folder / str(step) / ABOUT).read_text(encoding="utf-8"))
            if about["owner"] != self.owner:
                raise UserError(f"it is of another run, {about['owner']}")
            if about["processes"] != jax.process_count():
                raise UserError(
                    f"it is of {about['processes']} processes, and there are {jax.process_count()} now"
                )
            if about["mesh"] != self.mesh:
                raise UserError("it is of another mesh")
            folder = SafetensorsFolder.open(self.folder / str(step), NATIVE_STEM)
            expected = {
                block
                for name, leaf in wanted.items()
                for block in local_blocks(name, leaf).values()
            }
            source = RenamedTensors(folder, match_names(folder.tensors, expected))
            arrays = {name: assemble(source, name, leaf) for name, leaf in wanted.items()}
        except (OSError, ValueError, KeyError, UserError) as error:
            problem = reason(error)
        if max(allgather_int(problem is not None)):
            LOGGER.info(
                "the local checkpoint of step %d is not used: %s",
                step,
                problem or "another process cannot",
            )
            return None
        return arrays, about["position"]


def blocks_of(array: jax.Array) -> dict[Bounds, np.ndarray]:
    """Copies of the parts of an array that this process holds, each once."""
    blocks: dict[Bounds, np.ndarray] = {}
    for shard in array.addressable_shards:
        bounds = bounds_of(shard.index, array.shape)
        if bounds not in blocks:
            blocks[bounds] = np.array(
                shard.data, copy=True
            )  # the next step reuses the memory of the array
    return blocks


def bounds_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def block_name(name: Name, bounds: Bounds) -> str:
    return f"{join_path(name)}[{','.join(f'{start}:{stop}' for start, stop in bounds)}]"


@dataclass(frozen=True)
class Part:
    """The blocks of one process as a stream of named tensors."""

    title: str
    blocks: Mapping[Name, Mapping[Bounds, np.ndarray]]

    @cached_property
    def by_name(self) -> dict[str, np.ndarray]:
        return {
            block_name(name, bounds): block
            for name, all in self.blocks.items()
            for bounds, block in all.items()
        }

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo(block.dtype, block.shape) for name, block in self.by_name.items()}

    def read(self, name: str) -> np.ndarray:
        return self.by_name[name]

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        yield from self.by_name.items()


def local_blocks(name: Name, leaf: jax.ShapeDtypeStruct) -> dict[jax.Device, str]:
    """The block of an array that each device of this process holds."""
    assert leaf.sharding is not None
    return {
        device: block_name(name, bounds_of(index or (), leaf.shape))
        for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items()
    }


def assemble(source: TensorSource, name: Name, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """An array from the blocks of this process."""
    assert leaf.sharding is not None
    blocks: dict[str, np.ndarray] = {}
    parts = []
    for device, block in local_blocks(name, leaf).items():
        if block not in source.tensors:
            raise UserError(f"it has no {block}: the model or its layout is another")
        dtype = source.tensors[block].dtype
        widens = dtype in FLOATS and leaf.dtype in FLOATS and dtype.itemsize < leaf.dtype.itemsize
        if dtype != leaf.dtype and not widens:
            raise UserError(f"its {join_path(name)} is {dtype}, and this run has {leaf.dtype}")
        if block not in blocks:
            blocks[block] = source.read(block).astype(leaf.dtype, copy=False)
        kind = leaf.sharding.memory_kind
        parts.append(
            jax.device_put(
                blocks[block], jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
            )
        )
    return jax.make_array_from_single_device_arrays(
        leaf.shape, leaf.sharding, parts, dtype=leaf.dtype
    )
