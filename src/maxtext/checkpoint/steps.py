"""The folders of a run's checkpoints: one a step, named by the number of steps done.

A folder takes its name when all of it is written, so a name of digits alone is a complete step;
what is under way or was left by a killed process carries a longer name. `N.damaged` was set aside
since it could not be read.
"""

import errno
import os
import shutil
from pathlib import Path

from maxtext.common.log import LOGGER

STATE, RUN = "state", "run"  # what a step's folder holds: arrays, and descriptions in JSON
MARK = "_CHECKPOINT_METADATA"  # Orbax writes it into every step
UNDER_WAY = ".orbax-checkpoint-tmp"
GOING = ".going"  # being deleted
DAMAGED = ".damaged"


def is_step(folder: Path) -> bool:
    return folder.name.isdigit() and folder.is_dir() and (folder / MARK).is_file()


def all_steps(folder: Path) -> list[int]:
    """The complete steps in a folder of checkpoints, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if is_step(path))


def incomplete(folder: Path) -> list[Path]:
    """What lies in a folder of checkpoints and is no complete step."""
    if not folder.is_dir():
        return []
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_dir() and path.name[:1].isdigit() and not is_step(path)
    )


def is_checkpoints(folder: Path) -> bool:
    """Whether a folder is a step or holds steps, or is a run's folder, whose checkpoints/ holds
    them.
    """
    return is_step(folder) or bool(all_steps(folder)) or bool(all_steps(folder / "checkpoints"))


def steps_under(folder: Path) -> list[Path]:
    """The steps that a person means by a step's folder, a folder of checkpoints, or a run's folder;
    ascending.
    """
    if is_step(folder):
        return [folder]
    inside = folder if all_steps(folder) else folder / "checkpoints"
    return [inside / str(step) for step in all_steps(inside)]


def remove_leftovers(folder: Path) -> None:
    """What killed processes left: steps half written, or half deleted."""
    if folder.is_dir():
        for path in folder.iterdir():
            if path.is_dir() and (UNDER_WAY in path.name or GOING in path.name):
                shutil.rmtree(path, ignore_errors=True)
                LOGGER.info("removed %s, left behind by an interrupted save", path)


def retire(folder: Path, keep: int | None, attic: Path | None) -> None:
    """Delete all steps but the newest `keep`, or move them to `attic`. A kill never leaves half a
    step.
    """
    for step in all_steps(folder)[:-keep] if keep else []:
        old = folder / str(step)
        if attic is not None:
            attic.mkdir(parents=True, exist_ok=True)
            if move(old, free_name(attic / str(step))):
                continue
        remove(old)


def remove(step: Path) -> None:
    """Delete a step. It loses its name at once, so that a kill leaves no folder that looks like a
    step.
    """
    going = free_name(step.with_name(f"{step.name}{GOING}"))
    os.rename(step, going)
    shutil.rmtree(going, ignore_errors=True)


def move(step: Path, target: Path) -> bool:
    """Rename a step, or copy it to another file system; then it is still there, and the result is
    False.
    """
    try:
        os.rename(step, target)
        return True
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
    copying = target.with_name(f"{target.name}{UNDER_WAY}")
    shutil.rmtree(copying, ignore_errors=True)  # of a kill before
    shutil.copytree(step, copying)
    os.rename(copying, target)
    return False


def set_aside(folder: Path, first: int) -> None:
    """Rename steps from `first` on, which could not be read and will be done again, so that they do
    not count.
    """
    for step in all_steps(folder):
        if step >= first:
            aside = free_name(folder / f"{step}{DAMAGED}")
            os.rename(folder / str(step), aside)
            LOGGER.warning(
                "%s could not be read and is set aside as %s", folder / str(step), aside.name
            )


def free_name(path: Path) -> Path:
    number, free = 1, path
    while free.exists():
        free, number = path.with_name(f"{path.name}.{number}"), number + 1
    return free
