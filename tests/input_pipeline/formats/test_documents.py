"""Every format gives the same records: in order, from many threads, in another process; and
reports damaged files.
"""

import multiprocessing
import os
import pickle
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from maxtext.common import extras
from maxtext.common.errors import ConfigError, MissingExtra, UserError
from maxtext.input_pipeline.formats import BadRecord, interface, kind_of, open_files
from maxtext.input_pipeline.formats.interface import Cache
from tests.input_pipeline.formats.writers import WRITERS, make_records


def check(record, expected):
    assert record["text"] == expected["text"]
    np.testing.assert_array_equal(record["tokens"], expected["tokens"])
    assert np.asarray(record["tokens"]).dtype.kind == "i"


def test_records_in_order(written):
    paths, kind, records, block = written
    documents = open_files(paths, kind, ["text", "tokens"], threads=3)
    assert len(documents) == len(records) == 35
    for record, expected in zip(documents, records, strict=True):
        check(record, expected)
        assert set(record) == {"text", "tokens"}
    assert set(documents.columns()) == {"text", "tokens", "score"}
    assert documents.nbytes == sum(os.path.getsize(path) for path in paths)
    if block is None:
        assert documents.blocks is None
    else:  # no block reaches into the next file
        first, second = ([block] * (count // block) + [count % block] for count in (20, 15))
        assert documents.blocks.tolist() == first + second
    if documents.sizes is not None:
        assert len(documents.sizes) == 35
        assert 0.5 * documents.nbytes < documents.sizes.sum() or paths[0].endswith(".gz")
    assert documents.where(20)[0] == paths[2]
    with pytest.raises(IndexError):
        documents[35]
    with pytest.raises(IndexError):
        documents[-1]


def test_reads_all_columns_if_none_is_named(written):
    paths, kind, records, _ = written
    record = open_files(paths, kind, [], threads=1)[34]
    assert set(record) == set(records[34])
    assert float(np.asarray(record["score"]).item()) == 17.0


def test_threads_read_the_same_records(written, monkeypatch):
    monkeypatch.setattr(
        interface, "DECODED_BLOCKS", 2
    )  # so that blocks are dropped and decoded again all the time
    monkeypatch.setattr(interface, "OPEN_FILES", 1)
    paths, kind, records, _ = written
    documents = open_files(paths, kind, ["text", "tokens"], threads=2)
    indices = np.random.default_rng(0).integers(0, 35, 1600).tolist()
    with ThreadPoolExecutor(16) as executor:
        for record, index in zip(
            executor.map(documents.__getitem__, indices), indices, strict=True
        ):
            check(record, records[index])
    assert len(documents.files[0].caches.files.entries) <= 1
    assert len(documents.files[0].caches.blocks.entries) <= 2


@pytest.mark.slow
def test_another_process(tmp_path):
    context = multiprocessing.get_context("spawn")
    everything = {}
    for name, (kind, write, _) in WRITERS.items():
        write(tmp_path / f"a.{name}", make_records(35))
        everything[name] = open_files([str(tmp_path / f"a.{name}")], kind, ["text"], threads=1)
        everything[name][3]  # now something is open
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=read_all_in_another_process, args=(everything, sender))
    process.start()
    texts = receiver.recv()
    process.join()
    expected = [record["text"] for record in make_records(35)]
    assert texts == {name: [expected[index] for index in (0, 19, 20, 34)] for name in WRITERS}


def read_all_in_another_process(everything, sender):
    sender.send(
        {
            name: [records[index]["text"] for index in (0, 19, 20, 34)]
            for name, records in everything.items()
        }
    )


def test_pickles_without_open_files(written):
    paths, kind, records, _ = written
    documents = open_files(paths, kind, ["text", "tokens"], threads=1)
    before = len(pickle.dumps(documents))
    for index in range(35):
        documents[index]
    copy = pickle.loads(pickle.dumps(documents))
    assert abs(len(pickle.dumps(documents)) - before) < 200
    check(copy[21], records[21])
    assert copy.files[0].caches is copy.files[1].caches
    assert copy.files[0].caches.blocks.count == interface.DECODED_BLOCKS
    assert copy.files[0].caches.files.count == interface.OPEN_FILES


def test_wrong_column(written):
    paths, kind, _, _ = written
    with pytest.raises(ConfigError) as raised:
        open_files(paths, kind, ["content"], threads=2)
    assert len(raised.value.problems) in (
        2,
        3,
    )  # a file without records has columns only where there is a schema
    assert raised.value.problems[0].startswith(f"{paths[0]} has no column 'content', only ")
    for name in ("text", "tokens", "score", "train_data_columns"):
        assert name in raised.value.problems[0]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "tfrecord", "arrayrecord", "jsonl"])
def test_all_files_of_another_kind_are_reported_together(tmp_path, kind):
    paths = []
    for number in range(8):
        paths.append(str(tmp_path / f"{number}.x"))
        (tmp_path / f"{number}.x").write_bytes(b"once upon a time, " * 99)
    with pytest.raises(ConfigError) as raised:
        open_files(paths, kind, ["text"], threads=4)
    assert len(raised.value.problems) == 6
    assert all(
        problem.startswith(path)
        for problem, path in zip(raised.value.problems[:5], paths, strict=False)
    )
    assert raised.value.problems[5] == "and 3 more files like these"


def test_files_without_records(written):
    paths, kind, _, _ = written
    with pytest.raises(ConfigError, match="all 1 files are empty, among them"):
        open_files(paths[1:2], kind, ["text"], threads=1)


def test_truncated_files_raise(written, tmp_path):
    """Half a file is never taken for a whole one; only JSON lines cannot know, and have a bad last
    record.
    """
    paths, kind, _, _ = written
    data = Path(paths[0]).read_bytes()
    cut = tmp_path / "cut"
    cut.write_bytes(data[: len(data) // 2])
    if paths[0].endswith(".jsonl"):
        documents = open_files([str(cut)], kind, ["text"], threads=1)
        with pytest.raises(BadRecord, match="invalid JSON"):
            documents[len(documents) - 1]
        return
    with pytest.raises(
        ConfigError, match=f"^{cut} (is not|ends within record \\d+|cannot be decompressed)"
    ):
        open_files([str(cut)], kind, ["text"], threads=1)


def test_a_file_that_disappears(written):
    paths, kind, _, _ = written
    documents = open_files(paths[2:], kind, ["text"], threads=1)
    documents = pickle.loads(pickle.dumps(documents))  # nothing is open
    os.remove(paths[2])
    with pytest.raises(UserError, match="cannot be read any more"):
        documents[3]


def test_missing_file_and_unknown_kind(tmp_path):
    for kind in ("jsonl", "parquet", "arrow", "tfrecord", "arrayrecord", "text"):
        with pytest.raises(ConfigError, match=f"{tmp_path}/none cannot be read"):
            open_files([f"{tmp_path}/none"], kind, ["text"], threads=1)
    with pytest.raises(ConfigError, match="'csv': choose from text, jsonl, lines, parquet"):
        open_files([], "csv", [], threads=1)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_without_pyarrow(tmp_path, monkeypatch, kind):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(extras.EXTRA_OF, "pyarrow", "parquet")
    with pytest.raises(MissingExtra, match=r"reading .* needs the package 'pyarrow'.*\[parquet\]"):
        open_files([f"{tmp_path}/a"], kind, ["text"], threads=1)


def test_text_files(tmp_path):
    for name, data in (("a", "ß\r\n".encode()), ("b", b""), ("c", b"x\xff")):
        (tmp_path / name).write_bytes(data)
    paths = [str(tmp_path / name) for name in "abc"]
    documents = open_files(paths, "text", ["content"], threads=2)
    assert [record["content"] for record in documents] == ["ß\r\n", "", "x�"]
    assert open_files(paths, "text", [], threads=2)[0] == {"text": "ß\r\n"}
    assert documents.sizes.tolist() == [4, 0, 2]
    assert (documents.nbytes, documents.columns(), documents.blocks) == (6, None, None)
    with pytest.raises(ConfigError, match="all 2 files are empty"):
        open_files([paths[1]] * 2, "text", ["text"], threads=1)


def test_bad_record_is_picklable():
    error = pickle.loads(pickle.dumps(BadRecord("a.jsonl", 7, "invalid JSON")))
    assert (error.path, error.location, error.reason) == ("a.jsonl", "record 7", "invalid JSON")
    assert str(error) == "a.jsonl, record 7: invalid JSON"


def test_cache_creates_once_and_evicts_by_size():
    created = []
    held = Cache(count=8, limit=100, weigh=len)

    def make(key, size):
        time.sleep(0.01)  # long enough for others to ask for it too
        created.append(key)
        return b"x" * size

    with ThreadPoolExecutor(16) as executor:
        list(executor.map(lambda key: held.get(key, lambda: make(key, 30)), [0] * 200))
    assert created == [0]
    for key in range(1, 6):
        held.get(key, lambda key=key: make(key, 30))
    assert list(held.entries) == [3, 4, 5]
    held.get("large", lambda: make("large", 1000))
    assert list(held.entries) == [
        5,
        "large",
    ]  # threads at the end of one block and the start of the next need both
    with pytest.raises(ZeroDivisionError):
        held.get("failing", lambda: 1 / 0)
    assert held.get("failing", lambda: b"now") == b"now"


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/a.b/corpus.txt", "text"),
        ("C4.JSONL.gz", "jsonl"),
        ("c4-train.tfrecord-00000-of-01024", "tfrecord"),
        ("x.array_record", "arrayrecord"),
        ("data-00000-of-00002.arrow", "arrow"),
        ("/a.parquet/README", None),
        ("x.csv", None),
    ],
)
def test_kind_of(path, kind):
    assert kind_of(path) == kind
