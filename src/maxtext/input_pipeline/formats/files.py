"""Which files a key of paths names, and of which kind a file is by its name.

Paths are separated by commas. Each is a file, a directory (all files below it) or a glob, in which
`**` goes through folders. As in a shell, names that start with a dot are left out unless they are
named. The documents are the files in sorted order, each once, however often it is named. `{stdlib}`
stands for the folder of the Python standard library, a text that every machine has.
"""

import glob
import os
import re
import sysconfig

from maxtext.common.errors import ConfigError

KIND_OF_SUFFIX = {
    "txt": "text", "text": "text", "md": "text", "jsonl": "jsonl", "json": "jsonl", "ndjson": "jsonl",
    "parquet": "parquet", "arrow": "arrow", "tfrecord": "tfrecord", "tfrecords": "tfrecord",
    "array_record": "arrayrecord", "arrayrecord": "arrayrecord",
}  # fmt: skip


def find_files(key: str, value: str) -> list[str]:
    """The sorted files that the value of `key` names, or every part of it that names none."""
    found: set[str] = set()
    problems = []
    for part in filter(None, (part.strip() for part in value.split(","))):
        path = os.path.expanduser(part.replace("{stdlib}", sysconfig.get_path("stdlib")))
        files = files_of(path)
        if not files and glob.has_magic(path):
            problems.append(f"{key}: no file matches {part}")
        elif not files and os.path.isdir(path):
            problems.append(f"{key}: the directory {part} has no files")
        elif not files:
            problems.append(f"{key}: {part} does not exist or is not a file")
        problems += [
            f"{key}: {file} cannot be read, check its permissions"
            for file in files
            if not readable(file)
        ]
        found.update(files)
    if not found and not problems:
        problems.append(f"{key} is empty: name the files to read")
    if problems:
        raise ConfigError(*problems)
    return sorted(found)


def files_of(path: str) -> list[str]:
    # A name that exists is that name, even if it has a bracket in it.
    if os.path.isfile(path):
        return [path]
    matches = [path] if os.path.isdir(path) else glob.glob(path, recursive=True)
    files = []
    for match in matches:
        below = os.path.join(glob.escape(match), "**")
        candidates = glob.glob(below, recursive=True) if os.path.isdir(match) else [match]
        files += [
            os.path.normpath(candidate) for candidate in candidates if os.path.isfile(candidate)
        ]
    return files


def readable(path: str) -> bool:
    return os.access(path, os.R_OK)


def kind_of(path: str) -> str | None:
    """The kind that the name says, also of `a.jsonl.gz` and `a.tfrecord-00000-of-00008`; None: it
    says nothing.
    """
    name = re.sub(r"-\d+-of-\d+$", "", os.path.basename(path)).removesuffix(".gz")
    return KIND_OF_SUFFIX.get(name.rpartition(".")[2].lower()) if "." in name else None
