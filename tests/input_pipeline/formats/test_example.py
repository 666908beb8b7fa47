"""tf.train.Example against bytes written by hand from the specification of protobuf."""

import numpy as np
import pytest

from maxtext.input_pipeline.formats import decode_example, encode_example


def field(number, data):
    """A field of bytes: its tag, its length, the data."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value):
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def example(**features):
    entries = [
        field(1, field(1, name.encode()) + field(2, feature)) for name, feature in features.items()
    ]
    return field(1, b"".join(entries))


def bytes_list(*values):
    return field(1, b"".join(field(1, value) for value in values))


def float_list(*values):
    return field(2, field(1, np.array(values, "<f4").tobytes()))


def int64_list(*values):
    return field(3, field(1, b"".join(varint(value % 2**64) for value in values)))


def test_decode():
    data = example(
        text=bytes_list("ß".encode()),
        words=bytes_list(b"a", b"b"),
        tokens=int64_list(0, 127, 128, 300, -1, 2**63 - 1),
        score=float_list(0.5, -2),
        empty=b"",
        none=int64_list(),
    )
    record = decode_example(data)
    assert record["text"] == "ß".encode()
    assert record["words"] == [b"a", b"b"]
    assert record["tokens"].tolist() == [0, 127, 128, 300, -1, 2**63 - 1]
    assert record["tokens"].dtype == np.int64
    assert record["score"].tolist() == [0.5, -2]
    assert record["score"].dtype == np.float32
    assert record["empty"] is None
    assert record["none"].shape == (0,)
    wanted = decode_example(data, ["words", "text"])
    assert wanted == {"words": ["a", "b"], "text": "ß"}
    with pytest.raises(ValueError, match="the column 'content' is missing"):
        decode_example(data, ["text", "content"])
    with pytest.raises(ValueError, match="the column 'empty' is null"):
        decode_example(data, ["empty"])


def test_decodes_unpacked_integers():
    """The older encoding: each number with its tag."""
    unpacked_values = field(3, b"".join(varint(1 << 3) + varint(value) for value in (5, 600)))
    assert decode_example(example(tokens=unpacked_values), ["tokens"])["tokens"].tolist() == [
        5,
        600,
    ]


@pytest.mark.parametrize("data", [b"once upon a time", b"\xff" * 9, field(1, b"\x0a\xff")])
def test_rejects_bytes_that_are_not_an_example(data):
    with pytest.raises(ValueError, match=r"not a tf\.train\.Example"):
        decode_example(data, ["text"])


def test_invalid_text():
    with pytest.raises(ValueError, match="the column 'text' has invalid UTF-8 at byte 1"):
        decode_example(example(text=bytes_list(b"a\xff")), ["text"])
    assert decode_example(example(text=bytes_list(b"a\xff")))["text"] == b"a\xff"


def test_encode():
    assert encode_example({"text": "ß"}) == example(text=bytes_list("ß".encode()))
    assert encode_example({"a": [b"x", "y"], "b": np.array([1, -1], np.int16)}) == example(
        a=bytes_list(b"x", b"y"), b=int64_list(1, -1)
    )
    assert encode_example({"a": 0.5, "b": True}) == example(a=float_list(0.5), b=int64_list(1))
    with pytest.raises(ValueError, match="'a' is neither text nor a list of numbers"):
        encode_example({"a": [[1, 2], [3, 4]]})
    with pytest.raises(ValueError, match="'a' is neither"):
        encode_example({"a": None})
