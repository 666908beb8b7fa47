"""Digests of a complete step's files, to find what changed on disk since.

After a step is complete, each process puts its share of the files on disk and writes their sizes
and SHA-256 sums to `digest.process_N.json` in the step's folder: the files that it wrote itself,
and of the others those that fall to it. A kill may come before; then those files are not checked
later, and the step counts as good.
"""

import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from maxtext.common.files import sync_directory, write_text

THREADS = 4
WRITER = re.compile(r"ocdbt\.process_(\d+)")


def digest_file(process: int) -> str:
    return f"digest.process_{process}.json"


def write_digest(step: Path, process: int = 0, processes: int = 1) -> None:
    """The digest of this process's share, once the files are on disk."""
    mine = [path for path in files_of(step) if owner(path.relative_to(step), processes) == process]
    with ThreadPoolExecutor(THREADS) as pool:
        sums = list(pool.map(lambda path: checksum(path, sync=True), mine))
    entries = {
        str(path.relative_to(step)): {"bytes": path.stat().st_size, "sha256": total}
        for path, total in zip(mine, sums, strict=True)
    }
    sync_directory(step)
    sync_directory(step.parent)
    write_text(step / digest_file(process), json.dumps({"files": entries}, indent=1) + "\n")


def files_of(step: Path) -> Iterator[Path]:
    for path in sorted(step.rglob("*")):
        if path.is_file() and not path.name.startswith((".", "digest.process_")):
            yield path


def owner(path: Path, processes: int) -> int:
    """The process that wrote a file, as its folder says, or else one by chance."""
    for part in path.parts:
        if (match := WRITER.fullmatch(part)) and int(match[1]) < processes:
            return int(match[1])
    return zlib.crc32(str(path).encode()) % processes


def checksum(path: Path, sync: bool = False) -> str:
    with path.open("rb") as stream:
        total = hashlib.file_digest(stream, "sha256").hexdigest()
        if sync:
            os.fsync(stream.fileno())
    return total


def read_digests(step: Path) -> dict[str, dict]:
    """The entries of all processes' digests, by file."""
    entries: dict[str, dict] = {}
    for path in sorted(step.glob("digest.process_*.json")):
        entries |= json.loads(path.read_text(encoding="utf-8"))["files"]
    return entries


def verify(step: Path, process: int = 0, processes: int = 1, thorough: bool = True) -> list[str]:
    """What is wrong with this process's share of the files that the digests list; `thorough` reads
    them, too.
    """
    try:
        entries = read_digests(step)
    except (OSError, ValueError, KeyError) as error:
        return [f"its digest is damaged ({error})"]
    share = sorted(entries)[process::processes]

    def check(name: str) -> str | None:
        path, entry = step / name, entries[name]
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {entry['bytes']}"
        if thorough and checksum(path) != entry["sha256"]:
            return f"{name} has changed since it was written"
        return None

    return [problem for problem in over(check, share) if problem]


def over(function: Callable, items: list) -> list:
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(function, items))


def undigested(step: Path) -> list[str]:
    """Files that no digest lists, so that nothing can be said of them."""
    listed = read_digests(step)
    return [name for path in files_of(step) if (name := str(path.relative_to(step))) not in listed]
