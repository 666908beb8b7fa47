"""The step folders of a run's checkpoints, named by the number of steps done.

A folder gets its name when all of it is written, so a name of digits alone is a complete step.
Steps that are being written, or that a killed process left incomplete, have a longer name.
`N.damaged` is a step that could not be read.
"""

import errno
import os
import shutil
from pathlib import Path

from maxtext.common.log import LOGGER

STATE, RUN = "state", "run"  # items of a step: the arrays, and metadata in JSON
METADATA_FILE = "_CHECKPOINT_METADATA"  # Orbax writes it into every step
TMP_SUFFIX = ".orbax-checkpoint-tmp"
DELETING_SUFFIX = ".going"
DAMAGED_SUFFIX = ".damaged"


def is_step(folder: Path) -> bool:
    return folder.name.isdigit() and folder.is_dir() and (folder / METADATA_FILE).is_file()


def all_steps(folder: Path) -> list[int]:
    """The complete steps in a folder of checkpoints, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if is_step(path))


def incomplete_steps(folder: Path) -> list[Path]:
    """The step folders in a folder of checkpoints that are not complete."""
    if not folder.is_dir():
        return []
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_dir() and path.name[:1].isdigit() and not is_step(path)
    )


def has_steps(folder: Path) -> bool:
    """Whether a folder is a complete step, holds one, or is a run's folder whose checkpoints/
    holds one.
    """
    return is_step(folder) or bool(all_steps(folder)) or bool(all_steps(folder / "checkpoints"))


def find_steps(folder: Path) -> list[Path]:
    """The complete steps of a step's folder, a folder of checkpoints, or a run's folder,
    ascending.
    """
    if is_step(folder):
        return [folder]
    checkpoints = folder if all_steps(folder) else folder / "checkpoints"
    return [checkpoints / str(step) for step in all_steps(checkpoints)]


def remove_leftovers(folder: Path) -> None:
    """Remove steps that killed processes left half written or half deleted."""
    if folder.is_dir():
        for path in folder.iterdir():
            if path.is_dir() and (TMP_SUFFIX in path.name or DELETING_SUFFIX in path.name):
                shutil.rmtree(path, ignore_errors=True)
                LOGGER.info("removed %s, left behind by an interrupted save", path)


def remove_old_steps(folder: Path, max_to_keep: int | None, archive: Path | None) -> None:
    """Delete all steps but the newest `max_to_keep`, or move them to `archive`. A kill never
    leaves half a step under the name of a step.
    """
    for step in all_steps(folder)[:-max_to_keep] if max_to_keep else []:
        old = folder / str(step)
        if archive is not None:
            archive.mkdir(parents=True, exist_ok=True)
            if move_step(old, unused_path(archive / str(step))):
                continue
        delete_step(old)


def delete_step(step: Path) -> None:
    """Delete a step. It is renamed first, so that a kill leaves no folder that looks complete."""
    deleting = unused_path(step.with_name(f"{step.name}{DELETING_SUFFIX}"))
    os.rename(step, deleting)
    shutil.rmtree(deleting, ignore_errors=True)


def move_step(step: Path, target: Path) -> bool:
    """Rename a step, or copy it to another file system. Returns False if it was copied and the
    original is still there.
    """
    try:
        os.rename(step, target)
        return True
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
    copying = target.with_name(f"{target.name}{TMP_SUFFIX}")
    shutil.rmtree(copying, ignore_errors=True)  # left by a killed copy
    shutil.copytree(step, copying)
    os.rename(copying, target)
    return False


def set_aside_damaged(folder: Path, first: int) -> None:
    """Rename the steps from `first` on: they could not be read, and the run will do them again."""
    for step in all_steps(folder):
        if step >= first:
            damaged = unused_path(folder / f"{step}{DAMAGED_SUFFIX}")
            os.rename(folder / str(step), damaged)
            LOGGER.warning(
                "%s could not be read and is set aside as %s", folder / str(step), damaged.name
            )


def unused_path(path: Path) -> Path:
    """`path`, or `path.1`, `path.2` … if it exists."""
    number, unused = 1, path
    while unused.exists():
        unused = path.with_name(f"{path.name}.{number}")
        number += 1
    return unused
