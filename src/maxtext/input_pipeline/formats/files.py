"""Finds the files that a key names, the kind of a file, and the lines of a file.

`find_files` splits paths at commas. Each is a file, a directory (all files below it) or a glob, in
which `**` matches any folders. As in a shell, names that start with a dot match only if they are
written out. Files are sorted and unique. `{stdlib}` is the folder of the Python standard library,
text that every machine has.

`kind_of` reads the kind from a file's name, and `content_of` from its first bytes. `index_lines`
indexes the lines of a file in one fast pass over its bytes. Blank lines are skipped.
"""

import glob
import os
import re
import struct
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from maxtext.common.crc32c import masked_crc32c
from maxtext.common.errors import ConfigError

WHITE = b" \t\r\n"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some editors write it at the start of a UTF-8 file


@dataclass
class LineIndex:
    """Line `i` is the bytes from `offsets[i]` to `offsets[i + 1]`, with its line end and any blank
    lines after it.
    """

    offsets: np.ndarray  # [lines + 1]
    blanks: np.ndarray  # for each blank line, the number of other lines before it
    head: list[bytes] = field(default_factory=list)  # the first few lines

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def number(self, index: int) -> int:
        """The number of a line in an editor, from 1."""
        return index + 1 + int(np.searchsorted(self.blanks, index, side="right"))


def index_lines(chunks: Iterable[bytes], head: int) -> LineIndex:
    """Index the lines of a file that is read in chunks, and keep its first `head` lines."""
    first: list[bytes] = []
    begins, blanks, total, offset = [], [], 0, 0
    for data in split_at_line_ends(chunks):
        mark = len(BYTE_ORDER_MARK) if offset == 0 and data.startswith(BYTE_ORDER_MARK) else 0
        array = np.frombuffer(data, np.uint8)
        ends = np.flatnonzero(array == ord("\n")) + 1
        if not len(ends) or ends[-1] < len(data):  # the last line of a file needs no end
            ends = np.append(ends, len(data))
        starts = np.concatenate([[mark], ends[:-1]])
        # A mark and nothing else leaves a start past the end.
        white = np.flatnonzero(
            np.isin(array[np.minimum(starts, len(array) - 1)], np.frombuffer(WHITE, np.uint8))
        )
        blank = np.array(
            [line for line in white if not data[starts[line] : ends[line]].strip(WHITE)], np.int64
        )
        blanks.append(total + blank - np.arange(len(blank)))
        nonblank = np.delete(starts, blank)
        for start in nonblank[: head - len(first)]:
            end = data.find(b"\n", start)
            first.append(data[start : end if end >= 0 else len(data)])
        begins.append(nonblank + offset)
        total += len(nonblank)
        offset += len(data)
    # Half the memory for files below 4 GiB.
    kind = np.uint32 if offset < 2**32 else np.uint64
    offsets = np.concatenate([part.astype(kind) for part in begins] + [np.array([offset], kind)])
    return LineIndex(offsets, np.concatenate([np.zeros(0, np.int64), *blanks]), first)


def split_at_line_ends(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in chunks that end with a line end."""
    waiting: list[bytes] = []
    for chunk in chunks:
        cut = chunk.rfind(b"\n") + 1
        if cut:
            yield b"".join([*waiting, chunk[:cut]])
            waiting = [chunk[cut:]] if cut < len(chunk) else []
        else:
            waiting.append(chunk)
    if waiting:
        yield b"".join(waiting)


KIND_OF_SUFFIX = {
    "txt": "text",
    "text": "text",
    "md": "text",
    "jsonl": "jsonl",
    "json": "jsonl",
    "ndjson": "jsonl",
    "parquet": "parquet",
    "arrow": "arrow",
    "tfrecord": "tfrecord",
    "tfrecords": "tfrecord",
    "array_record": "arrayrecord",
    "arrayrecord": "arrayrecord",
}


def find_files(key: str, value: str) -> list[str]:
    """The sorted files that the value of `key` names. Raises ConfigError with every part of the
    value that names none.
    """
    paths: set[str] = set()
    problems = []
    for part in filter(None, (part.strip() for part in value.split(","))):
        path = os.path.expanduser(part.replace("{stdlib}", sysconfig.get_path("stdlib")))
        files = files_of(path)
        if not files and glob.has_magic(path):
            problems.append(f"{key}: no file matches {part}")
        elif not files and os.path.isdir(path):
            problems.append(f"{key}: the directory {part} has no files")
        elif not files:
            problems.append(f"{key}: {part} does not exist or is not a file")
        problems += [
            f"{key}: {file} cannot be read, check its permissions"
            for file in files
            if not readable(file)
        ]
        paths.update(files)
    if not paths and not problems:
        problems.append(f"{key} is empty: name the files to read")
    if problems:
        raise ConfigError(*problems)
    return sorted(paths)


def files_of(path: str) -> list[str]:
    # The name of an existing file is not a glob, even if it has a bracket in it.
    if os.path.isfile(path):
        return [path]
    matches = [path] if os.path.isdir(path) else glob.glob(path, recursive=True)
    files = []
    for match in matches:
        below = os.path.join(glob.escape(match), "**")
        candidates = glob.glob(below, recursive=True) if os.path.isdir(match) else [match]
        files += [
            os.path.normpath(candidate) for candidate in candidates if os.path.isfile(candidate)
        ]
    return files


@dataclass(frozen=True)
class Content:
    """The content of a file according to its first bytes. `kind` is None if it cannot be read."""

    name: str
    kind: str | None


GZIPPED = "compressed with gzip"
CONTENT_OF_MAGIC = {
    b"PAR1": Content("a Parquet file", "parquet"),
    b"ARROW1": Content("an Arrow file", "arrow"),
    b"\xff\xff\xff\xff": Content("an Arrow stream", "arrow"),
    b"\x83\xafp\xd1\r\x88J?": Content("an ArrayRecord file", "arrayrecord"),
    b"\x1f\x8b": Content(GZIPPED, None),
    b"\x28\xb5\x2f\xfd": Content("compressed with Zstandard", None),
    b"BZh": Content("compressed with bzip2", None),
    b"\xfd7zXZ": Content("compressed with xz", None),
    b"PK\x03\x04": Content("a zip archive", None),
}
TF_RECORD = Content("a TFRecord file", "tfrecord")
JSON_LINES = Content("a file of JSON", "jsonl")
TF_RECORD_LENGTH = struct.Struct("<8sI")  # of a record, and the checksum of these bytes


def content_of(path: str) -> Content | None:
    """The content of a file according to its first bytes; None if they are not known."""
    with open(path, "rb") as file:
        head = file.read(64)
    for magic, content in CONTENT_OF_MAGIC.items():
        if head.startswith(magic):
            return content
    if len(head) >= TF_RECORD_LENGTH.size:
        length, checksum = TF_RECORD_LENGTH.unpack_from(head)
        if masked_crc32c(length) == checksum:
            return TF_RECORD
    is_json = head.removeprefix(BYTE_ORDER_MARK).lstrip()[:1] in (b"{", b"[")
    return JSON_LINES if is_json else None


def wrong_content(path: str, kind: str) -> str | None:
    """A sentence without its subject, if a file has another format than `kind`; else None."""
    content = content_of(path)
    is_text = kind in ("text", "lines")
    if content is None or content.kind == kind or (is_text and content is JSON_LINES):
        return None
    if content.name == GZIPPED and kind in ("jsonl", "lines", "tfrecord"):
        return None  # which explain it themselves
    if content.kind is None:
        return f"is {content.name}: decompress it"
    return (
        f"is {content.name}, but is read as {kind}: set grain_file_type={content.kind}, or give "
        "it the ending of its format"
    )


def readable(path: str) -> bool:
    return os.access(path, os.R_OK)


def kind_of(path: str) -> str | None:
    """The kind of a file by its name, also of `a.jsonl.gz` and `a.tfrecord-00000-of-00008`; None if
    it is unknown.
    """
    name = re.sub(r"-\d+-of-\d+$", "", os.path.basename(path)).removesuffix(".gz")
    return KIND_OF_SUFFIX.get(name.rpartition(".")[2].lower()) if "." in name else None
