"""`maxtext tokenizer train` and `inspect`, as a person runs them."""

import json

import pytest
import tokenizers

from maxtext.cli.main import main
from maxtext.tokenizers import open_tokenizer
from tests.tokenizers.tiny import VARIED_CORPUS, write_bpe


@pytest.fixture
def text(tmp_path):
    (tmp_path / "data").mkdir()
    for place, one in enumerate(VARIED_CORPUS):
        (tmp_path / "data" / f"{place:02d}.txt").write_text(one)
    return tmp_path / "data"


@pytest.mark.parametrize(
    ("kind", "out", "opened"),
    [
        ("bpe", "made", "huggingface"),
        ("sentencepiece", "made.model", "sentencepiece"),
        ("sentencepiece-bpe", "made.model", "sentencepiece"),
    ],
)
def test_train_and_use(kind, out, opened, text, tmp_path, capsys):
    place = str(tmp_path / out)
    args = ["tokenizer", "train", "--kind", kind, "--vocab-size", "350", "--out", place]
    assert main([*args, f"{text}/*.txt"]) == 0
    used = sum(map(len, VARIED_CORPUS))
    assert capsys.readouterr().out == f"wrote {place}: 350 tokens from {used:,} characters\n"
    tokenizer = open_tokenizer(place)
    assert (tokenizer.kind, tokenizer.vocab_size) == (opened, 350)
    assert main([*args, str(text)]) == 2
    assert "exists: choose another path, or replace it with --overwrite" in capsys.readouterr().err
    assert main([*args, "--overwrite", str(text)]) == 0


def test_train_on_a_sample_of_records(text, tmp_path, capsys):
    rows = [json.dumps({"id": place, "body": one}) for place, one in enumerate(VARIED_CORPUS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    args = ["--column=body", "max_corpus_chars=2000", "vocab_size=300", f"--out={tmp_path}/made"]
    assert main(["tokenizer", "train", *args, str(tmp_path / "rows.jsonl")]) == 0
    assert "tokens from 2,000 characters, a sample of the text" in capsys.readouterr().out
    assert (
        main(
            [
                "tokenizer",
                "train",
                f"--out={tmp_path}/all",
                "--column=body",
                str(tmp_path / "rows.jsonl"),
            ]
        )
        == 0
    )
    assert "the text has no more, 32,000 were requested" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "name a task: maxtext tokenizer train|inspect"),
        (["learn"], "unknown task 'learn' of maxtext tokenizer"),
        (["train", "DATA"], "--out PATH is missing"),
        (["train", "--out", "OUT"], "name the training files"),
        (["train", "--out"], "--out needs a value"),
        (["train", "--out", "OUT", "DATA/none*"], "no file matches"),
        (["train", "--out", "OUT", "DATA/none.txt"], "does not exist or is not a file"),
        (["train", "--out", "OUT", "--kind", "args", "DATA"], "--kind takes bpe or sentencepiece"),
        (["train", "--out", "OUT", "--vocab-size", "200", "DATA"], "vocab_size=200 is too small"),
        (["train", "--out", "OUT", "--vocab-size", "many", "DATA"], "vocab_size='many'"),
        (
            ["train", "--out", "OUT", "--max-chars", "0", "DATA"],
            "max_corpus_chars=0 is out of range",
        ),
        (["train", "--out", "OUT", "--fast", "DATA"], "unknown option '--fast'"),
        (
            ["train", "--out", "OUT", "learning_rate=1", "DATA"],
            "learning_rate has no effect on tokenizer training",
        ),
        (["train", "--out", "OUT.json", "DATA"], "the kind bpe writes a folder"),
        (
            ["train", "--out", "OUT", "--kind", "sentencepiece", "DATA"],
            "a name that ends in .model",
        ),
        (
            ["train", "--out", "OUT.model", "--kind", "sentencepiece", "DATA"],
            "cannot be trained on this text: Vocab",
        ),
        (["train", "--out", "OUT", "ROWS"], "rows.jsonl has no column 'text', only id, body"),
        (
            ["train", "--out", "OUT", "--column", "id", "ROWS"],
            "column 'id' has int instead of text",
        ),
        (["train", "--out", "OUT", "--column", "body", "BAD"], "bad.jsonl, line 2"),
        (["train", "--out", "OUT", "EMPTY"], "all 1 files are empty"),
        (["inspect"], "name a tokenizer"),
        (["inspect", "OUT"], "does not exist"),
        (["inspect", "ROWS"], "is not a Hugging Face tokenizer"),
        (["inspect", "DATA"], "has no tokenizer"),
    ],
)
def test_bad_arguments(args, message, text, tmp_path, capsys):
    files = {
        "rows.jsonl": '{"id": 1, "body": "x"}\n',
        "bad.jsonl": '{"body": "x"}\n{"body": \n',
        "empty.txt": "",
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    names = {"DATA": text, "ROWS": tmp_path / "rows.jsonl", "BAD": tmp_path / "bad.jsonl"}
    names |= {"EMPTY": tmp_path / "empty.txt", "OUT": tmp_path / "made"}
    for name, place in names.items():
        args = [word.replace(name, str(place)) for word in args]
    before = sorted(tmp_path.rglob("*"))
    assert main(["tokenizer", *args]) == 2
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before, "nothing is left behind"


def test_inspect(tmp_path, capsys):
    folder = str(write_bpe(tmp_path / "bpe"))
    text = "the quick\n[bold]fox 🙂"
    assert main(["tokenizer", "inspect", folder, text]) == 0
    said = capsys.readouterr().out
    encoded = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json").encode(
        text, add_special_tokens=False
    )
    tokens = encoded.ids
    for expected in (
        "huggingface, 400 ids",
        "bos  1  <s>",
        "eos  2  </s>",
        "pad  0  <pad>",
        "chat template  yes",
    ):
        assert expected in said
    assert (
        "".join(f"{piece}({token}) " for piece, token in zip(encoded.tokens, tokens, strict=True))
        in said
    )
    assert f"{len(tokens)} tokens for 24 bytes, {24 / len(tokens):.2f} bytes per token" in said
    assert said.endswith("round trip: exact\n")
    assert main(["tokenizer", "inspect", folder, text, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [token["id"] for token in found["tokens"]] == tokens
    assert found["special"]["eos"] == {"id": 2, "piece": "</s>"}
    assert found["round_trip"] is True


def test_inspect_reports_inexact_round_trip(capsys):
    assert main(["tokenizer", "inspect", "byte", "a\ud800"]) == 0
    assert "round trip: differs, 'a?'" in capsys.readouterr().out
    assert main(["tokenizer", "inspect", "byte"]) == 0
    assert "round trip" not in capsys.readouterr().out
    assert main(["tokenizer", "inspect", "byte", ""]) == 0
    assert "0 tokens for 0 bytes\n" in capsys.readouterr().out
