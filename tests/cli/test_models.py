"""`maxtext models`: the table, one model in parts, and what the documentation says of them."""

import re
from pathlib import Path

import pytest

from maxtext.cli.main import main
from maxtext.cli.models import table
from maxtext.configs import fields

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.fixture(scope="module")
def printed():
    return table()


def numbers(text):
    return int(text.replace(",", ""))


@pytest.mark.slow
def test_every_name_has_a_line(printed):
    header, *rows = printed.split("\n\n")[0].splitlines()
    assert header.split() == [
        "name",
        "family",
        "layers",
        "width",
        "vocabulary",
        "parameters",
        "active",
        "runs",
    ]
    assert [row.split()[0] for row in rows] == fields.choices("model_name")
    assert len({len(row) for row in [header, *rows]}) == 1  # flush right


def test_sizes_are_as_published(printed):
    rows = {row.split()[0]: row.split()[1:] for row in printed.split("\n\n")[0].splitlines()}
    assert rows["llama2-7b"] == [
        "llama2",
        "32",
        "4,096",
        "32,000",
        "6,738,415,616",
        "6,738,415,616",
        "yes",
    ]
    # Pairs of layers count as two. 46.7B, of which 12.9B are active: 6 of 8 experts rest in each of
    # 32 layers.
    assert rows["gemma2-9b"][:2] == ["gemma2", "42"]
    assert numbers(rows["mixtral-8x7b"][4]) == 46_702_792_704
    assert numbers(rows["mixtral-8x7b"][5]) == 46_702_792_704 - 32 * 6 * 3 * 4096 * 14336


def test_the_environment_does_not_change_the_table(monkeypatch, capsys):
    monkeypatch.setenv("M_VOCAB_SIZE", "5")
    assert main(["models", "gpt3-52k"]) == 0
    assert "vocabulary 1,024" in capsys.readouterr().out


def test_the_documentation_has_the_same_table(printed):
    documented = re.search(r"```text\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert documented[1] == printed, (
        "docs/models.md is out of date: put the output of `maxtext models` there"
    )


def test_the_documentation_names_models_that_exist():
    rows = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    names = {name for row in rows for name in re.findall(r"`([\w.*-]+)`", row.split("|")[1])}
    patterns = {name.removesuffix("-*") for name in names}
    assert patterns
    assert all(
        any(known.startswith(name) for known in fields.choices("model_name")) for name in patterns
    )


def test_one_model_in_detail(capsys):
    assert main(["models", "qwen3-30b-a3b"]) == 0
    title, parts, note = capsys.readouterr().out.split("\n\n")
    assert title == "qwen3-30b-a3b: qwen3_moe, 48 layers, emb_dim 2,048, vocabulary 151,936"
    counts = {line[:12].strip(): numbers(line.split()[-2]) for line in parts.splitlines()}
    # 48 layers: 32 query heads of 128 over 4; 128 experts of 768, of which 8; norms of the width
    # and of the heads.
    expected = {
        "embedding": 151936 * 2048,
        "attention": 48 * (2 * 2048 * 4096 + 2 * 2048 * 512),
        "experts": 48 * 128 * 3 * 2048 * 768,
        "routers": 48 * 2048 * 128,
        "norms": 48 * (2 * 2048 + 2 * 128) + 2048,
        "output head": 2048 * 151936,
    }
    assert counts == expected | {
        "parameters": sum(expected.values()),
        "active": sum(expected.values()) - 48 * 120 * 3 * 2048 * 768,
    }
    assert "100.0%" in parts
    assert note.startswith("active:")


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["llama2-8b"], "unknown model_name 'llama2-8b'; did you mean"),
        (["llama2-7b", "llama2-13b"], "unknown argument 'llama2-13b': maxtext models [NAME]"),
        (["model_name=llama2-7b"], "unknown model_name 'model_name=llama2-7b'"),
        (["--all"], "unknown option '--all'"),
    ],
)
def test_bad_arguments(args, sentence, capsys):
    assert main(["models", *args]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error


def test_models_that_cannot_run_are_marked(printed, capsys):
    marks = {row.split()[0]: row.split()[-1] for row in printed.split("\n\n")[0].splitlines()[1:]}
    assert marks["qwen3-30b-a3b"] == "yes"
    assert marks["deepseek3-671b-batchsplit"] == "no"  # use_batch_split_schedule does not act yet
    assert main(["models", "deepseek3-671b-batchsplit"]) == 0
    assert "cannot run: use_batch_split_schedule=True" in capsys.readouterr().out
    assert main(["train", "model_name=deepseek3-671b-batchsplit", "dataset_type=synthetic"]) == 2
