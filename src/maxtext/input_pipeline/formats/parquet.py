"""kind=parquet: a row group is decoded at once, the wanted columns only, and cached.

Checksums of pages are verified if the file has them. A page that cannot be decoded makes the rows
of its row group bad records.
"""

from collections.abc import Sequence
from typing import Any

from maxtext.common.extras import require
from maxtext.input_pipeline.formats.cache import Caches
from maxtext.input_pipeline.formats.interface import BadFile, missing_file_error
from maxtext.input_pipeline.formats.tables import RowBlock, TableFile, damaged_block, first_line


class ParquetRows(TableFile):
    def __init__(self, path: str, columns: Sequence[str], caches: Caches):
        pyarrow, parquet = (
            require("pyarrow", "reading parquet"),
            require("pyarrow.parquet", "reading parquet"),
        )
        try:
            with parquet.ParquetFile(path) as file:
                metadata, names = file.metadata, file.schema_arrow.names
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            if isinstance(error, OSError) and error.errno is not None:  # not about the contents
                raise
            raise BadFile(f"is not a parquet file, or is damaged ({first_line(error)})") from error
        counts = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        super().__init__(path, columns, caches, names, counts)
        self.decoded = decoded_bytes(metadata, self.read_columns)

    def load(self, number: int) -> RowBlock:
        pyarrow, parquet = (
            require("pyarrow", "reading parquet"),
            require("pyarrow.parquet", "reading parquet"),
        )
        try:
            # The parsed footer is shared, the reader is not: it is not documented as thread-safe.
            metadata = self.caches.files.get(self.path, lambda: parquet.read_metadata(self.path))
            with parquet.ParquetFile(
                self.path, metadata=metadata, page_checksum_verification=True
            ) as file:
                table = file.read_row_group(number, columns=self.read_columns, use_threads=False)
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise missing_file_error(self.path, error) from error
            return damaged_block(error)
        return RowBlock({name: table.column(name) for name in self.read_columns})


def decoded_bytes(metadata: Any, names: Sequence[str]) -> int:
    """The decoded size of the columns of these names, from the footer."""
    column_indices = [
        at
        for at in range(metadata.num_columns)
        if metadata.schema.column(at).path.split(".")[0] in names
    ]
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    return sum(
        group.column(at).total_uncompressed_size for group in groups for at in column_indices
    )
