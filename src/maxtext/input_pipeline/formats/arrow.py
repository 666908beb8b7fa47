"""kind=arrow: Arrow IPC files and streams (what `save_to_disk` of the package datasets writes),
mapped into memory.

A record batch is a block. Nothing is decoded, but a batch is validated once before its rows are
used, since the format has no checksums and a damaged offset would point anywhere.
"""

import os
from collections.abc import Sequence
from typing import Any

from maxtext.common.extras import require
from maxtext.input_pipeline.formats.cache import Caches
from maxtext.input_pipeline.formats.interface import (
    BadFile,
    Record,
    missing_file_error,
    shrunk_file_error,
)
from maxtext.input_pipeline.formats.tables import RowBlock, TableFile, damaged_block, first_line

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
        self.walked: list[Any] | None = list(self.reader) if is_stream else None

    def __len__(self) -> int:
        return self.reader.num_record_batches if self.walked is None else len(self.walked)

    def read(self, number: int) -> Any:
        return self.reader.get_batch(number) if self.walked is None else self.walked[number]
