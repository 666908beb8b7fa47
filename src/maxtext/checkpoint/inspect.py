"""What lies in a checkpoint, told from its descriptions: no array is read and no device is needed.

`summarize(DIR)` takes a run's folder, its checkpoints, one step, or a folder of safetensors, ours or
Hugging Face's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxtext.checkpoint import steps
from maxtext.checkpoint.integrity import read_digests, undigested, verify
from maxtext.checkpoint.safetensors_reader import HF_STEM, NATIVE_STEM, SafetensorsFolder
from maxtext.checkpoint.saved_step import CorruptCheckpoint, SavedStep
from maxtext.checkpoint.state import join_path
from maxtext.checkpoint.tensors import TensorInfo
from maxtext.common.errors import UserError


@dataclass(frozen=True)
class TensorRow:
    """A tensor."""

    name: str
    tensor: TensorInfo
    sharding: str = ""


@dataclass(frozen=True)
class StepSummary:
    """A step, or what is left of one."""

    path: Path
    size: int
    state: str  # complete, no digest, incomplete, damaged …
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class CheckpointSummary:
    path: Path
    kind: str
    steps: tuple[StepSummary, ...]
    about: Mapping[str, Any]
    rows: tuple[TensorRow, ...]

    @property
    def damaged(self) -> list[str]:
        return [f"{step.path}: {problem}" for step in self.steps for problem in step.problems]


def summarize(path: Path, thorough: bool = False) -> CheckpointSummary:
    """What a folder holds; the tensors are those of its newest step. `thorough` reads all files to
    check them.
    """
    if not path.is_dir():
        raise UserError(f"there is no folder {path}")
    if steps.is_checkpoints(path):
        return summarize_training(path, thorough)
    inside = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if left := steps.incomplete(inside):
        raise UserError(
            f"{inside} has no complete checkpoint, only {', '.join(one.name for one in left)}"
        )
    stem = NATIVE_STEM if any(path.glob(f"{NATIVE_STEM}*.safetensors*")) else HF_STEM
    if not any(path.glob("*.safetensors")):
        raise UserError(f"{path} holds neither checkpoints of training nor safetensors")
    folder = SafetensorsFolder.open(
        path, stem
    )  # which checks that every file is as long as its header says
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    kind = "weights of ours" if stem == NATIVE_STEM else "weights in Hugging Face's form"
    rows = tuple(TensorRow(name, tensor) for name, tensor in folder.tensors.items())
    return CheckpointSummary(
        path, kind, (StepSummary(path, size, "whole files; this form has no digest"),), {}, rows
    )


def summarize_training(path: Path, thorough: bool) -> CheckpointSummary:
    complete = steps.steps_under(path)
    views = [summarize_step(step, thorough) for step in complete]
    if not steps.is_step(path):
        views += [
            StepSummary(left, size_of(left), "incomplete")
            for left in steps.incomplete(complete[0].parent)
        ]
    stored = SavedStep(complete[-1])
    about: Mapping[str, Any] = {}
    rows: tuple[TensorRow, ...] = ()
    try:
        about = stored.run
        rows = tuple(
            TensorRow(join_path(name), tensor, sharding_of(stored.metadata[name]))
            for name, tensor in stored.tensors.items()
        )
    except CorruptCheckpoint as error:
        views[len(complete) - 1] = broken(views[len(complete) - 1], str(error))
    views.sort(key=lambda summary: (int(summary.path.name.partition(".")[0]), summary.path.name))
    return CheckpointSummary(path, "training checkpoints", tuple(views), about, rows)


def summarize_step(step: Path, thorough: bool) -> StepSummary:
    problems = verify(step, thorough=thorough)
    if problems:
        state = "damaged"
    elif not read_digests(step):
        state = "complete, no digest to check it by"
    elif unlisted := undigested(step):
        state = f"complete, {len(unlisted)} files without a digest"
    else:
        state = "complete, verified" if thorough else "complete"
    return StepSummary(step, size_of(step), state, tuple(problems))


def broken(summary: StepSummary, problem: str) -> StepSummary:
    return StepSummary(summary.path, summary.size, "damaged", (*summary.problems, problem))


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def sharding_of(metadata: Any) -> str:
    """How an array lay over its mesh when it was saved: the mesh axes of each of its own."""
    spec = getattr(getattr(metadata, "sharding", None), "partition_spec", None)
    if spec is None:
        return ""
    words = [
        "+".join(axis) if isinstance(axis, tuple | list) else str(axis or "·") for axis in spec
    ]
    return ", ".join(words) if any(word != "·" for word in words) else "everywhere"
