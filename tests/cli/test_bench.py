"""`maxtext bench inference`: its table, its JSON file and its errors."""

import json

import pytest

from maxtext.cli.main import main

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
        ([], "what is to be measured? maxtext bench inference"),
        (["training"], "what is to be measured?"),
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
    ],
)
def test_errors(args, sentence, capsys):
    assert main(["bench", *args]) == 2
    assert sentence in capsys.readouterr().err
