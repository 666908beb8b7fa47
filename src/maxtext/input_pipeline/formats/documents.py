"""All files of a dataset as one sequence of records, in the order of the files.

Before training starts, several threads open every file to check its kind, index and columns. The
problems of all files are reported together.

kind=text: a file is one document, for any name of its column. Bytes that are not UTF-8 become
U+FFFD.
"""

import contextlib
import copy
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import lru_cache
from itertools import accumulate

import numpy as np

from maxtext.common.errors import ConfigError
from maxtext.input_pipeline.formats.example import ArrayRecords, TfRecords
from maxtext.input_pipeline.formats.files import wrong_content
from maxtext.input_pipeline.formats.interface import (
    BadFile,
    Caches,
    Record,
    RecordSource,
    check_index,
    missing_file_error,
)
from maxtext.input_pipeline.formats.jsonl import JsonLines, TextLines
from maxtext.input_pipeline.formats.tables import ArrowRows, ParquetRows


class TextFiles:
    """All files as one source: there may be many, and only their sizes are needed."""

    blocks = None

    def __init__(self, paths: Sequence[str], columns: Sequence[str], executor: Executor):
        self.paths, self.names = list(paths), list(columns) or ["text"]
        try:
            self.sizes = np.fromiter(
                executor.map(os.path.getsize, self.paths), np.int64, len(self.paths)
            )
        except OSError as error:
            raise ConfigError(f"{error.filename} cannot be read ({error.strerror})") from error

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Record:
        check_index(index, len(self))
        # Read as bytes, since text mode would rewrite line ends.
        try:
            with open(self.paths[index], "rb") as file:
                text = file.read().decode("utf-8", errors="replace")
        except OSError as error:
            raise missing_file_error(self.paths[index], error) from error
        return dict.fromkeys(self.names, text)

    def where(self, index: int) -> tuple[str, str]:
        return self.paths[index], "the whole file"

    @property
    def nbytes(self) -> int:
        return int(self.sizes.sum())

    @property
    def decoded(self) -> int:
        return self.nbytes

    def columns(self) -> None:
        return None


FORMATS: dict[str, Callable[[str, Sequence[str], Caches], RecordSource]] = {
    "jsonl": JsonLines,
    "lines": TextLines,
    "parquet": ParquetRows,
    "arrow": ArrowRows,
    "tfrecord": TfRecords,
    "arrayrecord": ArrayRecords,
}
KINDS = ("text", *FORMATS)
MAX_LISTED = 5  # bad files that an error lists
MAX_COLUMNS = 20  # columns that an error lists
MAX_SNIFFED = 64  # files of text whose first bytes are checked


class Documents:
    """The records of several files, one file after the other."""

    def __init__(self, files: Sequence[RecordSource]):
        self.files = [file for file in files if len(file)]
        self.ends = list(accumulate(len(file) for file in self.files))
        self.nbytes = sum(file.nbytes for file in files)
        self.decoded = sum(file.decoded for file in files)

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, index: int) -> Record:
        file, index_in_file = self.locate(index)
        return file[index_in_file]

    def where(self, index: int) -> tuple[str, str]:
        file, index_in_file = self.locate(index)
        return file.where(index_in_file)

    def locate(self, index: int) -> tuple[RecordSource, int]:
        index = int(index)
        check_index(index, len(self))
        number = bisect_right(self.ends, index)
        return self.files[number], index - (self.ends[number - 1] if number else 0)

    @property
    def blocks(self) -> np.ndarray | None:
        blocks = [file.blocks for file in self.files]
        if all(opened_file is None for opened_file in blocks):
            return None
        # Beside files in blocks (compressed ones), a record that costs the same anywhere is a block
        # of its own.
        parts = zip(self.files, blocks, strict=True)
        return np.concatenate(
            [
                np.ones(len(file), np.int64) if opened_file is None else opened_file
                for file, opened_file in parts
            ]
        )

    @property
    def sizes(self) -> np.ndarray | None:
        sizes = [file.sizes for file in self.files]
        known_sizes = [array for array in sizes if array is not None]
        return (
            np.concatenate(known_sizes) if known_sizes and len(known_sizes) == len(sizes) else None
        )

    def with_own_caches(self) -> "Documents":
        """The same files with caches of their own."""
        other, caches = copy.copy(self), Caches()
        other.files = [copy.copy(file) for file in self.files]
        for file in other.files:
            if hasattr(file, "caches"):
                file.caches = caches
        return other

    def columns(self) -> list[str] | None:
        """The columns that all files have."""
        lists = [names for names in (file.columns() for file in self.files) if names is not None]
        if not lists:
            return None
        common = set(lists[0]).intersection(*lists[1:])
        return [name for name in lists[0] if name in common]


def open_files(paths: Sequence[str], kind: str, columns: Sequence[str], threads: int) -> Documents:
    """The records of all files with the wanted columns (all if none are named). Raises one
    ConfigError for all bad files.

    The data streams of a process open the same files. They are indexed once, but each stream has
    its own caches.
    """
    if kind not in KINDS:
        raise ConfigError(
            f"there is no kind of file called {kind!r}: choose from {', '.join(KINDS)}"
        )
    return index_files(
        tuple(paths), files_version(paths), kind, tuple(columns), threads
    ).with_own_caches()


def files_version(paths: Sequence[str]) -> int:
    """A hash of the sizes and modification times of the files."""
    stats = []
    for path in paths:
        with contextlib.suppress(OSError):  # reported later, with the other problems
            status = os.stat(path)
            stats.append((status.st_mtime_ns, status.st_size))
    return hash(tuple(stats))


@lru_cache(4)
def index_files(
    paths: tuple[str, ...], version: int, kind: str, columns: tuple[str, ...], threads: int
) -> Documents:
    caches = Caches()

    def open_file(path: str) -> RecordSource | str:
        try:
            file = FORMATS[kind](path, columns, caches)
            return missing_column(path, file, columns) or file
        except BadFile as error:
            return f"{path} {wrong_content(path, kind) or error}"
        except OSError as error:
            return f"{path} cannot be read ({error.strerror or error})"

    with ThreadPoolExecutor(max(1, min(threads, len(paths)))) as executor:
        if kind == "text":
            refuse_binary_files(paths)
            documents = Documents([TextFiles(paths, columns, executor)])
        else:
            opened = list(executor.map(open_file, paths))
            problems = [opened_file for opened_file in opened if isinstance(opened_file, str)]
            if problems:
                more = (
                    [f"and {len(problems) - MAX_LISTED} more files like these"]
                    if len(problems) > MAX_LISTED
                    else []
                )
                raise ConfigError(*problems[:MAX_LISTED], *more)
            documents = Documents(
                [opened_file for opened_file in opened if not isinstance(opened_file, str)]
            )
    if not len(documents) or not documents.nbytes:
        raise ConfigError(
            f"all {len(paths)} files are empty, among them {paths[0]}"
            if paths
            else "no files to read"
        )
    return documents


def refuse_binary_files(paths: Sequence[str]) -> None:
    """Raise ConfigError if the first files are not text but of a known binary format."""
    problems = [
        f"{path} {problem}"
        for path in paths[:MAX_SNIFFED]
        if os.access(path, os.R_OK) and (problem := wrong_content(path, "text"))
    ]
    if problems:
        raise ConfigError(*problems[:MAX_LISTED])


def missing_column(path: str, file: RecordSource, columns: Sequence[str]) -> str | None:
    names = file.columns()
    if names is None or not len(file):
        return None
    missing = [name for name in columns if name not in names]
    if not missing:
        return None
    listed = ", ".join(names[:MAX_COLUMNS]) + (
        f" and {len(names) - MAX_COLUMNS} more" if len(names) > MAX_COLUMNS else ""
    )
    return (
        f"{path} has no column {missing[0]!r}, only {listed}: name the column to read in "
        "train_data_columns, or in eval_data_columns for evaluation"
    )
