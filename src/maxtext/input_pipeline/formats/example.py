"""tf.train.Example without TensorFlow: the message is described here, protobuf reads and writes it.

A feature is a list of bytes, of floats or of integers. Numbers become arrays. A single value of
bytes stays alone, more of them are a list. A column that is asked for by name is text, so its bytes
have to be UTF-8.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from maxtext.input_pipeline.formats.interface import Record, select_columns

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


def text_of(name: str, value: Any) -> Any:
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
