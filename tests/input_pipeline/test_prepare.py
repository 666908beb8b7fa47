"""Prepared tokens: what is in the files, that they train as the documents do, and runs that are
stopped and taken up.

Files are read back with the package array_record and a reading of protobuf's bytes by their
definition.
"""

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordReader

from maxtext.common.errors import ConfigError, UserError
from maxtext.configs.types import DatasetType
from maxtext.input_pipeline import prepare as prepare_module
from maxtext.input_pipeline.prepare import prepare, training_overrides
from maxtext.input_pipeline.row_formats import DOCUMENTS
from tests.input_pipeline.corpora import SOURCES
from tests.support.batches import make_train_iterator

KINDS = [
    "text",
    "jsonl",
    "parquet",
    "arrayrecord",
    "tfrecord",
    "hf-parquet",
    "hf-json",
    "hf-arrow",
    "hf-text",
]


def documents(count, seed=0, longest=40):
    """The last letter identifies the document."""
    generator = random.Random(seed)
    return [
        "".join(generator.choices("abc déf", k=generator.randint(2, longest))).strip() + "é"
        for _ in range(count)
    ]


def by_hand(text):
    """The byte tokenizer's ids with beginning and end, by its definition."""
    return [1, *(byte + 3 for byte in text.encode()), 2]


def varint(data, at):
    number, shift = 0, 0
    while True:
        number |= (data[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 128:
            return number, at


def fields(data):
    """{number: bytes} of a message whose fields all have a length."""
    parsed, at = {}, 0
    while at < len(data):
        tag, at = varint(data, at)
        assert tag & 7 == 2
        length, at = varint(data, at)
        parsed[tag >> 3], at = data[at : at + length], at + length
    return parsed


def tokens_of(record):
    """Example → features → one entry of (key, Feature) → int64_list → packed numbers."""
    entry = fields(fields(fields(record)[1])[1])
    assert entry[1] == b"tokens"
    packed = fields(fields(entry[2])[3])[1]
    numbers, at = [], 0
    while at < len(packed):
        number, at = varint(packed, at)
        numbers.append(number)
    return numbers


def records_of(out):
    parsed = []
    for path in sorted(Path(out).glob("*.array_record")):
        reader = ArrayRecordReader(str(path))
        parsed += (
            [tokens_of(record) for record in reader.read(0, reader.num_records())]
            if reader.num_records()
            else []
        )
    return parsed


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file(kind, make_config, tmp_path):
    (tmp_path / "in").mkdir()
    texts = documents(10)
    config = make_config(**SOURCES[kind](tmp_path / "in", texts))
    prepared = prepare(config, DOCUMENTS, tmp_path / "out", 4, workers=1)
    assert records_of(tmp_path / "out") == [by_hand(text) for text in texts]
    assert prepared.shards == 3
    assert (prepared.counts.documents, prepared.counts.records, prepared.counts.bad) == (10, 10, 0)
    assert prepared.counts.tokens == prepared.tokens == sum(len(by_hand(text)) for text in texts)
    assert prepared.counts.bytes == sum(
        path.stat().st_size for path in (tmp_path / "out").glob("*.array_record")
    )


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (False, True), (False, False)])
def test_special_tokens_as_configured(bos, eos, make_config, write, tmp_path):
    config = make_config(grain_train_files=write("ab", "c"), add_bos=bos, add_eos=eos)
    prepare(config, DOCUMENTS, tmp_path / "out", None, workers=1)
    expected = [[*[1] * bos, *(byte + 3 for byte in text), *[2] * eos] for text in (b"ab", b"c")]
    assert records_of(tmp_path / "out") == expected


def test_trained_tokenizer(make_config, write, tmp_path):
    """Against the library's own ids."""
    import tokenizers

    texts = documents(6)
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.train_from_iterator(
        texts, tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["</s>"])
    )
    (tmp_path / "learnt").mkdir()
    library.save(str(tmp_path / "learnt" / "tokenizer.json"))
    (tmp_path / "learnt" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    config = make_config(
        grain_train_files=write(*texts),
        tokenizer_path=str(tmp_path / "learnt"),
        vocab_size=300,
    )
    prepare(config, DOCUMENTS, tmp_path / "out", None, workers=1)
    assert records_of(tmp_path / "out") == [
        [*library.encode(text).ids, library.token_to_id("</s>")] for text in texts
    ]


def test_empty_documents_have_no_record(make_config, write, tmp_path):
    config = make_config(grain_train_files=write("", "ab", "", "c", ""))
    prepared = prepare(config, DOCUMENTS, tmp_path / "out", 1, workers=1)
    assert records_of(tmp_path / "out") == [by_hand("ab"), by_hand("c")]
    assert (prepared.counts.documents, prepared.counts.records, prepared.shards) == (5, 2, 5)
    with pytest.raises(UserError, match="none of the 1 documents has tokens"):
        prepare(
            make_config(
                grain_train_files=write(" ", name="blank"),
                tokenizer_path=spaceless(tmp_path),
                vocab_size=3,
                add_bos=False,
                add_eos=False,
            ),
            DOCUMENTS,
            tmp_path / "none",
            None,
            workers=1,
        )


def spaceless(folder):
    """A tokenizer that drops white space."""
    import tokenizers

    library = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (folder / "words").mkdir()
    library.save(str(folder / "words" / "tokenizer.json"))
    return str(folder / "words")


@pytest.mark.parametrize("shuffle", [False, True], ids=["in order", "shuffled"])
@pytest.mark.parametrize("packing", ["first_fit", "best_fit", "concat_then_split", "none"])
@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_training_on_prepared_data_gives_the_same_batches(
    kind, packing, shuffle, make_config, tmp_path, few_open_rows
):
    (tmp_path / "in").mkdir()
    how = {"packing": False} if packing == "none" else {"grain_packing_type": packing}
    settings = (
        dict(
            enable_data_shuffling=shuffle,
            num_epoch=2,
            max_target_length=16,
            global_batch_size_to_load=3,
        )
        | how
    )
    raw = make_config(**SOURCES[kind](tmp_path / "in", documents(30)), **settings)
    prepare(raw, DOCUMENTS, tmp_path / "out", 7, workers=1)
    prepared = make_config(
        grain_file_type="arrayrecord",
        grain_train_files=f"{tmp_path}/out/*.array_record",
        train_data_columns=["tokens"],
        tokenize_train_data=False,
        **settings,
    )
    batches = [list(make_train_iterator(config)) for config in (raw, prepared)]
    assert len(batches[0]) == len(batches[1]) > 5
    for actual, expected in zip(*batches, strict=True):
        for name in actual:
            np.testing.assert_array_equal(actual[name], expected[name])


def test_shards_depend_on_the_data_only(make_config, write, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, "MIN_SHARD_BYTES", 10)
    config = make_config(grain_train_files=write(*["0123456789"] * 6))
    prepared = prepare(config, DOCUMENTS, tmp_path / "out", None, workers=1)
    assert prepared.shards == 6
    names = sorted(path.name for path in (tmp_path / "out").glob("*.array_record"))
    assert names[0] == "tokens-00000-of-00006.array_record"
    monkeypatch.setattr(prepare_module, "MIN_SHARD_BYTES", 35)
    assert prepare(config, DOCUMENTS, tmp_path / "other", None, workers=1).shards == 2


# Going on.


def test_finished_shards_are_kept(make_config, write, tmp_path):
    texts = documents(9)
    config, out = make_config(grain_train_files=write(*texts)), tmp_path / "out"
    prepare(config, DOCUMENTS, out, 2, workers=1)
    before = contents(out)
    again = prepare(config, DOCUMENTS, out, 2, workers=1)
    assert (again.tokens, again.counts.records) == (0, 9)
    # One lost, one cut, one that the manifest does not know yet, and what a killed run leaves
    # behind.
    files = sorted(out.glob("*.array_record"))
    files[0].unlink()
    files[1].write_bytes(files[1].read_bytes()[:100])
    manifest = json.loads((out / "manifest.json").read_text())
    del manifest["shards"][files[2].name]
    (out / "manifest.json").write_text(json.dumps(manifest))
    (out / f".{files[0].name}.tmp").write_bytes(b"half")
    (out / ".manifest.json.abc.tmp").write_bytes(b"half")
    mtimes = {path.name: path.stat().st_mtime_ns for path in files[3:]}
    prepared = prepare(config, DOCUMENTS, out, 2, workers=1)
    assert contents(out) == before
    assert mtimes == {path.name: path.stat().st_mtime_ns for path in files[3:]}
    assert prepared.tokens == sum(len(by_hand(text)) for text in texts[:6])


SCRIPT = """
import sys
from pathlib import Path
from maxtext.configs.load import base_values
from maxtext.configs.types import DatasetType
import maxtext.input_pipeline.prepare as module
from maxtext.input_pipeline.row_formats import DOCUMENTS

files, out, workers = sys.argv[1:]
settings = dict(
    dataset_type=DatasetType.GRAIN,
    grain_file_type="jsonl",
    tokenizer_path="byte",
    vocab_size=259,
    grain_train_files=files,
)
module.SAVE_SECONDS = 0.0
config = base_values().model_copy(update=settings)
module.prepare(config, DOCUMENTS, Path(out), 100, int(workers))
"""


def start(files, out, workers):
    return subprocess.Popen([sys.executable, "-c", SCRIPT, files, str(out), str(workers)])


@pytest.mark.slow
def test_resumes_after_a_kill_at_any_moment(tmp_path):
    (tmp_path / "in").mkdir()
    files = SOURCES["jsonl"](tmp_path / "in", documents(4000, longest=800))["grain_train_files"]
    uninterrupted, out = tmp_path / "whole", tmp_path / "out"
    assert start(files, uninterrupted, 1).wait() == 0
    expected = contents(uninterrupted)
    generator = random.Random(time.time_ns())
    interrupted = 0
    for workers in (2, 1):
        shutil.rmtree(out, ignore_errors=True)
        for _ in range(2):
            process = start(files, out, workers)
            begun = len(list(out.glob("*.array_record"))) if out.exists() else 0
            wanted = begun + generator.randint(1, 8)
            while (
                process.poll() is None
                and len(list(out.glob("*.array_record")) if out.exists() else []) < wanted
            ):
                time.sleep(0.002)
            time.sleep(generator.random() * 0.02)
            process.send_signal(signal.SIGKILL)
            interrupted += process.wait() == -signal.SIGKILL
            known = json.loads((out / "manifest.json").read_text())["shards"]
            inodes = {name: (out / name).stat().st_ino for name in known}
        assert start(files, out, workers).wait() == 0
        assert {name: (out / name).stat().st_ino for name in inodes} == inodes
        assert contents(out) == expected
    assert interrupted >= 2


def test_locks_the_output_folder(make_config, write, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, "LOCK_SECONDS", 0.2)
    out = tmp_path / "out"
    out.mkdir()
    handle = os.open(out, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    config = make_config(grain_train_files=write("abc"))
    with pytest.raises(ConfigError, match="another run writes there"):
        prepare(config, DOCUMENTS, out, None, workers=1)
    assert not contents(out)
    os.close(handle)
    prepare(config, DOCUMENTS, out, None, workers=1)


# Refused, with nothing changed.


def refused(match, config, out, shard_documents=2):
    before = contents(out) if out.is_dir() else out.exists()
    with pytest.raises(ConfigError, match=match):
        prepare(config, DOCUMENTS, out, shard_documents, workers=1)
    assert (contents(out) if out.is_dir() else out.exists()) == before


def test_resume_with_other_settings_raises(make_config, write, tmp_path):
    folder, out = write(*documents(5)), tmp_path / "out"
    files = dict(grain_train_files=folder)
    prepare(make_config(**files), DOCUMENTS, out, 2, workers=1)
    refused(r"begun with end \[2\], but now it is \[\]", make_config(**files, add_eos=False), out)
    refused(r"begun with beginning \[1\]", make_config(**files, add_bos=False), out)
    refused(
        "begun with shard_documents 2, but now it is 3",
        make_config(**files),
        out,
        shard_documents=3,
    )
    refused(
        "begun with tokenizer .*259.* but now it is .*256",
        make_config(**files, vocab_size=256),
        out,
    )
    # What has no part in the bytes may change.
    config = make_config(**files, max_target_length=4, max_bad_records=7)
    assert prepare(config, DOCUMENTS, out, 2, workers=1).tokens == 0
    first = Path(folder) / "000.txt"
    stat = first.stat()
    os.utime(first, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    refused("000.txt has changed since", make_config(**files), out)
    os.utime(first, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    (Path(folder) / "new.txt").write_text("more")
    refused("begun with documents 5|new.txt has been added since", make_config(**files), out)
    (Path(folder) / "new.txt").unlink()
    (Path(folder) / "new.txt").mkdir()
    assert prepare(make_config(**files), DOCUMENTS, out, 2, workers=1).tokens == 0
    (out / "notes.txt").write_text("mine")
    refused("holds other files, such as notes.txt", make_config(**files), out)
    (out / "notes.txt").unlink()
    (out / "manifest.json").write_text("{}")
    refused("not a manifest", make_config(**files), out)


def test_bad_output_folders_raise(make_config, write, tmp_path):
    config = make_config(grain_train_files=write("abc"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    refused("holds other files, such as thesis.txt", config, tmp_path / "full")
    refused("is a file: name a folder", config, tmp_path / "full" / "thesis.txt")
    refused("cannot be created", config, tmp_path / "full" / "thesis.txt" / "below")
    refused("',' has a meaning in grain_train_files", config, tmp_path / "a,b")


def test_unsupported_data_raises(make_config, write, tmp_path):
    out, folder = tmp_path / "out", write("abc", "def")
    refused("cannot be prepared: name files", make_config(dataset_type=DatasetType.SYNTHETIC), out)
    refused("tokens already", make_config(grain_train_files=folder, tokenize_train_data=False), out)
    refused(
        "prepare each of its parts", make_config(grain_train_files=f"{folder},1;{folder},2"), out
    )
    refused("does not exist", make_config(grain_train_files=f"{folder}/missing.txt"), out)
    refused("is a stream", make_config(dataset_type=DatasetType.HF, hf_path="org/name"), out)
    refused("vocab_size", make_config(grain_train_files=folder, vocab_size=258), out)
    assert not out.exists()


def test_bad_records_are_counted_over_all_runs(make_config, tmp_path):
    lines = [json.dumps({"text": text}) for text in documents(6)]
    lines[1] = "{broken"
    lines[4] = json.dumps({"text": 5})
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    out = tmp_path / "out"

    def config(most):
        return make_config(
            grain_train_files=f"{tmp_path}/a.jsonl", grain_file_type="jsonl", max_bad_records=most
        )

    with pytest.raises(UserError, match="line 2.*max_bad_records=0"):
        prepare(config(0), DOCUMENTS, out, 2, workers=1)
    assert sorted(contents(out)) == ["manifest.json"]
    for _ in range(2):  # the second run finds the first bad record in the manifest
        with pytest.raises(UserError, match="line 5.*max_bad_records=1"):
            prepare(config(1), DOCUMENTS, out, 2, workers=1)
        assert len(list(out.glob("*.array_record"))) == 2  # what was finished is kept
    prepared = prepare(config(2), DOCUMENTS, out, 2, workers=1)
    assert (prepared.counts.bad, prepared.counts.records) == (2, 4)
    assert records_of(out) == [
        by_hand(text) for index, text in enumerate(documents(6)) if index not in (1, 4)
    ]
    with pytest.raises(UserError, match="max_bad_records=0"):
        prepare(config(0), DOCUMENTS, tmp_path / "by others", 2, workers=2)
    assert not list((tmp_path / "by others").glob(".*"))  # nobody writes any more


def test_training_overrides():
    assert training_overrides(Path("some/place")) == [
        "dataset_type=grain",
        "grain_file_type=arrayrecord",
        "grain_train_files=some/place/*.array_record",
        "train_data_columns=[tokens]",
        "tokenize_train_data=false",
    ]
