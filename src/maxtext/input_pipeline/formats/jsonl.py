"""kind=jsonl: each line is a JSON object of columns; kind=lines: each line is plain text. Blank
lines are skipped.

A file compressed with gzip (by its first bytes, not its name) is one block: all of it is
decompressed when one of its records is read.
"""

import gzip
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from maxtext.input_pipeline.formats.cache import Caches
from maxtext.input_pipeline.formats.interface import (
    GZIP,
    HEAD,
    BadFile,
    BadRecord,
    OpenFile,
    Record,
    check_index,
    missing_file_error,
    select_columns,
)
from maxtext.input_pipeline.formats.lines import index_lines

CHUNK = 2**20
DAMAGED = (gzip.BadGzipFile, EOFError, zlib.error)


class JsonLines:
    def __init__(self, path: str, columns: Sequence[str], caches: Caches):
        self.path = path
        self.wanted = tuple(columns)
        self.caches = caches
        self.nbytes = os.path.getsize(path)
        with open(path, "rb") as file:
            self.compressed = file.read(len(GZIP)) == GZIP
        try:
            self.lines = index_lines(self.chunks(), HEAD)
        except DAMAGED as error:
            raise BadFile(f"cannot be decompressed ({error}): write or copy it again") from error
        self.names = self.peek_columns()
        self.lines.head.clear()

    def chunks(self) -> Iterator[bytes]:
        with (
            gzip.open(self.path, "rb")
            if self.compressed
            else open(self.path, "rb", buffering=0) as file
        ):
            while chunk := file.read(CHUNK):
                yield chunk

    def peek_columns(self) -> list[str] | None:
        """The columns of the first records. Raises BadFile if none of them can be read."""
        names: dict[str, None] = {}
        reasons = []
        for line in self.lines.head:
            try:
                names.update(dict.fromkeys(parse(line)))
            except ValueError as error:
                reasons.append(str(error))
        if reasons and len(reasons) == len(self.lines.head):
            raise BadFile(
                f"is not a file of JSON lines (line {self.lines.number(0)}: {reasons[0]})"
            )
        return list(names)

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> Record:
        check_index(index, len(self))
        start, end = int(self.lines.offsets[index]), int(self.lines.offsets[index + 1])
        try:
            return self.record(self.read(start, end))
        except ValueError as error:
            raise BadRecord(*self.where(index), str(error)) from error

    def record(self, line: bytes) -> Record:
        return select_columns(parse(line), self.wanted)

    def read(self, start: int, end: int) -> bytes:
        if self.compressed:
            return self.caches.blocks.get(self.path, self.decompress)[start:end]
        return self.caches.files.get(self.path, lambda: OpenFile(self.path)).read(start, end)

    def decompress(self) -> bytes:
        try:
            with gzip.open(self.path, "rb") as file:
                return file.read()
        except (OSError, EOFError, zlib.error) as error:  # it could be read at the start
            raise missing_file_error(
                self.path, error if isinstance(error, OSError) else OSError(str(error))
            ) from error

    def where(self, index: int) -> tuple[str, str]:
        return self.path, f"line {self.lines.number(index)}"

    @property
    def blocks(self) -> np.ndarray | None:
        return np.array([len(self)]) if self.compressed else None

    @property
    def decoded(self) -> int:
        return int(self.lines.offsets[-1])

    @property
    def sizes(self) -> np.ndarray:
        return np.diff(self.lines.offsets)

    def columns(self) -> list[str] | None:
        return self.names


class TextLines(JsonLines):
    """kind=lines: each line is a document, for any name of its column. Bytes that are not UTF-8
    become U+FFFD.
    """

    def peek_columns(self) -> None:
        return None

    def record(self, line: bytes) -> Record:
        return dict.fromkeys(
            self.wanted or ("text",), line.rstrip(b"\r\n").decode("utf-8", errors="replace")
        )


def parse(line: bytes) -> dict[str, Any]:
    """The JSON object of a line. Raises ValueError if it is none."""
    try:
        value = json.loads(line.rstrip().decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"invalid UTF-8 at byte {error.start} of the line") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"invalid JSON ({error.msg} at character {error.pos} of the line)"
        ) from error
    except (ValueError, RecursionError) as error:  # a number too long, brackets too deep
        raise ValueError(f"invalid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__} instead of a JSON object with columns")
    return value
