"""Bad data raises one error that says what and where, or is skipped as documented."""

import json
import pickle

import numpy as np
import pytest

from maxtext.cli.main import main
from maxtext.common.errors import ConfigError, UserError
from maxtext.configs.types import DatasetType
from maxtext.input_pipeline import ShardSpec, Split, user_code
from tests.input_pipeline.corpora import SOURCES, example, write_tfrecords
from tests.support.batches import make_iterator, make_train_iterator

GOOD = [f"good{number}" for number in range(20)]


def decoded(iterator):
    """The text of all segments, sorted."""
    documents = []
    for batch in iterator:
        for targets, segments in zip(batch["targets"], batch["targets_segmentation"], strict=True):
            for number in range(1, segments.max() + 1):
                documents.append(
                    bytes(
                        int(token) - 3 for token in targets[segments == number] if token > 2
                    ).decode()
                )
    return sorted(documents)


def lines_with(folder, *bad):
    """Good records, and the bad lines in their middle."""
    good = [json.dumps({"text": document}).encode() for document in GOOD]
    (folder / "a.jsonl").write_bytes(b"\n".join([*good[:10], *bad, *good[10:]]))
    return {"grain_train_files": str(folder / "a.jsonl"), "grain_file_type": "jsonl"}


BAD_LINES = {
    "no JSON": (b'{"text": "cut of', "a.jsonl, line 11: invalid JSON"),
    "no UTF-8": (b'{"text": "caf\xe9"}', "a.jsonl, line 11: invalid UTF-8"),
    "no such column": (b'{"body": "x"}', "a.jsonl, line 11: the column 'text' is missing"),
    "null": (b'{"text": null}', "a.jsonl, line 11: the column 'text' is null"),
    "a number": (
        b'{"text": 5}',
        "a.jsonl, line 11: column text has a value of type int instead of text",
    ),
    "a list": (b"[1, 2]", "a.jsonl, line 11: a list instead of a JSON object"),
}


def test_bad_records_that_are_read_together_are_reported_together(make_config, tmp_path):
    settings = lines_with(tmp_path, b"{", b'{"text": null}', b"[1]")
    with pytest.raises(ConfigError) as stopped:
        list(make_train_iterator(make_config(**settings, enable_data_shuffling=False)))
    first, second, third = stopped.value.problems
    assert "line 11: invalid JSON" in first
    assert "line 12: the column 'text' is null" in second
    assert "line 13: a list instead of a JSON object" in third
    assert "max_bad_records=0 (3 bad records): repair the data, which `maxtext data insp" in third


@pytest.mark.parametrize("name", BAD_LINES)
@pytest.mark.parametrize("shuffle", [True, False])
def test_bad_record_stops_the_run_or_is_skipped(make_config, tmp_path, caplog, name, shuffle):
    line, said = BAD_LINES[name]
    settings = lines_with(tmp_path, line) | {"enable_data_shuffling": shuffle}
    with pytest.raises(UserError, match=said) as stopped:
        list(make_train_iterator(make_config(**settings)))
    assert "max_bad_records=0" in str(stopped.value)
    with caplog.at_level("WARNING", logger="maxtext"):
        assert decoded(make_train_iterator(make_config(**settings, max_bad_records=1))) == sorted(
            GOOD
        )
    assert said in caplog.text
    assert "1 so far" in caplog.text


def test_too_many_bad_records_raise(make_config, tmp_path):
    settings = lines_with(tmp_path, b"one", b"two", b"three")
    with pytest.raises(UserError, match="a.jsonl, line 13.*max_bad_records=2"):
        list(make_train_iterator(make_config(**settings, max_bad_records=2)))
    assert decoded(make_train_iterator(make_config(**settings, max_bad_records=3))) == sorted(GOOD)
    assert decoded(make_train_iterator(make_config(**settings, max_bad_records=-1))) == sorted(GOOD)


def test_bad_record_is_counted_once(make_config, tmp_path, caplog):
    """In every epoch, and when data that is too short for a batch is read again to say why."""
    settings = lines_with(tmp_path, *[b"bad"] * 7) | {"max_bad_records": 10}
    with caplog.at_level("WARNING", logger="maxtext"):
        assert len(decoded(make_train_iterator(make_config(**settings, num_epoch=3)))) == 3 * len(
            GOOD
        )
    assert "(5 so far)" in caplog.text
    assert "left out 8" not in caplog.text
    with pytest.raises(ConfigError, match="but one batch needs 8000 "):
        make_train_iterator(make_config(**settings, global_batch_size_to_load=1000))


def test_resume_past_bad_records(make_config, tmp_path):
    settings = lines_with(tmp_path, b"one", b"two") | {
        "max_bad_records": -1,
        "enable_data_shuffling": True,
    }
    iterator = make_train_iterator(make_config(**settings))
    batches = list(iterator)
    for done in (3, 15):
        resumed = make_train_iterator(make_config(**settings))
        for _ in range(done):
            next(resumed)
        state = json.loads(json.dumps(resumed.get_state()))
        resumed = make_train_iterator(make_config(**settings))
        resumed.set_state(state)
        for actual, expected in zip(resumed, batches[done:], strict=True):
            np.testing.assert_array_equal(actual["inputs"], expected["inputs"])


def test_flipped_bit_is_a_bad_record(make_config, tmp_path):
    path = tmp_path / "a.tfrecord"
    write_tfrecords(path, map(example, GOOD))
    data = bytearray(path.read_bytes())
    data[data.index(b"good7") + 2] ^= 1
    path.write_bytes(data)
    settings = {"grain_train_files": str(path), "grain_file_type": "tfrecord"}
    with pytest.raises(UserError, match="a.tfrecord, record 7"):
        list(make_train_iterator(make_config(**settings)))
    documents = decoded(make_train_iterator(make_config(**settings, max_bad_records=1)))
    assert documents == sorted(document for document in GOOD if document != "good7")


def test_missing_column_error_lists_columns(make_config, tmp_path):
    settings = lines_with(tmp_path)
    with pytest.raises(ConfigError, match="no column 'body', only text"):
        make_train_iterator(make_config(**settings, train_data_columns=["body"]))
    (tmp_path / "stream").mkdir()
    stream = SOURCES["hf-stream"](tmp_path / "stream", GOOD)
    with pytest.raises(ConfigError, match="has no column body, only id, text"):
        make_train_iterator(make_config(**stream, train_data_columns=["body"]))
    with pytest.raises(
        ConfigError, match=r"train_data_columns=\['text', 'id'\]: name the column of the text"
    ):
        make_train_iterator(make_config(**settings, train_data_columns=["text", "id"]))


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "much"])
def test_mixture_weights_must_be_positive(make_config, tmp_path, weight):
    lines_with(tmp_path)
    files = f"{tmp_path}/a.jsonl,0.5;{tmp_path}/a.jsonl,{weight}"
    with pytest.raises(ConfigError, match=f"has the weight .?{weight}"):
        make_train_iterator(make_config(grain_train_files=files, grain_file_type="jsonl"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "has no entries"),
        ("{", "neither JSON nor YAML"),
        ("a: [\n", r"neither JSON nor YAML \(while parsing .* line 2, column 1:?.*\)$"),
        ('{"a": {"path": "x"}}', "entry a of .* needs a path and a weight"),
        ('{"a": {"path": "/nowhere", "weight": 1}}', "entry a: /nowhere does not exist"),
        ('{"a": {"path": "x", "weight": 0}}', "entry a has the weight 0"),
        ("- 5", "entry 0 of .* needs a path and a weight"),
    ],
)
def test_bad_files_of_mixtures(make_config, tmp_path, text, said):
    (tmp_path / "mixture").write_text(text)
    settings = {
        "grain_train_mixture_config_path": str(tmp_path / "mixture"),
        "grain_file_type": "jsonl",
    }
    with pytest.raises(ConfigError, match=said):
        make_train_iterator(make_config(**settings))
    with pytest.raises(ConfigError, match="both name the data"):
        make_train_iterator(make_config(**settings, grain_train_files="x"))


@pytest.mark.parametrize("form", ["inline", "json", "yaml"])
def test_mixture_samples_by_weight(make_config, tmp_path, form):
    for name, letter in (("a", "a"), ("b", "b")):
        lines = [json.dumps({"text": letter * 5}) for _ in range(400)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    settings = {"grain_file_type": "jsonl", "enable_data_shuffling": True}
    entries = {
        name: {"path": f"{tmp_path}/{name}.jsonl", "weight": weight}
        for name, weight in (("a", 3), ("b", 1))
    }
    if form == "inline":
        settings["grain_train_files"] = ";".join(
            f"{one['path']},{one['weight']}" for one in entries.values()
        )
    else:
        text = (
            json.dumps(entries)
            if form == "json"
            else "\n".join(f"{k}: {json.dumps(v)}" for k, v in entries.items())
        )
        (tmp_path / "mixture").write_text(text)
        settings["grain_train_mixture_config_path"] = str(tmp_path / "mixture")
    documents = decoded(make_train_iterator(make_config(**settings)))
    # It ends when the first part has been visited: 400 of a, and a third as many of b.
    assert documents.count("a" * 5) in (399, 400)
    assert documents.count("b" * 5) in (133, 134)


def test_tokens_must_be_in_the_vocabulary(make_config, tmp_path):
    lines = [
        json.dumps({"tokens": tokens})
        for tokens in ([1, 5, 9, 2], [1, 259, 2], [3, -1], ["a"], [], [1, 7, 2])
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    settings = {
        "grain_train_files": str(tmp_path),
        "grain_file_type": "jsonl",
        "train_data_columns": ["tokens"],
        "tokenize_train_data": False,
        "packing": False,
    }
    with pytest.raises(UserError, match="line 2: its token id 259 is outside vocab_size=259"):
        list(make_train_iterator(make_config(**settings)))
    with pytest.raises(UserError, match="line 3: its token id -1 is outside"):
        list(make_train_iterator(make_config(**settings, max_bad_records=1)))
    batches = list(make_train_iterator(make_config(**settings, max_bad_records=3)))
    # No special tokens are added to tokens.
    assert [batch["inputs"][0, :4].tolist() for batch in batches] == [[1, 5, 9, 0], [1, 7, 0, 0]]


def test_more_streams_than_documents(make_config, tmp_path):
    config = make_config(**lines_with(tmp_path))
    with pytest.raises(ConfigError, match="20 documents for 21 streams"):
        make_iterator(config, Split.TRAIN, ShardSpec(1, index=0, count=21))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no.such.module:documents", "cannot be imported: No module named 'no'"),
        ("tests.input_pipeline.corpora:nothing", "cannot be imported"),
        ("tests.input_pipeline.corpora:FILES", "is int and no function"),
        ("tests.input_pipeline.test_bad_data:empty", "returned list for train"),
        (
            "tests.input_pipeline.test_bad_data:numbers",
            "record 0: is int instead of a record of columns",
        ),
    ],
)
def test_bad_custom_sources_raise(make_config, name, said):
    with pytest.raises(UserError, match=said):
        list(make_train_iterator(make_config(dataset_type=DatasetType(name))))


class Broken(list):
    def __getitem__(self, index):
        raise KeyError("lost")


def failing(config, split):
    raise RuntimeError("the bucket\nis empty")


def broken(config, split):
    return Broken([1, 2, 3])


@pytest.mark.parametrize(
    ("name", "said", "frame"),
    [
        (
            "failing",
            ":failing raised RuntimeError for split train: the bucket is empty; its "
            "traceback follows",
            "in failing",
        ),
        (
            "broken",
            ":broken, record 0: cannot be read: KeyError: 'lost'",
            "in __getitem__",
        ),
    ],
)
def test_custom_source_error_has_message_and_traceback(name, said, frame, capsys):
    words = [
        "data",
        "inspect",
        f"dataset_type={__name__}:{name}",
        "tokenizer_path=byte",
        "vocab_size=259",
    ]
    assert (
        main(
            [
                *words,
                "max_target_length=8",
                "per_device_batch_size=1",
                "enable_data_shuffling=false",
            ]
        )
        == 2
    )
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.startswith("maxtext: error: ")
    assert said in first
    assert rest[0] == "Traceback (most recent call last):"
    assert frame in rest[1]
    assert "custom.py" not in "".join(rest)


def test_worker_forwards_traceback_of_custom_source(make_config):
    error = pickle.loads(pickle.dumps(user_code.failure("it raised", ValueError("x"))))
    assert (str(error), error.details) == ("it raised: x; its traceback follows", "ValueError: x\n")


def empty(config, split):
    return []


def numbers(config, split):
    return [1, 2, 3]


def test_hf_without_path_or_files_raises(make_config, tmp_path):
    with pytest.raises(ConfigError, match="needs hf_path"):
        make_train_iterator(make_config(dataset_type=DatasetType.HF))
    with pytest.raises(ConfigError, match="`datasets` cannot open it"):
        make_train_iterator(
            make_config(dataset_type=DatasetType.HF, hf_path=str(tmp_path / "missing"))
        )
    (tmp_path / "a.bin").write_text("x")
    with pytest.raises(ConfigError, match="set hf_path to the kind of these files"):
        make_train_iterator(
            make_config(dataset_type=DatasetType.HF, hf_train_files=str(tmp_path / "a.bin"))
        )


def test_hf_does_not_read_the_current_folder(make_config, tmp_path, monkeypatch):
    """As `datasets` does for a loader without files."""
    lines_with(tmp_path)
    monkeypatch.chdir(tmp_path)
    settings = {"dataset_type": DatasetType.HF, "hf_path": "json"}
    with pytest.raises(
        ConfigError, match="hf_path=json is a kind of files: name the files in hf_train_files"
    ):
        make_train_iterator(make_config(**settings))
    config = make_config(**settings, hf_train_files="a.jsonl", hf_eval_split="train")
    with pytest.raises(ConfigError, match="name the files in hf_eval_files"):
        make_iterator(config, Split.EVAL, ShardSpec(1))


def test_hf_infers_columns_of_a_stream_without_schema(make_config, tmp_path):
    (tmp_path / "a.csv").write_text("one,two\n1,2\n")
    config = make_config(
        dataset_type=DatasetType.HF, hf_path="csv", hf_train_files=str(tmp_path / "a.csv")
    )
    with pytest.raises(
        ConfigError, match="train_data_columns: csv has no column text, only one, two"
    ):
        make_train_iterator(config)


def test_tfds_error_lists_splits(make_config, tmp_path):
    settings = SOURCES["tfds"](tmp_path, GOOD)
    with pytest.raises(ConfigError, match="train_split=test: dataset_name=tiny:1.0.0 has train"):
        make_train_iterator(make_config(**settings | {"train_split": "test"}))
    with pytest.raises(
        ConfigError, match=r"dataset_name=other:1.0.0 is not prepared in .*: set dataset_path"
    ):
        make_train_iterator(make_config(**settings | {"dataset_name": "other:1.0.0"}))


def test_parts_of_a_tfds_split(make_config, tmp_path):
    settings = SOURCES["tfds"](tmp_path, GOOD)
    for split, expected in (
        ("train[5:9]", GOOD[5:9]),
        ("train[:50%]", GOOD[:10]),
        ("train[-3:]", GOOD[-3:]),
    ):
        assert decoded(
            make_train_iterator(make_config(**settings | {"train_split": split}))
        ) == sorted(expected)
