"""Files of Arrow columns: rows by number through the blocks of rows that are decoded together."""

import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from maxtext.input_pipeline.formats.cache import Caches
from maxtext.input_pipeline.formats.interface import (
    BadFile,
    BadRecord,
    Record,
    check_index,
    select_columns,
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

    def __init__(self, columns: dict[str, Any], reason: str = ""):
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
