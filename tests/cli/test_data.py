"""`maxtext data`, as a person runs it; the tokens of the byte tokenizer are computed here by its
definition.
"""

import json
import os
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest

from maxtext.cli.batch_files import visible
from maxtext.cli.data import fewest_devices, load_config
from maxtext.cli.main import main
from tests.support.batches import make_train_iterator

SMALL = [
    "dataset_type=grain",
    "grain_file_type=text",
    "tokenizer_path=byte",
    "vocab_size=259",
    "max_target_length=16",
    "per_device_batch_size=2",
    "enable_data_shuffling=false",
    "grain_worker_count=0",
]


@pytest.fixture
def files(tmp_path):
    """Writes documents and returns the words that name them."""

    def write(*documents, folder="in", key="grain_train_files"):
        (tmp_path / folder).mkdir()
        for number, document in enumerate(documents):
            (tmp_path / folder / f"{number}.txt").write_text(document)
        return [*SMALL, f"{key}={tmp_path / folder}"]

    return write


def replaced(args, *others):
    """Words with others in the place of those for the same keys."""
    return list({word.partition("=")[0]: word for word in [*args, *others]}.values())


def table(text):
    """{name: value} of the lines in two columns at the end."""
    return dict(
        re.split(r"\s{2,}", line)
        for line in text.splitlines()
        if re.fullmatch(r"\w.*?\s{2,}\S.*", line)
    )


def test_inspect_shows_segments_padding_and_statistics(files, capsys):
    # Pairs of each document with beginning and end: 4, 6 and 9; rows of 16: 4 + 6, then 9; 13
    # places stay empty.
    assert main(["data", "inspect", *files("abc", "de\nfg", "hijklmno")]) == 0
    text = capsys.readouterr().out
    assert "batch 0, row 0: 2 segments, 10 of 16 positions" in text
    assert (
        "   1 │ <bos>abc<eos>\n   2 │ <bos>de\n     │ fg<eos>\n     · 6 positions of padding\n"
        in text
    )
    assert (
        "batch 0, row 1: 1 segment, 9 of 16 positions\n   1 │ <bos>hijklmno<eos>\n     · 7 "
        "positions of padding\n" in text
    )
    numbers = table(text)
    assert numbers["documents"] == "3"
    assert (numbers["batches"], numbers["rows"], numbers["tokens"]) == ("1", "2", "19")
    assert numbers["packing efficiency"] == f"{19 / 32:.2%}"
    assert (numbers["segments per row, mean"], numbers["segments per row, max"]) == ("1.50", "2")
    lengths = [numbers[f"tokens per segment, {name}"] for name in ("mean", "median", "max")]
    assert lengths == [f"{19 / 3:.1f}", "6.0", "9"]
    assert "truncated documents" not in numbers  # text is split, not truncated
    assert "\x1b" not in text  # not a terminal


def test_inspect_counts_truncated_documents(files, capsys):
    # 14 bytes make 15 pairs, 15 make 16 and fit, 16 make 17 and are cut.
    args = files("a" * 14, "b" * 15, "c" * 16, "d" * 40)
    truncated = [*args, "use_truncation=true"]
    assert main(["data", "inspect", *truncated, "--batches", "2", "--rows", "0"]) == 0
    text = capsys.readouterr().out
    assert "│" not in text
    assert table(text)["truncated documents"] == "50.00%"
    assert "tokens/s after the first batch" in table(text)
    assert main(["data", "inspect", *args, "--batches=9", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)["summary"]
    assert "truncated" not in summary
    # Pairs in pieces of at most 16: 15, 16, 16 + 1, 16 + 16 + 9, of which 15 and 1 share a row.
    assert (summary["rows"], summary["tokens"]) == (6, 15 + 16 + 17 + 41)


def test_each_segment_has_its_colour_on_a_terminal(files, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["data", "inspect", *files("abc", "de", "fghijklmnopqr")]) == 0
    text = capsys.readouterr().out
    colours = {part: re.search(rf"\x1b\[([\d;]*)m{part}", text)[1] for part in ("abc", "de", "fgh")}
    assert colours["abc"] != colours["de"]
    assert colours["abc"] == colours["fgh"]  # the first of a row
    assert re.search(r"\x1b\[1;7;\d+m<bos>", text)


def test_control_characters_are_escaped(files, capsys, monkeypatch):
    evil = "a\x1b[2J\x07\x9b31m\r\u202eb"
    args = replaced(files(evil), "max_target_length=32", "generate_padding_batch_train=true")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["data", "inspect", *args]) == 0
    text = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)  # without our own colours
    assert r"a\x1b[2J\x07\x9b31m\r\u202eb" in text
    assert not set("\x07\x9b\r\u202e\x1b") & set(text)
    assert visible("tab\tand\nline, é ✓ 漢") == "tab\tand\nline, é ✓ 漢"


def test_inspect_json(files, capsys):
    assert main(["data", "inspect", *files("abc", "é", "hijklmnopqr"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    first = found["batches"][0][0]
    assert first == [
        {"inputs": [1, 100, 101, 102], "targets": [100, 101, 102, 2], "text": "<bos>abc<eos>"},
        {
            "inputs": [1, 0xC3 + 3, 0xA9 + 3],
            "targets": [0xC3 + 3, 0xA9 + 3, 2],
            "text": "<bos>é<eos>",
        },
    ]
    assert found["summary"]["documents"] == 3


def test_inspect_evaluation(files, capsys, tmp_path):
    args = files("training text", folder="eval", key="grain_eval_files")
    assert main(["data", "inspect", *args, "--eval"]) == 0
    text = capsys.readouterr().out
    assert "<bos>training text<eos>" in text
    assert "batch 0, row 1: 0 segments, 0 of 16 positions" in text  # the last batch is padded
    assert main(["data", "inspect", *SMALL, "--eval"]) == 2
    assert "has no evaluation data" in capsys.readouterr().err


def written(tmp_path, rows):
    """The words for rows of fine-tuning."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [f"grain_train_files={tmp_path}/rows.jsonl", "grain_file_type=jsonl"]
    return replaced(SMALL, *files, "per_device_batch_size=1")


def test_inspect_marks_tokens_trained_on_and_counts_dropped_rows(tmp_path, capsys):
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "yz"}]
    template = "chat_template={% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    rows = [
        {"prompt": "ab", "completion": "cd"},
        {"messages": turns},
        {"messages": turns[:1]},
    ]
    args = [*written(tmp_path, rows), "use_sft=true", "sft_train_on_completion_only=true"]
    # Without a generation prompt, the header of a turn is the assistant's.
    assert main(["data", "inspect", *args, template]) == 0
    text = capsys.readouterr().out
    assert "   1 │ <bos>ab⟦cd<eos>⟧\n   2 │ u:x;⟦a:yz;⟧\n" in text
    numbers = table(text)
    assert (numbers["rows"], numbers["tokens"], numbers["tokens trained on"]) == ("1", "13", "8")
    path = tmp_path / "rows.jsonl"
    assert f"no token is trained on: 1, first {path}, line 3\n" in text
    assert f"not learn to stop: 1, first {path}, line 2\n" in text
    assert main(["data", "inspect", *args, template, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [segment["loss_mask"] for segment in shown["batches"][0][0]] == [
        [0, 0, 1, 1, 1],
        [0, 0, 0, 1, 1, 1, 1, 1],
    ]
    assert [report["rows"] for report in shown["summary"]["reports"]] == [1, 1]


GOOD = {"prompt": "ab", "completion": "cd"}


def write_lines(tmp_path, *lines):
    """The words for a file of these lines, of which a batch reads four rows."""
    args = written(tmp_path, [])
    text = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    (tmp_path / "rows.jsonl").write_text("".join(f"{line}\n" for line in text))
    return [*args, "use_sft=true", "packing=false"]


@pytest.mark.parametrize(("limit", "code"), [(0, 1), (1, 1), (2, 0), (-1, 0)])
def test_inspect_lists_bad_rows_and_shows_the_good_ones(tmp_path, capsys, limit, code):
    bad = {"messages": [{"role": "nobody", "content": "x"}]}
    good = [GOOD] * 200  # more than a batch needs: the last line is read for its error alone
    args = write_lines(tmp_path, GOOD, '{"prompt":', *good, bad)
    assert main(["data", "inspect", *args, f"max_bad_records={limit}"]) == code
    text, path = capsys.readouterr().out, tmp_path / "rows.jsonl"
    effect = "stops at them" if code else "skips them"
    lines = text[text.index("bad rows") :].splitlines()
    assert lines[0] == f"bad rows: 2 among 203 rows; with max_bad_records={limit} training {effect}"
    assert lines[1].startswith(f"{path}, line 2: invalid JSON")
    assert lines[2].startswith(f"{path}, line 203: message 0 of column messages has the role 'nob")
    assert len(lines) == 3
    assert "<bos>abcd<eos>" in text.replace("⟦", "").replace("⟧", "")


def test_inspect_writes_bad_rows_as_json(tmp_path, capsys):
    args = write_lines(tmp_path, GOOD, "[1]", GOOD)
    assert main(["data", "inspect", *args, "--json"]) == 1
    reason = "a list instead of a JSON object with columns"
    assert json.loads(capsys.readouterr().out)["summary"]["bad_rows"] == [
        {"file": str(tmp_path / "rows.jsonl"), "location": "line 2", "reason": reason}
    ]


def test_inspect_of_bad_rows_alone_is_an_error_that_lists_them(tmp_path, capsys):
    args = write_lines(tmp_path, *[{"prompt": "x", "completion": ""}] * 7)
    assert main(["data", "inspect", *args]) == 2
    lines = capsys.readouterr().err.splitlines()
    listed = [line for line in lines if "column completion is empty" in line]
    assert [line.split(",")[1].split(":")[0] for line in listed] == [
        f" line {number}" for number in range(1, 8)
    ]
    assert not any("data inspect" in line for line in lines)


def test_inspect_pads_data_that_does_not_fill_a_batch(tmp_path, capsys, caplog):
    """Training refuses two rows for a batch of eight, unless `steps` repeats them."""
    args = replaced(write_lines(tmp_path, GOOD, GOOD), "per_device_batch_size=8")
    assert main(["data", "inspect", *args, "--json"]) == 0
    printed = capsys.readouterr()
    shown = json.loads(printed.out)
    assert [[row["inputs"] for row in rows] for rows in shown["batches"][0]] == [
        [[1, 100, 101, 102, 103]]
    ] * 2
    assert "one batch needs" in shown["summary"]["too_little_data"]
    assert "training would refuse this data: grain_train_files has 10 tokens" in printed.err
    assert main(["data", "inspect", *args, "steps=3", "--json"]) == 0
    assert "too_little_data" not in json.loads(capsys.readouterr().out)["summary"]


def test_inspect_shows_both_sides_of_pairs(tmp_path, capsys):
    args = written(tmp_path, [{"prompt": "ab", "chosen": "c", "rejected": "de"}])
    assert main(["data", "inspect", *args, "use_dpo=true", "packing=false"]) == 0
    text = capsys.readouterr().out
    assert "batch 0, row 0: a pair, 9 of 32 positions\n" in text
    assert "  chosen │ <bos>ab⟦c<eos>⟧\nrejected │ <bos>ab⟦de<eos>⟧\n" in text
    numbers = table(text)
    assert (numbers["rows"], numbers["tokens"], numbers["tokens trained on"]) == ("1", "9", "5")


@pytest.mark.parametrize("method", ["use_sft", "use_dpo"])
def test_throughput_counts_the_tokens_of_rows(method, tmp_path, capsys):
    pair = {"prompt": "ab", "chosen": "c", "rejected": "de", "completion": "de"}
    args = [*written(tmp_path, [pair] * 2), f"{method}=true", "packing=false", "steps=2"]
    assert main(["data", "throughput", *args]) == 0
    # <bos>ab, then c<eos> and de<eos>: 4 + 5 targets; the row is ab, de: 5
    counts = {"use_sft": "10 of 32 positions", "use_dpo": "18 of 64 positions"}
    assert table(capsys.readouterr().out)["tokens"] == counts[method]


def test_inspect_colours_tokens_trained_on_in_a_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    args = [*written(tmp_path, [{"prompt": "ab", "completion": "cd"}]), "use_sft=true"]
    assert main(["data", "inspect", *args, "sft_train_on_completion_only=true"]) == 0
    text = capsys.readouterr().out
    assert "\x1b[90mab\x1b[0m\x1b[32mcd\x1b[0m" in text
    assert "⟦" not in text


def test_inspect_without_a_tokenizer_shows_ids(capsys):
    args = [
        "dataset_type=synthetic",
        "vocab_size=50",
        "max_target_length=8",
        "per_device_batch_size=1",
    ]
    assert main(["data", "inspect", *args]) == 0
    text = capsys.readouterr().out
    assert re.search(r"   1 │ \d+( \d+){8}\n", text)
    assert "documents" not in table(text)


def test_prepare_then_train_from_it(files, capsys, tmp_path):
    args = files(*(f"document {number}" * (number % 3 + 1) for number in range(12)))
    out = tmp_path / "out"
    assert (
        main(["data", "prepare", *args, "--out", str(out), "--shard-documents=5", "--workers", "1"])
        == 0
    )
    text = capsys.readouterr().out
    tokens = sum(len(f"document {number}" * (number % 3 + 1)) + 2 for number in range(12))
    numbers = table(text)
    assert (numbers["documents"], numbers["tokens"], numbers["shards"]) == (
        "12",
        f"{tokens:,}",
        "3",
    )
    assert numbers["bad records"] == "0"
    assert "tokens/s" in numbers
    line = shlex.split(text.splitlines()[-1])
    assert " ".join(line) == (
        f"dataset_type=grain grain_file_type=arrayrecord grain_train_files={out}/*.array_record "
        "train_data_columns=[tokens] tokenize_train_data=false"
    )
    actual, reference = (
        list(make_train_iterator(load_config(replaced(args, *more)))) for more in ([], line)
    )
    assert len(actual) == len(reference) > 3
    for one, other in zip(actual, reference, strict=True):
        assert all((one[name] == other[name]).all() for name in one)
    assert main(["data", "inspect", *replaced(args, *line)]) == 0
    assert "<bos>document 0<eos>\n" in capsys.readouterr().out
    assert main(["data", "inspect", *replaced(args, *line, "tokenizer_path=")]) == 0
    assert re.search(r"│ 1 103 114 102", capsys.readouterr().out)
    assert main(["data", "prepare", *args, "--out", str(out), "--shard-documents=5"]) == 0
    assert "nothing was missing" in capsys.readouterr().out
    assert (
        main(["data", "prepare", *args, "add_bos=false", "--out", str(out), "--shard-documents=5"])
        == 2
    )
    assert "was begun with beginning [1]" in capsys.readouterr().err


BAD = {
    "nothing to do": ([], "name a task: maxtext data inspect|prepare"),
    "unknown task": (["show"], "unknown task 'show' of maxtext data; name a task"),
    "misspelt task": (["inspct"], "did you mean inspect?"),
    "batches 0": (["inspect", "--batches", "0"], "--batches takes a whole number of at least 1"),
    "rows -1": (["inspect", "--rows", "-1"], "--rows takes a whole number of at least 0, not '-1'"),
    "rows x": (["inspect", "--rows=x"], "--rows takes a whole number"),
    "unknown option": (["inspect", "--colour"], "unknown option '--colour'"),
    "unknown key": (["inspect", "grain_files=x"], "unknown key 'grain_files'"),
    "missing files": (["inspect", *SMALL, "grain_train_files=/nowhere/*.txt"], "no file matches"),
    "no out": (["prepare", *SMALL], "--out DIR is missing: maxtext data prepare"),
    "out without a value": (["prepare", *SMALL, "--out"], "--out needs a value"),
    "workers 0": (
        ["prepare", "--out", "x", "--workers", "0", *SMALL],
        "--workers takes a whole number of at least 1",
    ),
    "source of no documents": (
        ["prepare", "--out", "x", "dataset_type=synthetic"],
        "cannot be prepared",
    ),
    "files of nothing": (["throughput", *SMALL, "grain_train_files=/nowhere"], "does not exist"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args, message = BAD[case]
    assert main(["data", *args]) == 2
    assert message in capsys.readouterr().err
    assert not os.listdir(tmp_path)


def test_fewest_devices():
    base = {
        "num_slices": -1,
        "per_device_batch_size": 12,
        "ici_fsdp_parallelism": -1,
        "dcn_data_parallelism": -1,
    }
    assert fewest_devices(base) == (1, 1)
    assert fewest_devices(base | {"ici_tensor_parallelism": "4"}) == (4, 1)
    assert fewest_devices(base | {"ici_tensor_parallelism": 4, "dcn_data_parallelism": 2}) == (8, 2)
    assert fewest_devices(base | {"num_slices": 3}) == (3, 3)
    assert fewest_devices(base | {"per_device_batch_size": "0.25"}) == (4, 1)
    assert fewest_devices(base | {"per_device_batch_size": 1.5, "ici_tensor_parallelism": 3}) == (
        6,
        1,
    )
    assert fewest_devices(base | {"per_device_batch_size": "many", "num_slices": None}) == (1, 1)


def test_settings_of_a_large_machine_load_without_devices(files):
    config = load_config(
        [
            *files("abc"),
            "ici_tensor_parallelism=8",
            "dcn_data_parallelism=2",
            "ici_fsdp_parallelism=4",
        ]
    )
    assert config.num_target_devices == 64
    assert (
        load_config(replaced(SMALL, "per_device_batch_size=0.125")).global_batch_size_to_train_on
        == 1
    )


def test_throughput(files, capsys):
    # Nine documents of 15 pairs, each a row; two a batch make four, and one is left over.
    args = files(*["a" * 14] * 9)
    assert main(["data", "throughput", *args]) == 0
    numbers = table(capsys.readouterr().out)
    assert numbers["batches"].startswith("4 of ")
    assert numbers["tokens"] == "120 of 128 positions"
    rates = [
        float(numbers[name].replace(",", ""))
        for name in ("batches/s", "tokens/s", "tokens/s with padding")
    ]
    assert rates[1] == pytest.approx(rates[0] * 30, rel=0.02)
    assert rates[2] == pytest.approx(rates[0] * 32, rel=0.02)
    assert main(["data", "throughput", *args, "steps=2", "generate_padding_batch_train=true"]) == 0
    assert table(capsys.readouterr().out)["batches"] == "2"
    # Two devices share a sequence.
    assert (
        main(["data", "throughput", *replaced(args, "per_device_batch_size=0.5", "steps=5")]) == 0
    )
    assert table(capsys.readouterr().out)["tokens"] == "75 of 80 positions"


@pytest.mark.slow
def test_standalone_dataloader_module(files):
    """With worker processes, each with a stream of its own."""
    args = replaced(
        files(*["a" * 14] * 64), "grain_worker_count=2", "per_device_batch_size=4", "steps=5"
    )
    command = [sys.executable, "-m", "maxtext.standalone_dataloader", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert table(done.stdout)["batches"] == "5"
    assert table(done.stdout)["tokens"] == "300 of 320 positions"


def test_index(tmp_path, capsys):
    np.save(tmp_path / "a.npy", np.arange(40, dtype=np.uint16))
    np.arange(25, dtype=np.uint16).tofile(tmp_path / "b.npy")
    out = tmp_path / "index.json"
    command = ["data", "index", "--out", str(out), "--length", "8", "--dtype=uint16", str(tmp_path)]
    assert main(command) == 0
    assert "2 files, 65 tokens, 8 rows of 8" in capsys.readouterr().out
    args = [
        "dataset_type=olmo_grain",
        f"olmo_index_path={out}",
        "max_target_length=8",
        "vocab_size=64",
    ]
    args += ["per_device_batch_size=1", "enable_data_shuffling=false"]
    batches = list(make_train_iterator(load_config(args)))
    assert [batch["inputs"][0].tolist() for batch in batches[:5]] == np.arange(40).reshape(
        5, 8
    ).tolist()
    assert len(batches) == 8
    assert main(["data", "index", "--out", str(out), str(tmp_path)]) == 2
