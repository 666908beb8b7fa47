"""A lock on a run's folder, in which only one process may train.

`RunLock` locks a file in the folder (POSIX `fcntl` locks) and writes the holder into it. The
operating system releases the lock when its process ends in any way, so a killed run can be
restarted at once and takes over the file. The lock works across all machines that share the folder
if their file system supports locks (NFS, Lustre with `-o flock`, CephFS, GPFS do). Without that
support the run continues without a lock, after a warning.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path

from maxtext.common.errors import UserError
from maxtext.common.log import LOGGER
from maxtext.common.types import Json

FILE = ".lock"
HELD = (errno.EACCES, errno.EAGAIN)  # another process holds the lock


class RunLock:
    """A context manager. Entering it raises UserError if another process holds the lock of
    `folder`.
    """

    def __init__(self, folder: Path):
        self.path = folder / FILE
        self.descriptor: int | None = None
        self.created: list[Path] = []  # folders that did not exist, innermost first

    def __enter__(self) -> "RunLock":
        self.created = [folder for folder in self.path.parents if not folder.exists()]
        while True:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # A single descriptor: closing another one of the same file would release the lock.
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                locked = self.lock(descriptor)
                if not locked or self.is_current(descriptor):
                    break
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # its holder removed the file between our two calls
        holder = read_holder(descriptor)
        if holder and locked:
            LOGGER.warning(
                "%s was left by process %s on %s, which has ended: taken over",
                self.path,
                holder["pid"],
                holder["host"],
            )
        holder = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode() + b"\n", 0)
        self.descriptor = descriptor
        return self

    def lock(self, descriptor: int) -> bool:
        """Take the lock; False if the file system has none. Raises UserError if it is held."""
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in HELD:
                LOGGER.warning(
                    "%s cannot be locked (%s): start this run only once", self.path, error.strerror
                )
                return False
            holder = read_holder(descriptor) or {
                "pid": "?",
                "host": "another machine",
                "since": "?",
            }
            raise UserError(
                f"{self.path.parent} is in use: process {holder['pid']} on {holder['host']} trains "
                f"there since {holder['since']}; wait for it or stop it, or choose another run_name"
            ) from None
        return True

    def is_current(self, descriptor: int) -> bool:
        """Whether the path still names the file that was opened."""
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    def __exit__(self, *error: object) -> None:
        if self.descriptor is not None:
            with contextlib.suppress(OSError):
                # before the release: afterwards it may be another process's file
                self.path.unlink()
                for folder in self.created:
                    folder.rmdir()  # fails, as it should, if the run wrote files
            os.close(self.descriptor)
            self.descriptor = None


def read_holder(descriptor: int) -> Json | None:
    """The holder in the file; None if the file is empty or incomplete."""
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return None
    return holder if isinstance(holder, dict) and {"host", "pid", "since"} <= set(holder) else None
