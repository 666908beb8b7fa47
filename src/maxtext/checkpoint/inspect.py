"""What lies in a checkpoint, told from its descriptions: no array is read and no device is needed.

`look(DIR)` takes a run's folder, its checkpoints, one step, or a folder of safetensors, ours or
Hugging Face's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxtext.checkpoint import steps
from maxtext.checkpoint.folders import OURS, THEIRS, Folder
from maxtext.checkpoint.integrity import read_digests, undigested, verify
from maxtext.checkpoint.state import shown
from maxtext.checkpoint.stored import Damaged, Stored
from maxtext.checkpoint.tensors import Tensor
from maxtext.common.errors import UserError


@dataclass(frozen=True)
class Row:
    """A tensor."""

    name: str
    tensor: Tensor
    sharding: str = ""


@dataclass(frozen=True)
class StepView:
    """A step, or what is left of one."""

    path: Path
    size: int
    state: str  # complete, no digest, incomplete, damaged …
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class View:
    path: Path
    kind: str
    steps: tuple[StepView, ...]
    about: Mapping[str, Any]
    rows: tuple[Row, ...]

    @property
    def damaged(self) -> list[str]:
        return [f"{step.path}: {problem}" for step in self.steps for problem in step.problems]


def look(path: Path, thorough: bool = False) -> View:
    """What a folder holds; the tensors are those of its newest step. `thorough` reads all files to
    check them.
    """
    if not path.is_dir():
        raise UserError(f"there is no folder {path}")
    if steps.is_checkpoints(path):
        return look_at_training(path, thorough)
    inside = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if left := steps.incomplete(inside):
        raise UserError(
            f"{inside} has no complete checkpoint, only {', '.join(one.name for one in left)}"
        )
    stem = OURS if any(path.glob(f"{OURS}*.safetensors*")) else THEIRS
    if not any(path.glob("*.safetensors")):
        raise UserError(f"{path} holds neither checkpoints of training nor safetensors")
    folder = Folder.open(path, stem)  # which checks that every file is as long as its header says
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    kind = "weights of ours" if stem == OURS else "weights in Hugging Face's form"
    rows = tuple(Row(name, tensor) for name, tensor in folder.tensors.items())
    return View(
        path, kind, (StepView(path, size, "whole files; this form has no digest"),), {}, rows
    )


def look_at_training(path: Path, thorough: bool) -> View:
    complete = steps.steps_under(path)
    views = [look_at_step(step, thorough) for step in complete]
    if not steps.is_step(path):
        views += [
            StepView(left, size_of(left), "incomplete")
            for left in steps.incomplete(complete[0].parent)
        ]
    stored = Stored(complete[-1])
    about: Mapping[str, Any] = {}
    rows: tuple[Row, ...] = ()
    try:
        about = stored.run
        rows = tuple(
            Row(shown(name), tensor, sharding_of(stored.metadata[name]))
            for name, tensor in stored.tensors.items()
        )
    except Damaged as error:
        views[len(complete) - 1] = broken(views[len(complete) - 1], str(error))
    views.sort(key=lambda view: (int(view.path.name.partition(".")[0]), view.path.name))
    return View(path, "training checkpoints", tuple(views), about, rows)


def look_at_step(step: Path, thorough: bool) -> StepView:
    problems = verify(step, thorough=thorough)
    if problems:
        state = "damaged"
    elif not read_digests(step):
        state = "complete, no digest to check it by"
    elif unlisted := undigested(step):
        state = f"complete, {len(unlisted)} files without a digest"
    else:
        state = "complete, verified" if thorough else "complete"
    return StepView(step, size_of(step), state, tuple(problems))


def broken(view: StepView, problem: str) -> StepView:
    return StepView(view.path, view.size, "damaged", (*view.problems, problem))


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
