"""tf.train.Example without TensorFlow, and the files of such records: TFRecord and ArrayRecord.

`decode_example` and `encode_example` describe the message here; protobuf reads and writes it. A
feature is a list of bytes, of floats or of integers. Numbers become arrays. A single value of bytes
stays alone, more of them are a list. A column that is asked for by name is text, so its bytes have
to be UTF-8.

`TfRecords` (kind=tfrecord) reads TFRecord files without TensorFlow. A record is its length (8
bytes), the checksum of the length, the data, and the checksum of the data. All lengths are read and
their checksums verified when a file is opened, so that a truncated file, or one of another kind, is
detected before training. The checksum of the data is verified when a record is read.

`ArrayRecords` (kind=arrayrecord) reads ArrayRecord files through the package array_record, which
verifies the checksums. Files written with group_size above 1 are decompressed one group at a time:
a group is a block.
"""

import mmap
import os
import re
import struct
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from maxtext.common.crc32c import masked_crc32c
from maxtext.input_pipeline.formats.interface import (
    GZIP,
    HEAD,
    BadFile,
    BadRecord,
    Caches,
    OpenFile,
    Record,
    check_index,
    missing_file_error,
    select_columns,
)

# a name of our own: TensorFlow may be in the same process with its description
PACKAGE = "maxtext.example"


@cache
def example_class() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="maxtext/example.proto", package=PACKAGE, syntax="proto3"
    )

    def add(
        message: Any, name: str, number: int, kind: int, repeated: bool = False, of: str = ""
    ) -> Any:
        label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
        return message.field.add(
            name=name,
            number=number,
            type=kind,
            label=label,
            type_name=f".{PACKAGE}.{of}" if of else None,
        )

    lists = {
        "BytesList": kinds.TYPE_BYTES,
        "FloatList": kinds.TYPE_FLOAT,
        "Int64List": kinds.TYPE_INT64,
    }
    for name, kind in lists.items():
        add(file.message_type.add(name=name), "value", 1, kind, repeated=True)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, name in enumerate(("bytes_list", "float_list", "int64_list"), 1):
        add(feature, name, number, kinds.TYPE_MESSAGE, of=list(lists)[number - 1]).oneof_index = 0
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    add(entry, "key", 1, kinds.TYPE_STRING)
    add(entry, "value", 2, kinds.TYPE_MESSAGE, of="Feature")
    add(features, "feature", 1, kinds.TYPE_MESSAGE, repeated=True, of="Features.FeatureEntry")
    add(file.message_type.add(name="Example"), "features", 1, kinds.TYPE_MESSAGE, of="Features")

    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.Example"))


def decode_example(data: bytes, columns: Sequence[str] = ()) -> Record:
    """The features of an Example, or the wanted columns as text and numbers. ValueError says why
    there are none.
    """
    from google.protobuf.message import DecodeError

    try:
        feature = example_class().FromString(data).features.feature
    except DecodeError as error:
        raise ValueError("its data is not a tf.train.Example") from error
    if not columns:
        return {name: values_of(feature[name]) for name in feature}
    return select_columns(
        {name: text_of(name, values_of(feature[name])) for name in columns if name in feature},
        columns,
    )


def values_of(feature: Any) -> Any:
    kind = feature.WhichOneof("kind")
    if kind == "int64_list":
        return np.array(feature.int64_list.value, np.int64)
    if kind == "float_list":
        return np.array(feature.float_list.value, np.float32)
    values = list(feature.bytes_list.value)
    if len(values) > 1:
        return values
    return values[0] if values else None


def text_of(name: str, value: object) -> Any:
    try:
        if isinstance(value, list):
            return [one.decode() for one in value]
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError as error:
        raise ValueError(f"the column {name!r} has invalid UTF-8 at byte {error.start}") from error


def encode_example(record: Record) -> bytes:
    """The Example of a record: text and bytes, numbers, or lists and arrays of one of them."""
    example = example_class()()
    for name, value in record.items():
        feature = example.features.feature[name]
        values = value if isinstance(value, list | tuple | np.ndarray) else [value]
        if all(isinstance(one, str | bytes) for one in values) and not isinstance(
            values, np.ndarray
        ):
            feature.bytes_list.value.extend(
                one.encode() if isinstance(one, str) else one for one in values
            )
            continue
        numbers = np.asarray(values)
        if numbers.ndim != 1 or numbers.dtype.kind not in "biuf":
            raise ValueError(f"the column {name!r} is neither text nor a list of numbers")
        if numbers.dtype.kind == "f":
            feature.float_list.value.extend(numbers.tolist())
        else:
            integers = numbers.astype(np.int64) if numbers.dtype.kind == "b" else numbers
            feature.int64_list.value.extend(integers.tolist())
    return example.SerializeToString(deterministic=True)


class ExampleFile(ABC):
    def __init__(self, path: str, columns: Sequence[str], caches: Caches, count: int):
        self.path = path
        self.wanted = tuple(columns)
        self.caches = caches
        self.count = count
        self.nbytes = self.decoded = os.path.getsize(path)
        self.names = self.peek_columns()

    @abstractmethod
    def read(self, index: int) -> bytes:
        """The bytes of a record. Raises ValueError if they are damaged."""

    def peek_columns(self) -> list[str]:
        """The columns of the first records that can be read."""
        names: dict[str, None] = {}
        reasons = []
        head = min(HEAD, self.count)
        for index in range(head):
            try:
                names.update(dict.fromkeys(sorted(decode_example(self.read(index)))))
            except ValueError as error:
                reasons.append(str(error))
        if reasons and len(reasons) == head:
            raise BadFile(f"has no tf.train.Example in its first records (record 0: {reasons[0]})")
        return list(names)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Record:
        check_index(index, self.count)
        try:
            return decode_example(self.read(index), self.wanted)
        except ValueError as error:
            raise BadRecord(*self.where(index), str(error)) from error

    def where(self, index: int) -> tuple[str, str]:
        return self.path, f"record {index}"

    def columns(self) -> list[str]:
        return self.names


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
