"""kind=tfrecord: TFRecord files without TensorFlow.

A record is its length (8 bytes), the checksum of the length, the data, and the checksum of the
data. All lengths are read and their checksums verified when a file is opened, so that a truncated
file, or one of another kind, is detected before training. The checksum of the data is verified when
a record is read.
"""

import mmap
import os
import struct
from array import array
from collections.abc import Sequence

import numpy as np

from maxtext.common.crc32c import masked_crc32c
from maxtext.input_pipeline.formats.cache import Caches
from maxtext.input_pipeline.formats.example_file import ExampleFile
from maxtext.input_pipeline.formats.interface import GZIP, BadFile, OpenFile

HEADER = struct.Struct("<8sI")  # the length, and its checksum
CHECKSUM = struct.Struct("<I")
FRAME = HEADER.size + CHECKSUM.size


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
        if masked_crc32c(data) != checksum:
            raise ValueError("the checksum of its data is wrong")
        return data

    @property
    def sizes(self) -> np.ndarray:
        return np.diff(self.offsets) - np.asarray(FRAME, self.offsets.dtype)


def walk(path: str) -> np.ndarray:
    """The offset of each record and of the end of the file. Raises BadFile if it is damaged."""
    size = os.path.getsize(path)
    begins, offset = array("I" if size < 2**32 else "Q"), 0
    with open(path, "rb") as file:
        if file.read(len(GZIP)) == GZIP:
            raise BadFile(
                "is compressed, so its records cannot be read one by one: decompress it with gunzip"
            )
        # An empty file cannot be mapped.
        mapped: mmap.mmap | bytes = b""
        if size:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    while offset < size:
        if offset + HEADER.size > size:
            raise BadFile(f"ends within record {len(begins)}: copy it again")
        length, checksum = HEADER.unpack_from(mapped, offset)
        if masked_crc32c(length) != checksum:
            if not begins:
                raise BadFile("is not a TFRecord file (the checksum of its first length is wrong)")
            raise BadFile(
                f"is damaged at record {len(begins)}, whose length has a wrong checksum: copy it "
                "again"
            )
        begins.append(offset)
        offset += int.from_bytes(length, "little") + FRAME
    if offset > size:
        raise BadFile(f"ends within record {len(begins) - 1}: copy it again")
    begins.append(size)
    return np.frombuffer(begins, begins.typecode)
