"""JSON lines: records, and bad records by line number."""

import gzip
import json
import tracemalloc

import numpy as np
import pytest

from maxtext.common.errors import ConfigError
from maxtext.input_pipeline.formats import BadRecord, jsonl, open_files
from maxtext.input_pipeline.formats.files import index_lines


def opened(path, data, columns=("text",)):
    path.write_bytes(data)
    return open_files([str(path)], "jsonl", columns, threads=1)


def split_blocks(data, size):
    return [data[start : start + size] for start in range(0, len(data), size)]


def random_lines(seed):
    """Lines of letters and white space; ends of both kinds, with or without one at the end."""
    random = np.random.default_rng(seed)
    kinds = [b"", b"", b"a", b"{bc}", b" ", b"\t \r", b"  d", b"e" * 40]
    lines = [kinds[one] for one in random.integers(0, len(kinds), random.integers(0, 30))]
    ends = [[b"\n", b"\r\n"][one] for one in random.integers(0, 2, len(lines))]
    data = b"".join(line + end for line, end in zip(lines, ends, strict=True))
    return data.rstrip(b"\r\n") if seed % 2 else data


@pytest.mark.parametrize("seed", range(60))
def test_lines_match_python_splitlines(seed):
    data = random_lines(seed)
    expected = [(number, line) for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    for size in (1, 2, 3, 7, 1000):
        lines = index_lines(split_blocks(data, size), head=2)
        stripped = [
            data[lines.offsets[index] : lines.offsets[index + 1]].strip()
            for index in range(len(lines))
        ]
        assert stripped == [line.strip() for _, line in expected]
        assert [lines.number(index) for index in range(len(lines))] == [
            number for number, _ in expected
        ]
        assert [line.strip() for line in lines.head] == stripped[:2]


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_record_per_line(tmp_path, compress):
    data = (
        b'\xef\xbb\xbf{"text": "a", "n": 1}\r\n\n \t\n{"text": "\\u00df\\n"}\n  {"text": "", '
        b'"n": null}\n\n{"text":"z"}'
    )
    documents = opened(tmp_path / "a", compress(data))
    assert [record["text"] for record in documents] == ["a", "ß\n", "", "z"]
    assert [documents.where(index)[1] for index in range(4)] == [
        "line 1",
        "line 4",
        "line 5",
        "line 7",
    ]
    assert documents.columns() == ["text", "n"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a"', r"invalid JSON \(Expecting ',' delimiter at character 12 of the line\)"),
        (b'{"text": "a\xff"}', "invalid UTF-8 at byte 11 of the line"),
        (b'{"text": "a\xed\xa0\x80"}', "invalid UTF-8"),
        (b"[1, 2]", "a list instead of a JSON object with columns"),
        (b"null", "a NoneType instead of a JSON object"),
        (b'{"words": "a"}', "the column 'text' is missing"),
        (b'{"text": null}', "the column 'text' is null"),
        (b"\x00\x00\x00", "invalid JSON"),
        (b"[" * 100_000, "invalid JSON"),
        (b'{"text": ' + b"1" * 5000 + b"}", "invalid JSON"),
    ],
)
@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_bad_records(tmp_path, line, reason, compress):
    good = b'{"text": "good"}\n'
    documents = opened(tmp_path / "a.jsonl", compress(good + b"\n" + line + b"\n" + good))
    with pytest.raises(BadRecord, match=f"^{tmp_path}/a.jsonl, line 3: {reason}"):
        documents[1]
    assert [documents[index]["text"] for index in (0, 2)] == ["good", "good"]


def test_bad_first_record_does_not_make_a_bad_file(tmp_path):
    documents = opened(tmp_path / "a", b'{"tex\n{"text": "b"}\n')
    assert documents[1] == {"text": "b"}
    for data, reason in {
        b'"a"\n': "line 1: a str instead",
        b"[1]\n": "record 0: a int instead",
    }.items():
        with pytest.raises(ConfigError, match=rf"a is not a file of JSON lines \({reason}"):
            opened(tmp_path / "a", data)
    with pytest.raises(ConfigError, match="cannot be decompressed"):
        opened(tmp_path / "a", gzip.compress(b'{"text": "a"}\n' * 99)[:-3])


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_of_rows_is_read_as_lines_are(tmp_path, compress, indent):
    rows = [{"text": "ß\n“"}, {"text": "b"}, {"text": None}]
    documents = opened(tmp_path / "a.json", compress(json.dumps(rows, indent=indent).encode()))
    assert [documents[index] for index in (1, 0)] == [rows[1], rows[0]]
    assert documents.blocks.tolist() == [3]
    with pytest.raises(BadRecord, match="a.json, record 2: the column 'text' is null"):
        documents[2]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'[{"text": "a"},\n {"text"}]', "is none .* at line 2, column 9"),
        (b'{"rows": [{"text": "a"}],\n "version": 1}', "is one JSON object, not rows"),
        (b'{\n "text": "a"\n}', "is one JSON object, not rows"),
    ],
)
def test_json_that_is_no_rows(tmp_path, data, reason):
    with pytest.raises(ConfigError, match=reason):
        opened(tmp_path / "a.json", data)


def test_plain_and_compressed_files_together(tmp_path):
    (tmp_path / "a").write_bytes(b'{"text": "a"}\n' * 3)
    (tmp_path / "b").write_bytes(gzip.compress(b'{"text": "b"}\n' * 4))
    documents = open_files([str(tmp_path / "a"), str(tmp_path / "b")], "jsonl", ["text"], threads=1)
    assert documents.blocks.tolist() == [1, 1, 1, 4]
    assert documents.sizes.tolist() == [14] * 7


def test_line_index_is_small(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "CHUNK", 2**16)
    line = json.dumps({"text": "x" * 20}).encode() + b"\n"
    (tmp_path / "a").write_bytes(line * 100_000)
    tracemalloc.start()
    documents = open_files([str(tmp_path / "a")], "jsonl", ["text"], threads=1)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(documents) == 100_000
    assert held < 5 * 100_000  # 4 bytes a record
    assert peak < 30 * 100_000
