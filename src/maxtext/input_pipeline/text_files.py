"""Text files as documents: which files a key of paths names, and their text by index.

Paths are separated by commas. Each is a file, a directory (all files below it) or a glob, in which `**` goes through
folders. As in a shell, names that start with a dot are left out unless they are named. The documents are the files
in sorted order, each once, however often it is named. `{stdlib}` stands for the folder of the Python standard library,
a text that every machine has.
"""

import glob
import os
import sysconfig

from maxtext.common.errors import ConfigError


def find_files(key: str, value: str) -> list[str]:
    """The sorted files that the value of `key` names, or every part of it that names none."""
    if ";" in value:
        raise ConfigError(f"{key}={value}: weighted mixtures are not in this version, give paths separated by commas")
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
        problems += [f"{key}: {file} cannot be read, check its permissions" for file in files if not readable(file)]
        found.update(files)
    if not found and not problems:
        problems.append(f"{key} is empty: name the text files to read")
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
        files += [os.path.normpath(candidate) for candidate in candidates if os.path.isfile(candidate)]
    return files


def readable(path: str) -> bool:
    return os.access(path, os.R_OK)


class TextFiles:
    """Random access to the text of files, as Grain wants its sources. Bytes that are not UTF-8 become U+FFFD."""

    def __init__(self, paths: list[str]):
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> str:
        # Read as bytes, since text mode would rewrite line ends.
        with open(self.paths[index], "rb") as file:
            return file.read().decode("utf-8", errors="replace")
