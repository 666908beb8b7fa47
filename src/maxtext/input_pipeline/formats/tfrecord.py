"""kind=tfrecord: TFRecord files without TensorFlow.

A record is its length (8 bytes), the checksum of the length, the data, and the checksum of the
data. All lengths are read and their checksums verified when a file is opened, so that a truncated
file, or one of another kind, is detected before training. The checksum of the data is verified when
a record is read (crc32c.py).
"""

import mmap
import os
import struct
from array import array
from collections.abc import Sequence

import numpy as np

from maxtext.input_pipeline.formats.cache import Caches
from maxtext.input_pipeline.formats.crc32c import crc32c, masked, masked_of_lengths
from maxtext.input_pipeline.formats.example_file import ExampleFile
from maxtext.input_pipeline.formats.interface import GZIP, BadFile, OpenFile

HEADER = struct.Struct("<QI")
CHECKSUM = struct.Struct("<I")
FRAME = HEADER.size + CHECKSUM.size
VERIFIED_AT_ONCE = 2**16


class TfRecords(ExampleFile):
    blocks = None

    def __init__(self, path: str, columns: Sequence[str], caches: Caches):
        self.offsets = walk(path)
        super().__init__(path, columns, caches, len(self.offsets) - 1)

    def read(self, index: int) -> bytes:
        start, end = int(self.offsets[index]), int(self.offsets[index + 1])
        file = self.caches.files.get(self.path, lambda: OpenFile(self.path))
        framed = file.read(start + HEADER.size, end)
        data, (checksum,) = framed[: -CHECKSUM.size], CHECKSUM.unpack(framed[-CHECKSUM.size :])
        if masked(crc32c(data)) != checksum:
            raise ValueError("the checksum of its data is wrong")
        return data

    @property
    def sizes(self) -> np.ndarray:
        return np.diff(self.offsets) - np.asarray(FRAME, self.offsets.dtype)


def walk(path: str) -> np.ndarray:
    """The offset of each record and of the end of the file. Raises BadFile if it is damaged."""
    size = os.path.getsize(path)
    kind = np.uint32 if size < 2**32 else np.uint64
    parts, offset, count = [], 0, 0
    with open(path, "rb") as file:
        if file.read(len(GZIP)) == GZIP:
            raise BadFile(
                "is compressed, so its records cannot be read one by one: decompress it with gunzip"
            )
        # An empty file cannot be mapped.
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else None
    while mapped is not None and offset < size:
        begins, lengths, checksums = array("Q"), array("Q"), array("I")
        while offset + HEADER.size <= size and len(begins) < VERIFIED_AT_ONCE:
            length, checksum = HEADER.unpack_from(mapped, offset)
            begins.append(offset)
            lengths.append(length)
            checksums.append(checksum)
            offset += length + FRAME
        wrong = np.flatnonzero(
            masked_of_lengths(np.array(lengths, np.uint64)) != np.array(checksums, np.uint32)
        )
        if len(wrong) and count + wrong[0] == 0:
            raise BadFile("is not a TFRecord file (the checksum of its first length is wrong)")
        if len(wrong):
            raise BadFile(
                f"is damaged at record {count + wrong[0]}, whose length has a wrong checksum: copy "
                "it again"
            )
        if offset > size or not begins:
            raise BadFile(f"ends within record {count + max(len(begins) - 1, 0)}: copy it again")
        parts.append(np.array(begins, kind))
        count += len(begins)
    return np.concatenate([*parts, np.array([size], kind)])
