"""The interface of file formats: random-access records, errors for those that cannot be read, and
caches.

A `RecordSource` returns a record as a dict of columns. Text is `str`; a list of numbers is an array
if the format has its dtype, else a list (JSON); nested values are lists and dicts. A record has the
wanted columns, or all if none were named. Several threads read a RecordSource at once, and it is
sent to other processes: it is pickled without open files, which are opened again on demand.

`Caches` are LRU caches of open files and decoded blocks, shared by all files of a dataset and all
threads. A dataset may have more files than a process may open, and more blocks than memory. If
several threads need the same entry, one creates it and the others wait.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from maxtext.common.errors import UserError
from maxtext.common.types import Json

Record = Json

GZIP = b"\x1f\x8b"  # the first bytes of a compressed file
HEAD = 16  # records that are read to find the columns of a file without a schema


class BadRecord(Exception):
    """A record that cannot be read. `location` says where in the file, or is the number of a
    record.

    Lines count from 1, as in an editor; rows and records from 0, as in Python. `details` are as in
    UserError.
    """

    details = ""

    def __init__(self, path: str, location: str | int, reason: str):
        super().__init__(path, location, reason)
        self.path, self.reason = path, reason
        self.location = f"record {location}" if isinstance(location, int) else location

    def __str__(self) -> str:
        return f"{self.path}, {self.location}: {self.reason}"


class UnusableRecord(ValueError):
    """A record that can be read but has no usable text."""


class BadFile(Exception):
    """A file that is not of its kind, or is damaged. The message follows the name of the file."""


class RecordSource(Protocol):
    """The records of one file, or of many as one sequence."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Record:
        """A record; thread-safe. Raises BadRecord if it cannot be read, IndexError past the end."""

    def where(self, index: int) -> tuple[str, str]:
        """(path, location) of a record, as in BadRecord."""

    @property
    def blocks(self) -> np.ndarray | None:
        """The number of records in each block of records that are decoded together; None if each is
        read alone.
        """

    @property
    def sizes(self) -> np.ndarray | None:
        """The size of each record in bytes, if known without reading them."""

    @property
    def nbytes(self) -> int:
        """The size on disk."""

    @property
    def decoded(self) -> int:
        """The approximate decoded size of all blocks, or the size on disk if there are none."""

    def columns(self) -> list[str] | None:
        """The names of the columns, or None if any name is accepted."""


def check_index(index: int, length: int) -> None:
    if not 0 <= index < length:
        raise IndexError(f"record {index} of {length}")


def select_columns(record: Record, wanted: Sequence[str]) -> Record:
    """The wanted columns of a record. Raises ValueError if one is missing."""
    chosen = (
        {name: record[name] for name in wanted if record.get(name) is not None}
        if wanted
        else record
    )
    if len(chosen) < len(wanted):
        missing = next(name for name in wanted if name not in chosen)
        state = "is null" if missing in record else "is missing"
        raise ValueError(f"the column {missing!r} {state}")
    return chosen


def missing_file_error(path: str, error: OSError) -> UserError:
    """The error for a file that existed at the start of the run. It is not a bad record, which may
    be skipped.
    """
    return UserError(
        f"{path} cannot be read any more ({error.strerror or error}): put it back and resume the "
        "run"
    )


def shrunk_file_error(path: str) -> UserError:
    return UserError(
        f"{path} has become shorter while the run reads it: put it back and resume the run"
    )


class OpenFile:
    """Reads bytes of a file at any offset. It is closed when the last reference to it is gone."""

    def __init__(self, path: str):
        self.path = path
        try:
            self.descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise missing_file_error(path, error) from error

    def read(self, start: int, end: int) -> bytes:
        try:
            data = os.pread(self.descriptor, end - start, start)
        except OSError as error:
            raise missing_file_error(self.path, error) from error
        if len(data) < end - start:
            raise shrunk_file_error(self.path)
        return data

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


OPEN_FILES = 128
DECODED_BLOCKS = 16
DECODED_BYTES = 2**30  # large blocks are evicted earlier, but MIN_BLOCKS stay
MIN_BLOCKS = 2  # at the end of a block, prefetching threads also need the next one


@dataclass
class Entry:
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_ready: bool = False
    value: object = None
    nbytes: int = 0


class Cache:
    """An LRU cache of at most `count` values and, if `weigh` returns their sizes, about `limit`
    bytes. It is pickled without its entries.
    """

    def __init__(
        self, count: int, limit: int | None = None, weigh: Callable[[Any], int] | None = None
    ):
        self.count = count
        self.limit = limit
        self.weigh = weigh
        self.lock = threading.Lock()
        self.entries: OrderedDict[Hashable, Entry] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], object]) -> Any:
        with self.lock:
            entry = self.entries.get(key)
            if entry is None:
                entry = self.entries[key] = Entry()
                self.evict()
            else:
                self.entries.move_to_end(key)
        if not entry.is_ready:
            # A failure is not cached: the next thread tries again.
            with entry.lock:
                if not entry.is_ready:
                    entry.value = make()
                    entry.nbytes = self.weigh(entry.value) if self.weigh else 0
                    entry.is_ready = True
            with self.lock:
                self.evict()
        return entry.value

    def evict(self) -> None:
        nbytes = sum(entry.nbytes for entry in self.entries.values()) if self.limit else 0
        while len(self.entries) > self.count or (
            len(self.entries) > MIN_BLOCKS and nbytes > (self.limit or 0)
        ):
            nbytes -= self.entries.popitem(last=False)[1].nbytes

    def __reduce__(self) -> tuple:
        return Cache, (self.count, self.limit, self.weigh)


def block_bytes(block: Any) -> int:
    return block.nbytes if hasattr(block, "nbytes") else len(block)


class Caches:
    """The caches of one dataset."""

    def __init__(self) -> None:
        self.files = Cache(OPEN_FILES)
        self.blocks = Cache(DECODED_BLOCKS, DECODED_BYTES, block_bytes)
