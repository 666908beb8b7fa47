"""Files of Arrow columns: rows by number through the blocks of rows that are decoded together.

`ParquetRows` (kind=parquet) decodes a row group at once, the wanted columns only, and caches it.
Checksums of pages are verified if the file has them. A page that cannot be decoded makes the rows
of its row group bad records.

`ArrowRows` (kind=arrow) maps Arrow IPC files and streams (what `save_to_disk` of the package
datasets writes) into memory. A record batch is a block. Nothing is decoded, but a batch is
validated once before its rows are used, since the format has no checksums and a damaged offset
would point anywhere.
"""

import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from maxtext.common.extras import require
from maxtext.common.types import Json
from maxtext.input_pipeline.formats.interface import (
    BadFile,
    BadRecord,
    Caches,
    Record,
    check_index,
    missing_file_error,
    select_columns,
    shrunk_file_error,
)

LISTS = ("list<", "large_list<", "fixed_size_list<")
NUMBERS = {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)} | {
    "halffloat",
    "float",
    "double",
}


class RowBlock:
    """A block of rows in memory, or in a mapped file. `reason` says why none of them can be read.

    A damaged offset would make a reader access memory outside of a column. So all rows are
    validated together, and one by one if that fails.
    """

    def __init__(self, columns: Json, reason: str = ""):
        self.columns = columns
        self.reason = reason
        self.nbytes = sum(column.get_total_buffer_size() for column in columns.values())
        self.unsound = {name for name, column in columns.items() if not sound(column)}
        self.arrays = {name for name, column in columns.items() if is_list_of_numbers(column.type)}

    def row(self, index: int) -> Record:
        """The values of a row. Raises ValueError if it cannot be read."""
        if self.reason:
            raise ValueError(self.reason)
        return {name: self.value(name, index) for name in self.columns}

    def value(self, name: str, index: int) -> Any:
        column = self.columns[name]
        try:
            if name in self.unsound:
                column.slice(index, 1).validate(full=True)
            scalar = column[index]
            if name in self.arrays and scalar.is_valid and not scalar.values.null_count:
                return scalar.values.to_numpy(zero_copy_only=False)
            return scalar.as_py()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"the column {name!r} has invalid UTF-8 at byte {error.start}"
            ) from error
        except (ValueError, IndexError) as error:  # pyarrow's errors for damaged data
            raise ValueError(f"the column {name!r} is damaged ({error})") from error


def sound(column: Any) -> bool:
    try:
        column.validate(full=True)
    except (ValueError, IndexError):
        return False
    return True


def is_list_of_numbers(kind: Any) -> bool:
    return str(kind).startswith(LISTS) and str(kind.value_type) in NUMBERS


def damaged_block(error: Exception) -> RowBlock:
    """A block that cannot be decoded. It is cached like any other, or each of its rows would decode
    it again.
    """
    return RowBlock({}, reason=f"its block of rows is damaged ({first_line(error)})")


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].strip()


class TableFile(ABC):
    """The common part of Parquet and Arrow files."""

    sizes = None

    def __init__(
        self,
        path: str,
        wanted: Sequence[str],
        caches: Caches,
        names: list[str],
        counts: Sequence[int],
    ):
        """`counts` are the numbers of rows of the blocks."""
        if len(set(names)) < len(names):
            raise BadFile(f"has two columns of the same name among {', '.join(names)}")
        self.path = path
        self.wanted = tuple(wanted)
        self.caches = caches
        self.names = names
        self.nbytes = self.decoded = os.path.getsize(path)
        self.counts = list(counts)
        self.ends = list(accumulate(self.counts))
        self.read_columns = [name for name in names if name in wanted] if wanted else names

    @abstractmethod
    def load(self, number: int) -> RowBlock:
        """Read a block."""

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, index: int) -> Record:
        check_index(index, len(self))
        number = bisect_right(self.ends, index)
        rows = self.caches.blocks.get((self.path, number), lambda: self.load(number))
        try:
            return select_columns(
                rows.row(index - self.ends[number] + self.counts[number]), self.wanted
            )
        except ValueError as error:
            raise BadRecord(*self.where(index), str(error)) from error

    def where(self, index: int) -> tuple[str, str]:
        return self.path, f"row {index}"

    @property
    def blocks(self) -> np.ndarray:
        return np.array(self.counts, np.int64)

    def columns(self) -> list[str]:
        return self.names


class ParquetRows(TableFile):
    def __init__(self, path: str, columns: Sequence[str], caches: Caches):
        pyarrow, parquet = (
            require("pyarrow", "reading parquet"),
            require("pyarrow.parquet", "reading parquet"),
        )
        try:
            with parquet.ParquetFile(path) as file:
                metadata, names = file.metadata, file.schema_arrow.names
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            if isinstance(error, OSError) and error.errno is not None:  # not about the contents
                raise
            raise BadFile(f"is not a parquet file, or is damaged ({first_line(error)})") from error
        counts = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        super().__init__(path, columns, caches, names, counts)
        self.decoded = decoded_bytes(metadata, self.read_columns)

    def load(self, number: int) -> RowBlock:
        pyarrow, parquet = (
            require("pyarrow", "reading parquet"),
            require("pyarrow.parquet", "reading parquet"),
        )
        try:
            # The parsed footer is shared, the reader is not: it is not documented as thread-safe.
            metadata = self.caches.files.get(self.path, lambda: parquet.read_metadata(self.path))
            with parquet.ParquetFile(
                self.path, metadata=metadata, page_checksum_verification=True
            ) as file:
                table = file.read_row_group(number, columns=self.read_columns, use_threads=False)
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise missing_file_error(self.path, error) from error
            return damaged_block(error)
        return RowBlock({name: table.column(name) for name in self.read_columns})


def decoded_bytes(metadata: Any, names: Sequence[str]) -> int:
    """The decoded size of the columns of these names, from the footer."""
    column_indices = [
        at
        for at in range(metadata.num_columns)
        if metadata.schema.column(at).path.split(".")[0] in names
    ]
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    return sum(
        group.column(at).total_uncompressed_size for group in groups for at in column_indices
    )


FILE_MAGIC = b"ARROW1"


class ArrowRows(TableFile):
    def __init__(self, path: str, columns: Sequence[str], caches: Caches):
        pyarrow = require("pyarrow", "reading arrow")
        try:
            batches = Batches(path)
            names = list(batches.schema.names)
            counts = [batches.read(number).num_rows for number in range(len(batches))]
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            if isinstance(error, OSError) and error.errno is not None:  # not about the contents
                raise
            raise BadFile(
                f"is not an Arrow file or stream, or is damaged ({first_line(error)})"
            ) from error
        super().__init__(path, columns, caches, names, counts)

    def __getitem__(self, index: int) -> Record:
        # Reading past the end of a mapped file would kill the process without a message. It still
        # does if the file shrinks between this check and the read.
        try:
            size = os.stat(self.path).st_size
        except OSError as error:
            raise missing_file_error(self.path, error) from error
        if size < self.nbytes:
            raise shrunk_file_error(self.path)
        return super().__getitem__(index)

    def load(self, number: int) -> RowBlock:
        pyarrow = require("pyarrow", "reading arrow")
        try:
            batch = self.caches.files.get(self.path, lambda: Batches(self.path)).read(number)
            return RowBlock({name: batch.column(name) for name in self.read_columns})
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise missing_file_error(self.path, error) from error
            return damaged_block(error)


class Batches:
    """The record batches of an open file. Those of an IPC stream are found by reading through
    it.
    """

    def __init__(self, path: str):
        ipc = require("pyarrow.ipc", "reading arrow")
        source = require("pyarrow", "reading arrow").memory_map(path)
        with open(path, "rb") as file:
            is_stream = file.read(len(FILE_MAGIC)) != FILE_MAGIC
        self.reader = ipc.open_stream(source) if is_stream else ipc.open_file(source)
        self.schema = self.reader.schema
        self.walked: list[object] | None = list(self.reader) if is_stream else None

    def __len__(self) -> int:
        return self.reader.num_record_batches if self.walked is None else len(self.walked)

    def read(self, number: int) -> Any:
        return self.reader.get_batch(number) if self.walked is None else self.walked[number]
