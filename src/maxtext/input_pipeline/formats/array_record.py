"""kind=arrayrecord: ArrayRecord files through the package array_record, which verifies the
checksums.

Files written with group_size above 1 are decompressed one group at a time: a group is a block.
"""

import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxtext.input_pipeline.formats.cache import Caches
from maxtext.input_pipeline.formats.example_file import ExampleFile
from maxtext.input_pipeline.formats.interface import BadFile, missing_file_error

# For random access
OPTIONS = dict(options="readahead_buffer_size:0", file_reader_buffer_size=2**15)


class ArrayRecords(ExampleFile):
    sizes = None

    def __init__(self, path: str, columns: Sequence[str], caches: Caches):
        os.path.getsize(path)  # raises OSError if the file is missing
        reader = open_reader(path)
        if not reader.ok():
            raise BadFile("is not an ArrayRecord file, or is damaged")
        group = re.search(r"group_size:(\d+)", reader.writer_options_string() or "")
        self.group = max(int(group[1]), 1) if group else 1
        super().__init__(path, columns, caches, reader.num_records())

    def read(self, index: int) -> bytes:
        if self.group == 1:
            return self.read_range(index, index + 1)[0]
        first = index // self.group * self.group
        last = min(first + self.group, self.count)
        group = self.caches.blocks.get(
            (self.path, first), lambda: Group(self.read_range(first, last))
        )
        return group.records[index - first]

    def read_range(self, first: int, last: int) -> list[bytes]:
        try:
            reader = self.caches.files.get(self.path, lambda: open_reader(self.path))
            return reader.read(list(range(first, last)))
        except RuntimeError as error:
            if not os.access(self.path, os.R_OK):
                raise missing_file_error(
                    self.path, FileNotFoundError("it is not there or not readable")
                ) from error
            reason = re.split(r"[(;,]", str(error))[0].strip()
            raise ValueError(f"its data is damaged ({reason})") from error

    @property
    def blocks(self) -> np.ndarray | None:
        if self.group == 1:
            return None
        return np.diff(np.append(np.arange(0, self.count, self.group), self.count))


class Group:
    def __init__(self, records: list[bytes]):
        self.records, self.nbytes = records, sum(map(len, records))


def open_reader(path: str) -> Any:
    from array_record.python.array_record_module import ArrayRecordReader

    return ArrayRecordReader(path, **OPTIONS)
