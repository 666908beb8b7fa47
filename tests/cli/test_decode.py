"""`maxtext decode`, with a fake model and with a real one."""

import io
import subprocess
import sys

import numpy as np
import pytest

from maxtext.cli.main import main
from tests.cli.fake_llm import FakeLLM

CACHE = "jax_cache_dir=none"


def decode(folder, *args):
    return main(["decode", f"load_parameters_path={folder}", CACHE, *args])


def test_stdout_is_the_completion_and_timings_go_to_stderr(folder, loaded, capsys):
    assert decode(folder, "prompt=abc") == 0
    printed = capsys.readouterr()
    assert printed.out == "cba\n"
    assert "first token after" in printed.err
    assert "3 tokens" in printed.err


def test_prompt_and_completion_share_the_sequence(folder, loaded, capsys):
    assert decode(folder, "prompt=abcdef", "max_target_length=10") == 0
    assert capsys.readouterr().out == "fed\n"  # 10 less BOS and six bytes
    assert loaded[-1].requests[-1].prompt == [1, *(byte + 3 for byte in b"abcdef")]
    assert decode(folder, "prompt=abcdef", "max_target_length=10", "add_bos=false") == 0
    assert capsys.readouterr().out == "fedc\n"


def test_reserved_prompt_length_limits_the_completion(folder, loaded, capsys):
    assert decode(folder, "prompt=abcd", "max_target_length=8", "max_prefill_predict_length=6") == 0
    assert capsys.readouterr().out == "dc\n"


def test_keys_of_file_and_arguments_reach_the_model(folder, loaded, tmp_path):
    (tmp_path / "mine.yml").write_text(
        "base_config: base.yml\nmax_target_length: 50\ndtype: float32\n"
    )
    assert (
        main(
            [
                "decode",
                str(tmp_path / "mine.yml"),
                f"load_parameters_path={folder}",
                CACHE,
                "dtype=bfloat16",
            ]
        )
        == 0
    )
    config = loaded[-1].config
    assert config.max_target_length == 50
    assert config.dtype.value == "bfloat16"
    assert loaded[-1].checkpoint.path == folder


def test_the_preset(folder, loaded, capsys):
    assert main(["decode", "inference", f"load_parameters_path={folder}", CACHE, "prompt=ab"]) == 0
    assert capsys.readouterr().out == "ba\n"
    assert loaded[-1].requests[-1].params.max_new_tokens == 1024


def test_sampling_and_seed(folder, loaded, capsys):
    args = [
        "decode_sampling_strategy=weighted",
        "decode_sampling_temperature=0.5",
        "init_weights_seed=7",
    ]
    assert decode(folder, "prompt=a", *args) == 0
    assert capsys.readouterr().out == "a t=0.5 k=0 p=1.0 seed=7\n"


def test_chat_template(folder, loaded, capsys):
    assert decode(folder, "prompt=hi", "use_chat_template=true") == 0
    assert (
        capsys.readouterr().out
        == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"[::-1] + "\n"
    )


def test_assertion(folder, loaded, capsys):
    assert decode(folder, "prompt=abc", "autoregressive_decode_assert=cba") == 0
    capsys.readouterr()
    assert decode(folder, "prompt=abc", "autoregressive_decode_assert=cbx") == 1
    printed = capsys.readouterr()
    assert printed.out == "cba\n"
    assert "from character 2 on it should be 'x' and is 'a'" in printed.err


def test_several_completions_have_different_seeds(folder, loaded, capsys):
    args = ["multi_sampling=true", "decode_sampling_strategy=weighted", "per_device_batch_size=2"]
    assert decode(folder, "prompt=a", *args) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == [
        "--- completion 1 of 2",
        "--- completion 2 of 2",
        "a t=1.0 k=0 p=1.0 seed=0",
        "a t=1.0 k=0 p=1.0 seed=1",
    ]
    assert lines.index("--- completion 2 of 2") + 1 == lines.index("a t=1.0 k=0 p=1.0 seed=1")


def test_log_probabilities(folder, loaded, capsys):
    assert decode(folder, "prompt=ab", "return_log_prob=true") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows == [["-0.5000", str(ord("b") + 3), "'b'"], ["-1.5000", str(ord("a") + 3), "'a'"]]


def test_tokenizer_of_the_key(folder, loaded, monkeypatch, capsys):
    monkeypatch.setattr(FakeLLM, "tokenizer_class", None)
    assert decode(folder, "prompt=ab", "tokenizer_path=byte") == 0
    assert capsys.readouterr().out == "ba\n"
    assert decode(folder, "prompt=ab") == 2
    assert "came without a tokenizer: name one with tokenizer_path" in capsys.readouterr().err


def test_random_weights_are_reported(loaded, capsys):
    assert main(["decode", "model_name=gpt3-52k", "tokenizer_path=byte", "prompt=ab", CACHE]) == 0
    printed = capsys.readouterr()
    assert printed.out == "ba\n"
    assert "gpt3-52k is a name, not a checkpoint: its weights are random" in printed.err
    assert loaded[-1].checkpoint is None
    assert loaded[-1].config.model_name == "gpt3-52k"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_terminal_shows_the_prompt_dimmed_and_no_control_characters(folder, loaded, monkeypatch):
    monkeypatch.setattr("sys.stdout", out := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert decode(folder, "prompt=a\x1b[31mb\tc") == 0
    assert out.getvalue() == "\x1b[2ma\ufffd[31mb\tc\x1b[0mc\tbm13[\ufffda\n"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["prompt=", "add_bos=false"], "the prompt is empty"),
        (["prompt=abcdef", "max_target_length=7"], "max_target_length=7 leaves none"),
        (
            ["prompt=abcdef", "max_prefill_predict_length=4"],
            "7 tokens, but max_prefill_predict_length=4",
        ),
        (
            ["max_prefill_predict_length=8", "max_target_length=8"],
            "leaves nothing of max_target_length=8",
        ),
        (["multi_sampling=true"], "would repeat the same completion"),
        (
            ["multi_sampling=true", "decode_sampling_strategy=weighted", "per_device_batch_size=1"],
            "completions: raise",
        ),
        (["decode_sampling_strategy=sharp"], "decode_sampling_strategy"),
        (["enable_model_warmup=true"], "the one prompt warms it up"),
        (["--prompt=a"], "without dashes"),
    ],
)
def test_errors(args, expected, folder, loaded, capsys):
    assert decode(folder, *args) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert expected in printed.err


def test_no_model(loaded, capsys, tmp_path):
    assert main(["decode", "prompt=a"]) == 2
    assert "which model? maxtext decode MODEL prompt=TEXT" in capsys.readouterr().err
    assert main(["decode", "promt=a"]) == 2
    assert "unknown key 'promt'" in capsys.readouterr().err
    assert main(["decode", f"load_parameters_path={tmp_path / 'nowhere'}"]) == 2
    assert "is neither a folder nor the name of a model" in capsys.readouterr().err


REAL = ["dtype=float32", "attention=dot_product", "matmul_precision=highest", CACHE]


@pytest.mark.slow
def test_real_model(chat_model, greedy_ids, capsys):
    folder, llm = chat_model
    ids = llm.tokenizer.encode_prompt("the cat")
    length = len(ids) + 8
    all_ids = greedy_ids(ids, 8)
    expected = llm.tokenizer.decode(all_ids[len(ids) :])
    args = [
        f"load_parameters_path={folder}",
        "prompt=the cat",
        f"max_target_length={length}",
        *REAL,
    ]
    assert main(["decode", *args, f"autoregressive_decode_assert={expected}"]) == 0
    assert capsys.readouterr().out == f"{expected}\n"
    assert main(["decode", *args, "return_log_prob=true"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [int(row[1]) for row in rows] == all_ids[len(ids) :]
    logits = np.asarray(llm.logits(all_ids[:-1]), np.float64)[len(ids) - 1 :]
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected_log_probs = [
        row[token] for row, token in zip(log_probs, all_ids[len(ids) :], strict=True)
    ]
    np.testing.assert_allclose([float(row[0]) for row in rows], expected_log_probs, atol=2e-4)


@pytest.mark.slow
def test_python_m_maxtext_decode(chat_model, tmp_path):
    folder, _ = chat_model
    args = [
        "inference",
        f"load_parameters_path={folder.name}",
        "prompt=the",
        "max_target_length=64",
        *REAL[:3],
    ]
    args += ["max_prefill_predict_length=32", f"jax_cache_dir={tmp_path}", "run_name=mine"]
    command = [sys.executable, "-m", "maxtext.decode", *args]
    result = subprocess.run(command, capture_output=True, text=True, cwd=folder.parent)
    assert result.returncode == 0, result.stderr
    assert "first token after" in result.stderr
    assert result.stdout.endswith("\n")
    assert any(tmp_path.iterdir())  # the compilation cache
