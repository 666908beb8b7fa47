"""Local paths, and atomic writes: to a temporary file in the same folder, synced, then renamed."""

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from maxtext.common.errors import ConfigError
from maxtext.common.types import Json

REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
# Lone surrogates stand for bytes that are not UTF-8.
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
MAX_NAME_BYTES = 255  # of a file name on common file systems


def is_remote(path: str) -> bool:
    """Whether a path, or one of a list of paths, is a URL such as gs://bucket/folder."""
    return REMOTE.search(path) is not None


def path_problem(path: str) -> str | None:
    """Why a text cannot be a local path, as the end of a sentence; None if it can."""
    if is_remote(path):
        return (
            "is a remote path, and only local paths are supported: "
            "mount the storage, or copy the files"
        )
    if UNPRINTABLE.search(path):
        return (
            "has a character that no path should have: "
            "a control character, or bytes that are not UTF-8"
        )
    if any(len(name.encode()) > MAX_NAME_BYTES for name in re.split("[/,;]", path)):
        return f"has a name of more than {MAX_NAME_BYTES} bytes, which file systems refuse"
    if os.path.expanduser(path).startswith("~"):
        return "starts with the home folder of an unknown user: write the folder out"
    return None


def local_path(path: str | os.PathLike) -> Path:
    """A local path with `~` expanded. Raises ConfigError for a URL or an invalid path."""
    text = os.fspath(path)
    if problem := path_problem(text):
        raise ConfigError(f"{text!r} {problem}")
    return Path(os.path.expanduser(text))


def read_json_object(path: Path) -> Json:
    """The object in a JSON file. Raises ConfigError if there is none."""
    try:
        data = path.read_bytes()
        value = json.loads(data)
        if b"\\ud" in data.lower():  # raises for lone surrogates, which cannot be written as UTF-8
            json.dumps(value, ensure_ascii=False).encode()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


@contextlib.contextmanager
def atomic_writer(path: str | os.PathLike, mode: str = "w") -> Iterator[IO]:
    """Open a temporary file that replaces `path` on success and is deleted on failure."""
    if mode not in ("w", "wb"):
        raise ValueError(f"atomic_writer replaces files: mode is 'w' or 'wb', not {mode!r}")
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(
        dir=target.parent, prefix=f".{target.name}.", suffix=".tmp"
    )
    try:
        with os.fdopen(handle, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        # mkstemp creates private files; open() would use the mode of the target or the umask.
        exists = target.exists()
        os.chmod(temporary, target.stat().st_mode & 0o777 if exists else 0o666 & ~current_umask())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync_directory(target.parent)


def write_text(path: str | os.PathLike, text: str) -> None:
    with atomic_writer(path) as file:
        file.write(text)


def current_umask() -> int:
    """The umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def sync_directory(path: Path) -> None:
    """Make a rename in `path` survive a power failure, if the file system supports that."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
