"""`maxtext eval`: arguments, errors before weights are loaded, tables and reports."""

import json
import shlex
import sys

import numpy as np
import pytest

from maxtext.cli.arguments import parse
from maxtext.cli.commands import COMMANDS
from maxtext.cli.eval import EvalArguments, read_arguments
from maxtext.cli.main import main
from maxtext.common.errors import ConfigError

SETTINGS = ["dtype=float32", "weight_dtype=float32", "matmul_precision=highest"]
SETTINGS += ["attention=dot_product", "max_target_length=64"]


def parse_arguments(args) -> EvalArguments:
    return read_arguments(parse("eval", COMMANDS["eval"], args))


def test_arguments():
    line = "m --tasks a,b --limit=3 --num-fewshot 0 --json o.json dtype=x --apply-chat-template"
    parsed = parse_arguments(shlex.split(f"{line} --include-path tasks --adapter lora"))
    assert (parsed.file, parsed.mode, parsed.value) == (None, "--tasks", "a,b")
    names = ("--limit", "--num-fewshot", "--apply-chat-template", "--include-path", "--seed")
    assert [parsed.options[name] for name in names] == [3, 0, True, "tasks", 0]
    names = ["load_parameters_path=m", "dtype=x", "lora_input_adapters_path=lora"]
    assert parsed.overrides == names
    assert parsed.out is not None
    assert parsed.out.name == "o.json"


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["m"], "name files of text, or give one of --perplexity, --tasks, --builtin"),
        (["m", "--tasks", "a", "--perplexity", "f"], "exclude each other"),
        (["m", "--tasks"], "needs a value"),
        (["m", "--perplexity", "f", "--window", "1"], "--window takes a whole number"),
        (["m", "--perplexity", "f", "--stride", "0"], "--stride takes a whole number"),
        (
            ["m", "--perplexity", "f", "--limit", "2"],
            "it needs --tasks or --builtin",
        ),
        (["m", "--tasks", "a", "--window", "8"], "--window and --tasks exclude each other"),
        (["m", "--tasks", "a", "--limit", "x"], "--limit takes a whole number"),
        (["m", "--tasks", "a", "--batch-size", "8"], "unknown option '--batch-size'"),
        (["m", "--tasks", "a", "other"], "unknown argument 'other'"),
        (["m", "--tasks", "a", "--json", "."], "is a folder"),
        (["m", "--tasks", "a", "--json", f"{__file__}/x.json"], "is not a writable folder"),
    ],
)
def test_refusals(args, reason):
    with pytest.raises(ConfigError, match=reason):
        parse_arguments(args)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--tasks", "a"], "which model"),
        (["no/such/folder", "--perplexity", "x"], "neither a folder nor the name of a model"),
        (["MODEL", "--perplexity", "none.txt"], "none.txt does not exist"),
        (["MODEL", "--perplexity", __file__, "--window", "4096"], "raise that key"),
        (["MODEL", "--perplexity", __file__, "use_chat_template=true"], "--apply-chat-template"),
        (["MODEL", "--tasks", ","], "needs names"),
        (["MODEL", "--builtin", "mmlu"], "no benchmark 'mmlu'"),
    ],
)
def test_errors_before_weights_are_loaded(folder, loaded, capsys, args, reason):
    args = [str(folder) if arg == "MODEL" else arg for arg in args]
    assert main(["eval", *args, "max_target_length=64"]) == 2
    assert reason in capsys.readouterr().err
    assert not loaded


def test_a_missing_package_names_its_extra(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["eval", str(folder), "--tasks", "a"]) == 2
    assert 'pip install -e ".[eval]"' in capsys.readouterr().err


def test_perplexity(chat_model, tmp_path, capsys):
    folder, llm = chat_model
    text, out = tmp_path / "text.txt", tmp_path / "deep" / "out.json"
    text.write_text("the quick brown fox jumps over the lazy dog")
    args = ["eval", str(folder), "--perplexity", str(text), "--json", str(out)]
    assert main(args + SETTINGS) == 0
    ids = llm.tokenizer.encode_prompt(text.read_text())
    logits = np.asarray(llm.logits(ids), np.float64)[:-1]
    losses = np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(ids) - 1), ids[1:]]
    report = json.loads(out.read_text())
    assert report["tokens"] == len(ids) - 1
    assert report["bytes"] == len(text.read_bytes())
    assert report["nll_per_token"] == pytest.approx(losses.mean(), abs=1e-4)
    assert report["settings"]["window"] == report["settings"]["stride"] == 64
    assert report["settings"]["dtype"] == "float32"
    assert report["environment"]["jax"]
    table = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert float(table["nll_per_token"]) == pytest.approx(losses.mean(), rel=1e-5)
    assert table["tokens"] == str(len(ids) - 1)


def test_tasks(chat_model, tmp_path, capsys, monkeypatch):
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    data, out = tmp_path / "rows.jsonl", tmp_path / "out.json"
    data.write_text("".join(json.dumps({"q": word}) + "\n" for word in ("fox", "dog", "tea")))
    (tmp_path / "first.yaml").write_text(
        "task: first\ndataset_path: json\ntest_split: test\noutput_type: multiple_choice\n"
        f"dataset_kwargs: {{data_files: {{test: {data}}}}}\n"
        'doc_to_text: "{{q}}"\ndoc_to_choice: ["a", "b"]\ndoc_to_target: 0\n'
        "metric_list: [{metric: acc}]\n"
    )
    args = ["eval", str(chat_model[0]), "--tasks", "first", "--include-path", str(tmp_path)]
    assert main([*args, "--limit", "2", "--json", str(out), *SETTINGS]) == 0
    report = json.loads(out.read_text())
    score = report["results"]["first"]["acc,none"]
    assert score in (0, 0.5, 1)
    assert report["n-samples"]["first"] == {"original": 3, "effective": 2}
    assert "acc_stderr,none" in report["results"]["first"]
    assert (report["settings"]["limit"], report["truncated_requests"]) == (2, 0)
    assert f"first  acc     {score:.4f}" in capsys.readouterr().out


def test_benchmarks(chat_model, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out.json"
    files = "maxtext.inference.evaluation.run_benchmarks.STDLIB_FILES"
    monkeypatch.setattr(files, "{stdlib}/this.py")
    args = ["eval", str(chat_model[0]), "--builtin", "copy,stdlib", "--limit", "3", "--seed", "5"]
    settings = [*SETTINGS[:-1], "max_target_length=512"]
    assert main([*args, "--apply-chat-template", "--json", str(out), *settings]) == 0
    report = json.loads(out.read_text())
    assert report["results"]["copy"]["samples"] == 3
    assert list(report["results"]["copy"]["groups"]) == ["4 letters", "8 letters", "16 letters"]
    assert report["results"]["stdlib"]["bytes"] > 500
    assert report["settings"]["seed"] == 5
    assert "copy       accuracy" in capsys.readouterr().out
