"""Finds the files that a key names, and the kind of a file by its name and by its first bytes.

Paths are separated by commas. Each is a file, a directory (all files below it) or a glob, in which
`**` matches any folders. As in a shell, names that start with a dot match only if they are written
out. Files are sorted and unique. `{stdlib}` is the folder of the Python standard library, text that
every machine has.
"""

import glob
import os
import re
import struct
import sysconfig
from dataclasses import dataclass

from maxtext.common.crc32c import masked_crc32c
from maxtext.common.errors import ConfigError
from maxtext.input_pipeline.formats.lines import BYTE_ORDER_MARK

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
    """What the first bytes of a file say that it is. `kind` is None if it cannot be read."""

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
    """What a file is by its first bytes; None if they do not say it."""
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
