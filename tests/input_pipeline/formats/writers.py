"""The same records written in every format, by the libraries themselves or byte by byte from the
specification.
"""

import gzip
import json
import struct

import pyarrow
from array_record.python.array_record_module import ArrayRecordWriter
from pyarrow import ipc, parquet

from maxtext.input_pipeline.formats import encode_example


def checksum(data: bytes) -> int:
    """Masked CRC-32C, bit by bit."""
    state = 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = (state >> 1) ^ (0x82F63B78 if state & 1 else 0)
    state ^= 0xFFFFFFFF
    return ((state >> 15 | state << 17) + 0xA282EAD8) & 0xFFFFFFFF


def framed(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", checksum(length)) + data + struct.pack("<I", checksum(data))


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_jsonl_gz(path, records):
    path.write_bytes(
        gzip.compress("".join(json.dumps(record) + "\n" for record in records).encode())
    )


def write_parquet(path, records):
    parquet.write_table(table(records), path, row_group_size=7, write_page_checksum=True)


def write_arrow_stream(path, records):
    with (
        pyarrow.OSFile(str(path), "wb") as sink,
        ipc.new_stream(sink, table(records).schema) as writer,
    ):
        writer.write_table(table(records), max_chunksize=7)


def write_arrow_file(path, records):
    with (
        pyarrow.OSFile(str(path), "wb") as sink,
        ipc.new_file(sink, table(records).schema) as writer,
    ):
        writer.write_table(table(records), max_chunksize=7)


def write_tfrecord(path, records):
    path.write_bytes(b"".join(framed(encode_example(record)) for record in records))


def write_array_record(path, records, group=1):
    writer = ArrayRecordWriter(str(path), f"group_size:{group}")
    for record in records:
        writer.write(encode_example(record))
    writer.close()


def write_array_record_groups(path, records):
    write_array_record(path, records, group=7)


def table(records):
    schema = [
        ("text", pyarrow.string()),
        ("tokens", pyarrow.list_(pyarrow.int32())),
        ("score", pyarrow.float32()),
    ]
    return pyarrow.Table.from_pylist(records, pyarrow.schema(schema))


# name -> kind, writer, records in each block
WRITERS = {
    "jsonl": ("jsonl", write_jsonl, None),
    "jsonl.gz": ("jsonl", write_jsonl_gz, 100),
    "parquet": ("parquet", write_parquet, 7),
    "stream.arrow": ("arrow", write_arrow_stream, 7),
    "file.arrow": ("arrow", write_arrow_file, 7),
    "tfrecord": ("tfrecord", write_tfrecord, None),
    "array_record": ("arrayrecord", write_array_record, None),
    "groups.array_record": ("arrayrecord", write_array_record_groups, 7),
}


def make_records(count, first=0):
    return [
        {
            "text": f"document {n} “ß” " + "x" * (n % 13),
            "tokens": list(range(n, n + n % 5 + 1)),
            "score": n / 2,
        }
        for n in range(first, first + count)
    ]
