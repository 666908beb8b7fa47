"""File formats as records by number, whatever the format: `open_files` gives the records of many
files as one sequence.

files: which files a key names · documents: many files as one sequence · interface: what a format
is, and a bad record · text, jsonl (lines), parquet and arrow (tables), tfrecord (crc32c) and
array_record (example_file): one format each · example: tf.train.Example as bytes and back · cache:
open files and decoded blocks.
"""

from maxtext.input_pipeline.formats.documents import KINDS, Documents, open_files
from maxtext.input_pipeline.formats.example import decode_example, encode_example
from maxtext.input_pipeline.formats.files import find_files, kind_of
from maxtext.input_pipeline.formats.interface import BadRecord, Record, RecordSource

__all__ = [
    "KINDS",
    "BadRecord",
    "Documents",
    "Record",
    "RecordSource",
    "decode_example",
    "encode_example",
    "find_files",
    "kind_of",
    "open_files",
]
