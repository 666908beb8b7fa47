"""`maxtext bench`: its tables, its JSON files and its errors."""

import json
import re

import pytest

from maxtext.cli.main import main
from tests.diagnostics.stub_server import run_stub

TINY = [
    "model_name=llama2-7b",
    "override_model_config=true",
    "base_num_decoder_layers=1",
    "base_emb_dim=16",
    "base_mlp_dim=32",
    "base_num_query_heads=2",
    "base_num_kv_heads=2",
    "head_dim=8",
    "vocab_size=50",
    "inference_microbenchmark_loop_iters=2",
]


@pytest.mark.slow
def test_table_and_json_file(tmp_path, capsys):
    args = [
        "per_device_batch_size=3",
        "inference_microbenchmark_prefill_lengths=5,9",
        "multi_sampling=true",
        "inference_microbenchmark_num_samples=[2]",
        f"inference_microbenchmark_log_file_path={tmp_path / 'speed.json'}",
    ]
    assert main(["bench", "inference", *TINY, *args]) == 0
    written = json.loads((tmp_path / "speed.json").read_text())
    cases = [(case["stage"], case["batch"], case["length"]) for case in written["cases"]]
    assert cases == [
        *(("prefill", 1, length) for length in (5, 9)),
        *(("generate", batch, length) for batch in (1, 2, 3) for length in (5, 9)),
        ("samples", 2, 5),
    ]
    assert "cpu" in written["device"].lower()
    for case in written["cases"]:
        tokens = {
            "prefill": case["length"],
            "generate": case["batch"],
            "samples": case["batch"] * 16,
        }[case["stage"]]
        assert case["tokens/s"] == pytest.approx(tokens / case["ms"] * 1e3, rel=1e-2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["stage", "batch", "length", "ms", "tokens/s", "GB/s"]
    assert len(lines) == 1 + len(cases)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ([], "name a task: maxtext bench inference|serve"),
        (["training"], "unknown task 'training' of maxtext bench"),
        (["inference"], "which model?"),
        (
            ["inference", *TINY, "inference_microbenchmark_prefill_lengths=64,x"],
            "must be lengths of at least 1",
        ),
        (["inference", *TINY, "inference_microbenchmark_stages=dream"], "has unknown stages dream"),
        (
            ["inference", *TINY, "inference_microbenchmark_num_samples=[2]"],
            "it needs multi_sampling=true",
        ),
        (["serve", "--streams", "4", "--rate", "2"], "exclude each other"),
        (["serve", "--requests", "4", "--duration", "2"], "exclude each other"),
        (["serve", "--rate", "inf"], "--requests says how many"),
        (["serve", "--rate", "0"], "a number above 0 or inf"),
        (["serve", "--duration", "inf"], "a number above 0, not"),
        (["serve", "--streams", "0"], "of at least 1"),
        (["serve", "--prompt-tokens", "9-3"], "a range such as 64-1024"),
        (["serve", "--new-tokens", "a"], "a range such as 64-1024"),
        (["serve", "--url", "localhost:8000"], "--url takes an address"),
        (["serve", "--json", "gs://bucket/x"], "only local paths"),
        (["serve", "x=1"], "unknown argument 'x=1'"),
    ],
)
def test_errors(args, sentence, capsys):
    assert main(["bench", *args]) == 2
    assert sentence in capsys.readouterr().err


def test_serve_prints_and_writes(tmp_path, capsys):
    """Two tokens an event; the fault of one request is the exit code 1."""
    pytest.importorskip("matplotlib")
    load = ["--streams", "2", "--requests", "5", "--new-tokens", "6"]
    outputs = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    with run_stub(faults={2: 429}) as (_, url):
        assert main(["bench", "serve", "--url", url, *load, *outputs]) == 1
    written = json.loads((tmp_path / "a.json").read_text())
    assert (written["requests"], written["new_tokens"]) == (4, 24)
    assert written["errors"] == {"429": 1}
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["milliseconds", "p50", "p90", "p99", "mean", "max"]
    assert lines[1].startswith("time to first token")
    assert lines[-2].startswith("4 requests in ")
    assert lines[-1] == "errors: 1 x 429 (the first: a fault)"


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "https://127.0.0.1:1", "http://x.invalid"])
def test_serve_without_a_server(url, capsys):
    assert main(["bench", "serve", "--url", url]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"maxtext: error: (127.0.0.1:1|x.invalid:80) cannot be reached: .+", line)


def test_serve_with_a_wrong_key(capsys, monkeypatch):
    monkeypatch.delenv("MAXTEXT_API_KEY", raising=False)
    load = ["--streams", "1", "--requests", "1", "--new-tokens", "2"]
    with run_stub(key="sk-1") as (stub, url):
        for key in ([], ["--api-key", "sk-2"]):
            assert main(["bench", "serve", "--url", url, *load, *key]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert "needs another API key: --api-key KEY, or MAXTEXT_API_KEY" in line
        assert not stub.bodies
        assert main(["bench", "serve", "--url", url, *load, "--api-key", "sk-1"]) == 0
