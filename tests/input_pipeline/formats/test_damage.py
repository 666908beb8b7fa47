"""A flipped bit is detected, or the record is unchanged: no other error and no crash."""

import struct

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from maxtext.common.crc32c import masked_crc32c
from maxtext.common.errors import ConfigError
from maxtext.input_pipeline.formats import BadRecord, open_files
from tests.input_pipeline.formats.writers import (
    WRITERS,
    framed,
    make_records,
    table,
    write_tfrecord,
)

# Those whose every byte of data is under a checksum; what has none may change a letter without
# being noticed.
VERIFIED = {"tfrecord", "array_record", "groups.array_record", "jsonl.gz"}
FLIPS = 60


@pytest.mark.parametrize("name", WRITERS)
def test_flipped_bits(tmp_path, name):
    kind, write, _ = WRITERS[name]
    path = tmp_path / "a"
    write(path, make_records(35))
    data, random = path.read_bytes(), np.random.default_rng(7)
    noticed = 0
    used = np.flatnonzero(
        np.frombuffer(data, np.uint8)
    )  # ArrayRecord files are mostly zeros to fill up blocks
    for offset, bit in zip(random.choice(used, FLIPS), random.integers(0, 8, FLIPS), strict=True):
        changed = bytearray(data)
        changed[offset] ^= 1 << int(bit)
        path.write_bytes(changed)
        try:
            documents = open_files([str(path)], kind, ["text", "tokens"], threads=1)
        except ConfigError:
            noticed += 1
            continue
        for index in range(min(len(documents), 35)):
            try:
                record = documents[index]
            except BadRecord:
                noticed += 1
                continue
            if name in VERIFIED:
                expected = make_records(1, index)[0]
                assert record["text"] == expected["text"]
                assert list(record["tokens"]) == expected["tokens"]
    assert noticed > FLIPS / 10


def test_a_damaged_record_between_good_ones(tmp_path):
    path = tmp_path / "a.tfrecord"
    write_tfrecord(path, make_records(5))
    data = bytearray(path.read_bytes())
    data[data.index(b"document 2")] ^= 1
    path.write_bytes(data)
    documents = open_files([str(path)], "tfrecord", ["text"], threads=1)
    with pytest.raises(BadRecord, match="a.tfrecord, record 2: the checksum of its data is wrong"):
        documents[2]
    assert [documents[index]["text"] for index in (1, 3)] == [
        make_records(5)[index]["text"] for index in (1, 3)
    ]


def test_tfrecord_lengths(tmp_path):
    path = tmp_path / "a"
    frames = [framed(bytes([number]) * 20) for number in range(4)]
    data = b"".join(frames)

    def said(data):
        path.write_bytes(data)
        with pytest.raises(ConfigError) as raised:
            open_files([str(path)], "tfrecord", ["text"], threads=1)
        return str(raised.value).removeprefix(f"{path} ")

    assert said(data[:-1]) == said(data[:-30]) == "ends within record 3: copy it again"
    assert said(data[: 3 * len(frames[0]) + 5]) == "ends within record 3: copy it again"
    broken = bytearray(data)
    broken[2 * len(frames[0])] ^= 1
    assert (
        said(broken) == "is damaged at record 2, whose length has a wrong checksum: copy it again"
    )
    assert said(bytes(1000)).startswith("is not a TFRecord file")
    assert said(b"\x1f\x8b" + data).startswith(
        "is compressed, so its records cannot be read one by one"
    )
    # The frames are whole, but what is in them is no Example.
    assert said(data).startswith("has no tf.train.Example in its first records (record 0: ")


def unmasked(checksum: int) -> int:
    rotated = (checksum - 0xA282EAD8) & 0xFFFFFFFF
    return (rotated << 15 | rotated >> 17) & 0xFFFFFFFF


def test_tfrecord_checksums_are_those_of_the_standard():
    """RFC 3720, B.4, has CRC-32C of 32 zeros and of 32 ones."""
    assert unmasked(masked_crc32c(bytes(32))) == 0x8A9136AA
    assert unmasked(masked_crc32c(b"\xff" * 32)) == 0x62A8AB43
    assert unmasked(masked_crc32c(b"123456789")) == 0xE3069283
    data = np.random.default_rng(0).bytes(1500)
    for size in (0, 1, 2, 3, 4, 5, 511, 512, 513, 516, 1500):
        assert framed(data[:size])[-4:] == struct.pack("<I", masked_crc32c(data[:size]))


def test_a_damaged_row_group_is_decoded_once(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    plain = dict(
        compression="none", use_dictionary=False, write_statistics=False
    )  # so that the text is there once
    parquet.write_table(
        table(make_records(21)), path, row_group_size=7, write_page_checksum=True, **plain
    )
    data = bytearray(path.read_bytes())
    data[data.index(b"document 9")] ^= 1
    path.write_bytes(data)
    documents = open_files([str(path)], "parquet", ["text"], threads=1)
    decoded = []
    load = documents.files[0].load
    monkeypatch.setattr(
        documents.files[0], "load", lambda number: decoded.append(number) or load(number)
    )
    for index in range(21):
        if 7 <= index < 14:
            with pytest.raises(
                BadRecord, match=f"a.parquet, row {index}: its block of rows is damaged"
            ):
                documents[index]
        else:
            assert documents[index] == {"text": make_records(21)[index]["text"]}
    assert decoded == [0, 1, 2]


def test_uneven_blocks(tmp_path):
    path = str(tmp_path / "a")
    records = table(make_records(9))
    with pyarrow.OSFile(path, "wb") as sink, pyarrow.ipc.new_stream(sink, records.schema) as writer:
        for start, count in ((0, 3), (3, 0), (3, 5), (8, 1)):
            writer.write_batch(
                records.slice(start, count).combine_chunks().to_batches()[0]
                if count
                else empty(records)
            )
    documents = open_files([path], "arrow", ["text"], threads=1)
    assert documents.blocks.tolist() == [3, 0, 5, 1]
    assert [record["text"] for record in documents] == [
        record["text"] for record in make_records(9)
    ]


def empty(records):
    return pyarrow.RecordBatch.from_pylist([], schema=records.schema)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_values_of_tables(tmp_path, kind):
    values = pyarrow.StringArray.from_buffers(
        3, pyarrow.py_buffer(np.array([0, 1, 3, 4], np.int32)), pyarrow.py_buffer(b"a\xff\xfeb")
    )
    mixed = pyarrow.table(
        {
            "text": values,
            "chat": [[{"role": "user", "content": "hi"}], [], None],
            "tokens": pyarrow.array([[1, 2], None, []], pyarrow.large_list(pyarrow.uint16())),
            "words": pyarrow.array(["x", "y", "x"]).dictionary_encode(),
        }
    )
    path = str(tmp_path / "a")
    if kind == "parquet":
        parquet.write_table(mixed, path)
    else:
        with (
            pyarrow.OSFile(path, "wb") as sink,
            pyarrow.ipc.new_stream(sink, mixed.schema) as writer,
        ):
            writer.write_table(mixed)
    text = open_files([path], kind, ["text", "words"], threads=1)
    assert [text[0], text[2]] == [{"text": "a", "words": "x"}, {"text": "b", "words": "x"}]
    with pytest.raises(BadRecord, match="row 1: the column 'text' .*(UTF-8|UTF8)"):
        text[1]
    chat = open_files([path], kind, ["chat"], threads=1)
    assert [chat[0]["chat"], chat[1]["chat"]] == [[{"role": "user", "content": "hi"}], []]
    with pytest.raises(BadRecord, match="the column 'chat' is null"):
        chat[2]
    tokens = open_files([path], kind, ["tokens"], threads=1)
    assert tokens[0]["tokens"].dtype == np.uint16
    assert [tokens[0]["tokens"].tolist(), tokens[2]["tokens"].tolist()] == [[1, 2], []]
