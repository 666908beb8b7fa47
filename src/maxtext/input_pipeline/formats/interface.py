"""What a file format is to the pipeline: records by number, and what is said about those that
cannot be read.

A record is a dictionary of columns. Text is `str`, a list of numbers is an array where the format
knows its type (a list in JSON), nested values are lists and dictionaries. A record has the wanted
columns, or all if none were named.

Formats are read by several threads at once and are sent to other processes: they pickle without
what they hold open, and open it again when it is asked for.
"""

import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from maxtext.common.errors import UserError

Record = dict[str, Any]

GZIP = b"\x1f\x8b"  # how a compressed file begins
HEAD = 16  # records that are looked at to know the columns of a file without a schema


class BadRecord(Exception):
    """A record that cannot be read. `place` is where in the file, a number is that of a record.

    Lines count from 1, as in an editor; rows and records from 0, as in Python. `details`: as in
    UserError.
    """

    details = ""

    def __init__(self, path: str, place: str | int, reason: str):
        super().__init__(path, place, reason)
        self.path, self.reason = path, reason
        self.place = f"record {place}" if isinstance(place, int) else place

    def __str__(self) -> str:
        return f"{self.path}, {self.place}: {self.reason}"


class BadFile(Exception):
    """A file that is not of its kind, or is damaged as a whole. The message follows the name of the
    file.
    """


class RecordSource(Protocol):
    """The records of one file, or of many as one sequence."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Record:
        """The record, by any thread. Raises BadRecord where it cannot be read, IndexError past the
        end.
        """

    def where(self, index: int) -> tuple[str, str]:
        """The file and the place in it, as in BadRecord."""

    @property
    def blocks(self) -> np.ndarray | None:
        """How many records follow each other in each part that is read at once; None: any record
        costs the same.
        """

    @property
    def sizes(self) -> np.ndarray | None:
        """The bytes of each record, where they are known without reading it."""

    @property
    def nbytes(self) -> int:
        """The bytes on disk."""

    @property
    def decoded(self) -> int:
        """The bytes of all blocks in memory, about; those on disk where there are no blocks."""

    def columns(self) -> list[str] | None:
        """The names of the columns; None: any name will do."""


def check_index(index: int, length: int) -> None:
    if not 0 <= index < length:
        raise IndexError(f"record {index} of {length}")


def choose(record: Record, wanted: Sequence[str]) -> Record:
    """The wanted columns of a record, or ValueError with the reason why it does not have them."""
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


def gone(path: str, error: OSError) -> UserError:
    """For a file that was there at the start of the run: this is not one bad record that may be
    left out.
    """
    return UserError(
        f"{path} cannot be read any more ({error.strerror or error}): put it back and resume the run"
    )


def shrunk(path: str) -> UserError:
    return UserError(
        f"{path} has become shorter while the run reads it: put it back and resume the run"
    )


class OpenFile:
    """Bytes of a file by position. It is closed when the last thread that reads from it lets it
    go.
    """

    def __init__(self, path: str):
        self.path = path
        try:
            self.descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise gone(path, error) from error

    def read(self, start: int, end: int) -> bytes:
        try:
            data = os.pread(self.descriptor, end - start, start)
        except OSError as error:
            raise gone(self.path, error) from error
        if len(data) < end - start:
            raise shrunk(self.path)
        return data

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)
