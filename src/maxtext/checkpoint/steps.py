"""The step folders of a run's checkpoints, named by the number of steps done, and their digests.

Orbax writes a step to a temporary folder, `N.orbax-checkpoint-tmp…`, and renames it to `N` when all
of it is written. The rename is the commit, so a name of digits alone is a complete step. A step is
also renamed before it is deleted. `remove_leftovers` removes what killed processes left under the
longer names. `N.damaged` is a step that could not be read.

`write_digest` and `verify` detect later changes on disk. After a step is complete, each process
syncs its part of the files to disk and writes their sizes and SHA-256 sums to
`digest.process_N.json` in the step's folder. Its part are the files that it wrote itself and, of
the files of no process, those assigned to it. If a process is killed before that, its files are not
checked later, and the step still counts as good.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from maxtext.common.files import sync_directory, write_text
from maxtext.common.log import LOGGER

STATE, RUN = "state", "run"  # items of a step: the arrays, and metadata in JSON
METADATA_FILE = "_CHECKPOINT_METADATA"  # Orbax writes it into every step
TMP_SUFFIX = ".orbax-checkpoint-tmp"
DELETING_SUFFIX = ".deleting"
LEFTOVER_SUFFIXES = (TMP_SUFFIX, DELETING_SUFFIX, ".going")  # the last of earlier versions
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
            if path.is_dir() and any(suffix in path.name for suffix in LEFTOVER_SUFFIXES):
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


THREADS = 4
OCDBT_PROCESS = re.compile(r"ocdbt\.process_(\d+)")


def digest_file(process: int) -> str:
    return f"digest.process_{process}.json"


def write_digest(step: Path, process: int = 0, processes: int = 1) -> None:
    """Sync this process's files to disk and write their digest."""
    files = [
        path
        for path in files_of(step)
        if assigned_process(path.relative_to(step), processes) == process
    ]
    with ThreadPoolExecutor(THREADS) as pool:
        checksums = list(pool.map(lambda path: checksum(path, sync=True), files))
    entries = {
        str(path.relative_to(step)): {"bytes": path.stat().st_size, "sha256": sha256}
        for path, sha256 in zip(files, checksums, strict=True)
    }
    sync_directory(step)
    sync_directory(step.parent)
    write_text(step / digest_file(process), json.dumps({"files": entries}, indent=1) + "\n")


def files_of(step: Path) -> Iterator[Path]:
    for path in sorted(step.rglob("*")):
        if path.is_file() and not path.name.startswith((".", "digest.process_")):
            yield path


def assigned_process(path: Path, processes: int) -> int:
    """The process that wrote a file, as its folder says, or one chosen by the file's name."""
    for part in path.parts:
        if (match := OCDBT_PROCESS.fullmatch(part)) and int(match[1]) < processes:
            return int(match[1])
    return zlib.crc32(str(path).encode()) % processes


def checksum(path: Path, sync: bool = False) -> str:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sync:
            os.fsync(file.fileno())
    return sha256


def read_digests(step: Path) -> dict[str, dict]:
    """The entries of all processes' digests, by file."""
    entries: dict[str, dict] = {}
    for path in sorted(step.glob("digest.process_*.json")):
        entries |= json.loads(path.read_text(encoding="utf-8"))["files"]
    return entries


def verify(step: Path, process: int = 0, processes: int = 1, thorough: bool = True) -> list[str]:
    """Check this process's part of the files that the digests list, and return the problems.
    `thorough` also reads the files to verify their checksums.
    """
    try:
        entries = read_digests(step)
    except (OSError, ValueError, KeyError) as error:
        return [f"its digest is damaged ({error})"]

    def check(name: str) -> str | None:
        path, entry = step / name, entries[name]
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {entry['bytes']}"
        if thorough and checksum(path) != entry["sha256"]:
            return f"{name} has changed since it was written"
        return None

    with ThreadPoolExecutor(THREADS) as pool:
        problems = pool.map(check, sorted(entries)[process::processes])
        return [problem for problem in problems if problem]


def files_without_digest(step: Path) -> list[str]:
    """Files that no digest lists, so that they cannot be checked."""
    listed = read_digests(step)
    return [name for path in files_of(step) if (name := str(path.relative_to(step))) not in listed]
