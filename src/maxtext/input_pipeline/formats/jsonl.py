"""kind=jsonl: each line is a JSON object of columns, or the file is one array of such objects;
kind=lines: each line is plain text. Blank lines are skipped.

An array, and a file compressed with gzip (by its first bytes, not its name), are one block: all of
it is decoded to lines when one of its records is read.
"""

import gzip
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from typing import IO, cast

import numpy as np

from maxtext.common.types import Json
from maxtext.input_pipeline.formats.files import BYTE_ORDER_MARK, index_lines
from maxtext.input_pipeline.formats.interface import (
    GZIP,
    HEAD,
    BadFile,
    BadRecord,
    Caches,
    OpenFile,
    Record,
    check_index,
    missing_file_error,
    select_columns,
)

CHUNK = 2**20
DAMAGED = (gzip.BadGzipFile, EOFError, zlib.error)
MAX_OBJECT_BYTES = 2**26  # of a file that is parsed to explain an error


class JsonLines:
    reads_arrays = True

    def __init__(self, path: str, columns: Sequence[str], caches: Caches):
        self.path = path
        self.wanted = tuple(columns)
        self.caches = caches
        self.nbytes = os.path.getsize(path)
        with open(path, "rb") as file:
            self.is_compressed = file.read(len(GZIP)) == GZIP
        try:
            self.is_array = self.reads_arrays and self.starts_with(b"[")
            self.lines = index_lines(self.chunks(), HEAD)
        except DAMAGED as error:
            raise BadFile(f"cannot be decompressed ({error}): write or copy it again") from error
        self.names = self.peek_columns()
        self.lines.head.clear()

    def open(self) -> IO[bytes]:
        if self.is_compressed:
            return cast(IO[bytes], gzip.open(self.path, "rb"))
        return open(self.path, "rb", buffering=0)

    def starts_with(self, mark: bytes) -> bool:
        with self.open() as file:
            return file.read(CHUNK).removeprefix(BYTE_ORDER_MARK).lstrip().startswith(mark)

    def chunks(self) -> Iterator[bytes]:
        """The lines of the file, in chunks."""
        with self.open() as file:
            if self.is_array:
                yield lines_of_array(file.read())
                return
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
            if self.is_object():
                raise BadFile(
                    "is one JSON object, not rows: write one object on each line, or an array of "
                    "objects"
                )
            where = "record 0" if self.is_array else f"line {self.lines.number(0)}"
            raise BadFile(f"is not a file of JSON lines ({where}: {reasons[0]})")
        return list(names)

    def is_object(self) -> bool:
        """Whether all of the file is one JSON object."""
        if not self.starts_with(b"{") or self.nbytes > MAX_OBJECT_BYTES:
            return False
        with self.open() as file:
            try:
                return isinstance(json.loads(file.read()), dict)
            except (ValueError, RecursionError):
                return False

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
        if self.is_block:
            return self.caches.blocks.get(self.path, self.decode)[start:end]
        return self.caches.files.get(self.path, lambda: OpenFile(self.path)).read(start, end)

    @property
    def is_block(self) -> bool:
        return self.is_compressed or self.is_array

    def decode(self) -> bytes:
        try:
            return b"".join(self.chunks())
        except BadFile as error:  # it could be read at the start
            raise missing_file_error(self.path, OSError(str(error))) from error
        except (OSError, EOFError, zlib.error) as error:
            raise missing_file_error(
                self.path, error if isinstance(error, OSError) else OSError(str(error))
            ) from error

    def where(self, index: int) -> tuple[str, str]:
        is_line = not self.is_array
        return self.path, f"line {self.lines.number(index)}" if is_line else f"record {index}"

    @property
    def blocks(self) -> np.ndarray | None:
        return np.array([len(self)]) if self.is_block else None

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

    reads_arrays = False

    def peek_columns(self) -> None:
        return None

    def record(self, line: bytes) -> Record:
        return dict.fromkeys(
            self.wanted or ("text",), line.rstrip(b"\r\n").decode("utf-8", errors="replace")
        )


def lines_of_array(data: bytes) -> bytes:
    """The elements of a JSON array, one on each line. Raises BadFile if it is no array."""
    try:
        elements = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadFile(f"has invalid UTF-8 at byte {error.start}: repair it") from error
    except json.JSONDecodeError as error:
        raise BadFile(
            f"begins as a JSON array and is none ({error.msg} at line {error.lineno}, column "
            f"{error.colno}): repair it, or write one object on each line"
        ) from error
    except (ValueError, RecursionError) as error:
        raise BadFile(f"is a JSON array that cannot be read ({error})") from error
    return "".join(f"{json.dumps(element)}\n" for element in elements).encode()


def parse(line: bytes) -> Json:
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
