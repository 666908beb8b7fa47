"""Finds the files that a key names, and the kind of a file by its name.

Paths are separated by commas. Each is a file, a directory (all files below it) or a glob, in which
`**` matches any folders. As in a shell, names that start with a dot match only if they are written
out. Files are sorted and unique. `{stdlib}` is the folder of the Python standard library, text that
every machine has.
"""

import glob
import os
import re
import sysconfig

from maxtext.common.errors import ConfigError

KIND_OF_SUFFIX = {
    "txt": "text",
    "text": "text",
    "md": "text",
    "jsonl": "jsonl",
    "json": "jsonl",
    "ndjson": "jsonl",
    "parquet": "parquet",
    "arrow": "arrow",
    "tfrecord": "tfrecord",
    "tfrecords": "tfrecord",
    "array_record": "arrayrecord",
    "arrayrecord": "arrayrecord",
}


def find_files(key: str, value: str) -> list[str]:
    """The sorted files that the value of `key` names. Raises ConfigError with every part of the
    value that names none.
    """
    paths: set[str] = set()
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
        paths.update(files)
    if not paths and not problems:
        problems.append(f"{key} is empty: name the files to read")
    if problems:
        raise ConfigError(*problems)
    return sorted(paths)


def files_of(path: str) -> list[str]:
    # The name of an existing file is not a glob, even if it has a bracket in it.
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
    """The kind of a file by its name, also of `a.jsonl.gz` and `a.tfrecord-00000-of-00008`; None if
    it is unknown.
    """
    name = re.sub(r"-\d+-of-\d+$", "", os.path.basename(path)).removesuffix(".gz")
    return KIND_OF_SUFFIX.get(name.rpartition(".")[2].lower()) if "." in name else None
