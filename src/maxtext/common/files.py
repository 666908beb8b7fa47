"""Files that are either complete or absent: written beside their place, synced, then renamed into it."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def atomic_writer(path: str | os.PathLike, mode: str = "w") -> Iterator[IO]:
    """Open a temporary file that takes `path`'s place on success and leaves `path` untouched on failure."""
    if mode not in ("w", "wb"):
        raise ValueError(f"atomic_writer writes whole files: mode is 'w' or 'wb', not {mode!r}")
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, mode, encoding=None if "b" in mode else "utf-8") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        # mkstemp makes private files; give the result the mode that open() would have given it.
        os.chmod(temporary, target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~current_umask())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync_directory(target.parent)


def write_text(path: str | os.PathLike, text: str) -> None:
    with atomic_writer(path) as stream:
        stream.write(text)


def current_umask() -> int:
    """The umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def sync_directory(path: Path) -> None:
    """Make a rename in `path` survive a power cut, where the file system offers that."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
