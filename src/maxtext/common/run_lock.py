"""One process at a time trains in a run's folder.

`RunLock` locks a file in the folder (POSIX `fcntl` locks), and writes into it who holds it. The
kernel drops the lock when its process ends, however that ends, so a killed run can be started again
at once: the file that it left is taken over. The lock holds among all machines that share the
folder if their file system supports locks (NFS, Lustre with `-o flock`, CephFS, GPFS do); where
there are none, the run goes on without one, after a warning.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from maxtext.common.errors import UserError
from maxtext.common.log import LOGGER

FILE = ".lock"
HELD = (errno.EACCES, errno.EAGAIN)


class RunLock:
    """A context manager. Entering it raises UserError if another process holds the lock of
    `folder`.
    """

    def __init__(self, folder: Path):
        self.path = folder / FILE
        self.descriptor: int | None = None
        self.made: list[Path] = []  # folders that were not there before, innermost first

    def __enter__(self) -> "RunLock":
        self.made = [folder for folder in self.path.parents if not folder.exists()]
        while True:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # One descriptor for everything: closing any other of the same file would drop the lock.
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
        me = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(me).encode() + b"\n", 0)
        self.descriptor = descriptor
        return self

    def lock(self, descriptor: int) -> bool:
        """Whether the lock was taken; False where the file system has none."""
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
                f"{self.path.parent} is in use: process {holder['pid']} on {holder['host']} trains there since "
                f"{holder['since']}; wait for it or stop it, or choose another run_name"
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
                self.path.unlink()  # before the lock goes, so that nobody else's file is removed
                for folder in self.made:
                    folder.rmdir()  # if the run left nothing there
            os.close(self.descriptor)
            self.descriptor = None


def read_holder(descriptor: int) -> dict[str, Any] | None:
    """Who wrote the file; None if nobody did, or a kill came in between."""
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return None
    return holder if isinstance(holder, dict) and {"host", "pid", "since"} <= set(holder) else None
