"""Summaries of checkpoints from their metadata. Reads no array and needs no device.

`summarize(DIR)` takes a run's folder, its checkpoints, one step, or a folder of safetensors, native
or of Hugging Face.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from maxtext.checkpoint import steps
from maxtext.checkpoint.safetensors_reader import HF_STEM, NATIVE_STEM, SafetensorsFolder
from maxtext.checkpoint.saved_step import CorruptCheckpoint, SavedStep
from maxtext.checkpoint.state import join_path
from maxtext.checkpoint.steps import files_without_digest, read_digests, verify
from maxtext.checkpoint.tensors import TensorInfo
from maxtext.common.errors import UserError


@dataclass(frozen=True)
class TensorRow:
    """One tensor of a checkpoint."""

    name: str
    tensor: TensorInfo
    sharding: str = ""


@dataclass(frozen=True)
class StepSummary:
    """One step, complete or not."""

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
    """Summarize a folder; the tensors are those of its newest step. `thorough` reads all files to
    verify their checksums.
    """
    if not path.is_dir():
        raise UserError(f"there is no folder {path}")
    if steps.has_steps(path):
        return summarize_training(path, thorough)
    checkpoints = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if incomplete := steps.incomplete_steps(checkpoints):
        names = ", ".join(step.name for step in incomplete)
        raise UserError(f"{checkpoints} has no complete checkpoint, only {names}")
    stem = NATIVE_STEM if any(path.glob(f"{NATIVE_STEM}*.safetensors*")) else HF_STEM
    if not any(path.glob("*.safetensors")):
        raise UserError(f"{path} holds neither checkpoints of training nor safetensors")
    folder = SafetensorsFolder.open(path, stem)  # checks that every file is complete
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    kind = "native weights" if stem == NATIVE_STEM else "Hugging Face weights"
    rows = tuple(TensorRow(name, tensor) for name, tensor in folder.tensors.items())
    files = StepSummary(path, size, "complete files; this format has no digest")
    return CheckpointSummary(path, kind, (files,), {}, rows)


def summarize_training(path: Path, thorough: bool) -> CheckpointSummary:
    complete = steps.find_steps(path)
    summaries = [summarize_step(step, thorough) for step in complete]
    if not steps.is_step(path):
        summaries += [
            StepSummary(step, size_of(step), "incomplete")
            for step in steps.incomplete_steps(complete[0].parent)
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
        newest = len(complete) - 1
        problems = (*summaries[newest].problems, str(error))
        summaries[newest] = replace(summaries[newest], state="damaged", problems=problems)
    summaries.sort(key=lambda step: (int(step.path.name.partition(".")[0]), step.path.name))
    return CheckpointSummary(path, "training checkpoints", tuple(summaries), about, rows)


def summarize_step(step: Path, thorough: bool) -> StepSummary:
    problems = verify(step, thorough=thorough)
    if problems:
        state = "damaged"
    elif not read_digests(step):
        state = "complete, no digest to check it by"
    elif unlisted := files_without_digest(step):
        state = f"complete, {len(unlisted)} files without a digest"
    else:
        state = "complete, verified" if thorough else "complete"
    return StepSummary(step, size_of(step), state, tuple(problems))


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def sharding_of(metadata: Any) -> str:
    """The mesh axes of each array axis when the array was saved."""
    spec = getattr(getattr(metadata, "sharding", None), "partition_spec", None)
    if spec is None:
        return ""
    axes = ["+".join(axis) if isinstance(axis, tuple | list) else str(axis or "·") for axis in spec]
    return ", ".join(axes) if any(axis != "·" for axis in axes) else "replicated"
