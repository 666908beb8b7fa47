"""[FILE] [MODEL] [DATA ...] as the first words of commands."""

import gzip
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

import maxtext.cli.train
from maxtext.cli.arguments import parse
from maxtext.cli.commands import COMMANDS
from maxtext.cli.eval import read_arguments
from maxtext.cli.main import main
from maxtext.cli.positionals import MODEL_KEY, TEACHER_KEY, split
from maxtext.common.errors import ConfigError
from maxtext.configs import fields, sources
from tests.cli.fake_llm import write_checkpoint

ROW = {"prompt": "a", "completion": "b"}
FILES = """
    a.jsonl b.json c.jsonl.gz my.yml notes.txt x.parquet y.arrow z.csv data/1.jsonl
    mixed/README.md mixed/dataset_info.json mixed/deep/1.parquet mixed/deep/2.parquet
    split/train-1.jsonl split/test-1.jsonl two/a.jsonl two/b.txt shards/a.tfrecord-0-of-2
    shards/README.md year=2024/a.jsonl w/model.gguf empty/.hidden
"""
NO_MIXTURE = "grain_train_mixture_config_path="


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with models and data."""
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "model")
    for name in ("hf", "sft", "step"):
        (tmp_path / name).mkdir()
    for name in ("hf", "sft"):
        (tmp_path / name / "config.json").write_text("{}")
    for name in FILES.split():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if name.endswith("yml") else json.dumps(ROW) + "\n")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    return tmp_path


def data(kind, files, key="grain_train_files"):
    settings = ["dataset_type=grain", f"grain_file_type={kind}", f"{key}={files}"]
    return [*settings, *([NO_MIXTURE] if "train" in key else [])]


CASES = {
    "": (None, []),
    "steps=1": (None, ["steps=1"]),
    "quickstart": ("quickstart", []),
    "my.yml steps=1": ("my.yml", ["steps=1"]),
    "my": ("my", []),
    "model": (None, [f"{MODEL_KEY}=model"]),
    "./hf lora_rank=2": (None, [f"{MODEL_KEY}=./hf", "lora_rank=2"]),
    "Qwen/Qwen3-0.6B@main": (None, [f"{MODEL_KEY}=Qwen/Qwen3-0.6B@main"]),
    "qwen3-0.6b": (None, ["model_name=qwen3-0.6b"]),
    "sft": ("sft", []),
    "./sft": (None, [f"{MODEL_KEY}=./sft"]),
    "sft hf a.jsonl": ("sft", [f"{MODEL_KEY}=hf", *data("jsonl", "a.jsonl")]),
    "hf my.yml a.jsonl": ("my.yml", [f"{MODEL_KEY}=hf", *data("jsonl", "a.jsonl")]),
    "hf a.jsonl c.jsonl.gz b.json": (
        None,
        [f"{MODEL_KEY}=hf", *data("jsonl", "a.jsonl,c.jsonl.gz,b.json")],
    ),
    "steps=1 hf *.parquet": (None, [f"{MODEL_KEY}=hf", *data("parquet", "*.parquet"), "steps=1"]),
    "a.jsonl hf": (None, [f"{MODEL_KEY}=hf", *data("jsonl", "a.jsonl")]),
    f"{MODEL_KEY}=hf y.arrow": (None, [*data("arrow", "y.arrow"), f"{MODEL_KEY}=hf"]),
    "notes.txt": (None, data("text", "notes.txt")),
    "data": (None, data("jsonl", "data")),
    "mixed": (None, data("parquet", "mixed/**/*.parquet")),
    "shards": (None, data("tfrecord", "shards/**/*.tfrecord-*")),
    "year=2024/a.jsonl": (None, data("jsonl", "year=2024/a.jsonl")),
    "z.csv grain_file_type=text": (
        None,
        ["dataset_type=grain", "grain_train_files=z.csv", NO_MIXTURE, "grain_file_type=text"],
    ),
    "hf org/rows": (None, [f"{MODEL_KEY}=hf", "dataset_type=hf", "hf_path=org/rows"]),
    "org/m org/rows": (None, [f"{MODEL_KEY}=org/m", "dataset_type=hf", "hf_path=org/rows"]),
}


@pytest.mark.parametrize("line", CASES)
def test_words_become_keys(here, line):
    assert split(line.split()) == CASES[line]


def test_evaluation_data_and_teachers(here):
    assert split(["hf", "a.jsonl"], data="eval")[1][1:] == data(
        "jsonl", "a.jsonl", "grain_eval_files"
    )
    named = split(["hf", "model", "a.jsonl"], models=(MODEL_KEY, TEACHER_KEY))[1]
    assert named[:2] == [f"{MODEL_KEY}=hf", f"{TEACHER_KEY}=model"]
    student = split([f"{TEACHER_KEY}=hf", "model"], models=(MODEL_KEY, TEACHER_KEY))[1]
    assert student == [f"{MODEL_KEY}=model", f"{TEACHER_KEY}=hf"]


def test_no_name_is_a_preset_and_a_model():
    assert not set(sources.presets()) & set(fields.choices("model_name"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("hf model", "model is a model, and another one is named"),
        ("my.yml hf my.yml", "two configuration files"),
        ("hf nowhere.jsonl", "there is no file or folder nowhere.jsonl"),
        ("hf ./data/x", "there is no file or folder ./data/x"),
        ("hf *.tfrecord", "no file matches \\*.tfrecord"),
        ("hf z.csv", "z.csv: its name says no format that can be read"),
        ("hf a.jsonl x.parquet", "these are several: jsonl \\(a.jsonl\\), parquet \\(x.parquet\\)"),
        ("hf two", "these are several: jsonl"),
        (
            "hf split",
            "files of test and train: name those to read, such as 'split/\\*\\*/train\\*'",
        ),
        ("hf a.jsonl dataset_type=hf", "and so does dataset_type=hf"),
        ("hf a.jsonl grain_train_files=b.json", "and so does grain_train_files=b.json"),
        ("hf a,b.jsonl", "separate files by spaces"),
        ("hf steps", "unknown argument 'steps': write steps=VALUE"),
        ("hf learning_rate=1 lora", "no configuration file, model or data 'lora'"),
        ("quickstrat", "did you mean quickstart"),
        ("qwen3-0.6", "did you mean qwen3-0.6b"),
        ("adapter", "adapter is a PEFT adapter: name its base model"),
        ("w/model.gguf", "name the folder that it is in"),
        ("empty", "the directory empty has no files"),
    ],
)
def test_errors(here, line, reason):
    with pytest.raises(ConfigError, match=reason):
        split(line.split())


def test_methods_train_the_model_on_the_data(here, monkeypatch):
    """Every method, by the arguments that it trains with."""
    trained = []
    monkeypatch.setattr(
        maxtext.cli.train, "train_run", lambda *run, **command: trained.append(run) or 0
    )
    for method in ("sft", "dpo", "orpo", "reward", "grpo"):
        assert main([method, "hf", "a.jsonl", "lora_rank=4"]) == 0
        expected = [f"{MODEL_KEY}=hf", *data("jsonl", "a.jsonl"), "lora_rank=4"]
        assert trained.pop() == (str(sources.HERE / f"{method}.yml"), expected)
    assert main(["distill", "hf", "model", "a.jsonl"]) == 0
    expected = [f"{MODEL_KEY}=hf", f"{TEACHER_KEY}=model", *data("jsonl", "a.jsonl")]
    assert trained.pop() == (str(sources.HERE / "distill.yml"), expected)
    assert main(["train", "hf", "notes.txt"]) == 0
    assert trained.pop() == (None, [f"{MODEL_KEY}=hf", *data("text", "notes.txt")])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("sft", "which model? maxtext sft MODEL DATA"),
        ("dpo a.jsonl", "which model? maxtext dpo MODEL DATA"),
        ("sft --lora-rank 8", "without dashes: write lora_rank=VALUE"),
        ("sft hf", "there is no data to train on: name files of it after the model"),
        ("sft hf grain_train_files=a.jsonl", "read with dataset_type=grain: set it"),
        ("grpo qwen3-0.6b a.jsonl", "the name of sizes without weights"),
        ("dpo sft a.jsonl", "write ./sft for the model, or sft.yml for the preset"),
        ("distill hf a.jsonl", "there is no teacher to learn from"),
    ],
)
def test_what_is_missing_is_named(here, line, reason, capsys, monkeypatch):
    monkeypatch.setattr(maxtext.cli.train, "open_model_checkpoint", lambda *args: None)
    assert main(line.split()) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("command", ["decode", "chat", "serve", "eval", "batch", "evaluate"])
def test_commands_of_a_model_take_its_key_too(command, loaded, here, capsys, monkeypatch):
    """The message about a key that is wrong comes when the model is open."""
    rest = {
        "serve": ["--port", "0"],
        "eval": ["--builtin", "copy"],
        "batch": ["a.jsonl", "out.jsonl"],
        "evaluate": ["a.jsonl"],
    }.get(command, [])
    for model in (["model"], [f"{MODEL_KEY}=model"]):
        assert main([command, *model, *rest, "max_target_length=many"]) == 2
        assert "max_target_length='many' (command line)" in capsys.readouterr().err


def test_perplexity_of_files_after_the_model(here):
    args = ["model", "notes.txt", "a.jsonl", "dtype=float32", "--stride", "4"]
    parsed = read_arguments(parse("eval", COMMANDS["eval"], args))
    assert (parsed.mode, parsed.value) == ("--perplexity", "notes.txt,a.jsonl")
    assert parsed.overrides == [f"{MODEL_KEY}=model", "dtype=float32"]


def test_a_file_of_another_format_is_told_from_a_damaged_one(here, capsys):
    table = pyarrow.table({"prompt": ["a"], "completion": ["b"]})
    pyarrow.parquet.write_table(table, "parquet.jsonl")
    pyarrow.parquet.write_table(table, "parquet.txt")
    with pyarrow.ipc.new_file("arrow.parquet", table.schema) as writer:
        writer.write_table(table)
    with pyarrow.ipc.new_stream("stream.parquet", table.schema) as writer:
        writer.write_table(table)
    writer = ArrayRecordWriter("records.jsonl", "group_size:1")
    writer.write(b"a")
    writer.close()
    (here / "lines.parquet").write_text(json.dumps(ROW))
    (here / "object.json").write_text(json.dumps({"rows": [ROW]}, indent=1))
    (here / "notes.txt.gz").write_bytes(gzip.compress(b"some text"))
    for name, reason in {
        "parquet.jsonl": "is a Parquet file, but is read as jsonl: set grain_file_type=parquet",
        "parquet.txt": "is a Parquet file, but is read as text",
        "arrow.parquet": "is an Arrow file, but is read as parquet",
        "stream.parquet": "is an Arrow stream, but is read as parquet",
        "records.jsonl": "is an ArrayRecord file, but is read as jsonl",
        "lines.parquet": "is a file of JSON, but is read as parquet: set grain_file_type=jsonl",
        "notes.txt.gz": "is compressed with gzip: decompress it",
        "object.json": "is one JSON object, not rows",
    }.items():
        assert main(["data", "inspect", name, "tokenizer_path=byte", "vocab_size=259"]) == 2
        error = capsys.readouterr().err
        assert f"{name} {reason}" in error
        assert "damaged" not in error


def test_keys_of_files_without_a_format_read_it_from_their_names(here, capsys):
    """And an array of rows is read as JSON lines are."""
    rows = [{"text": f"row {index}"} for index in range(40)]
    (here / "rows.json").write_text(json.dumps(rows, indent=1))
    (here / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = []
    for name in ("rows.json", "lines.jsonl"):
        settings = ["dataset_type=grain", f"grain_train_files={name}", "tokenizer_path=byte"]
        sizes = ["vocab_size=259", "max_target_length=32", "per_device_batch_size=2"]
        order = "enable_data_shuffling=false"
        assert main(["data", "inspect", *settings, *sizes, order, "--json"]) == 0
        shown.append(json.loads(capsys.readouterr().out)["batches"])
    assert shown[0] == shown[1]
    assert np.size(shown[0][0][0][0]["inputs"])
