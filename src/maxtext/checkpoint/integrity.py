"""Digests of the files of a complete step, to detect later changes on disk.

After a step is complete, each process syncs its part of the files to disk and writes their sizes
and SHA-256 sums to `digest.process_N.json` in the step's folder. Its part are the files that it
wrote itself and, of the files of no process, those assigned to it. If a process is killed before
that, its files are not checked later, and the step still counts as good.
"""

import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from maxtext.common.files import sync_directory, write_text

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
    `thorough` reads the files to verify their checksums, too.
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
