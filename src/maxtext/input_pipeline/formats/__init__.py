"""File formats as random-access records: `open_files` opens many files as one sequence of records.

- files: the files that a key names; documents: many files as one sequence
- interface: RecordSource and BadRecord; cache: open files and decoded blocks
- text, jsonl (lines), parquet and arrow (tables), tfrecord, array_record (example_file)
- example: encodes and decodes tf.train.Example
"""

from maxtext.input_pipeline.formats.documents import KINDS, Documents, open_files
from maxtext.input_pipeline.formats.example import decode_example, encode_example
from maxtext.input_pipeline.formats.files import find_files, kind_of
from maxtext.input_pipeline.formats.interface import (
    BadRecord,
    Record,
    RecordSource,
    UnusableRecord,
)

__all__ = [
    "KINDS",
    "BadRecord",
    "Documents",
    "Record",
    "RecordSource",
    "UnusableRecord",
    "decode_example",
    "encode_example",
    "find_files",
    "kind_of",
    "open_files",
]
