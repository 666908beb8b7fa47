"""`maxtext train` before a model is set up, and what it says at the end."""

import io
import json
import shlex
import signal

import pytest

import maxtext
from maxtext.cli.main import main
from maxtext.cli.train import next_command
from maxtext.configs.derive import Devices
from maxtext.models.configuration import load
from maxtext.models.transformer import initial_weights, make_template
from tests.cli.conftest import SIZES
from tests.tokenizers.tiny import write_bpe


@pytest.mark.parametrize("args", [[], ["steps=3"], ["model_name=qwen3-0.6b"]], ids=str)
def test_no_data_is_one_sentence_before_the_set_up(args, capsys, monkeypatch):
    monkeypatch.setattr(
        "maxtext.common.processes.preallocate_gpu_memory", lambda: pytest.fail("the set-up began")
    )
    assert main(["train", *args]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "there is no data to train on" in line
    assert "maxtext train quickstart" in line
    assert "dataset_type=synthetic" in line


def test_a_named_dataset_is_looked_for(capsys, monkeypatch):
    class SetUp(Exception):
        pass

    def stop():
        raise SetUp

    monkeypatch.setattr("maxtext.common.processes.preallocate_gpu_memory", stop)
    for setting in ("dataset_type=synthetic", "dataset_name=c4/en:3.0.1", "dataset_path=/data"):
        with pytest.raises(SetUp):
            main(["train", setting])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """(a folder with a space in its name that holds a model with a chat template, data to train
    on)."""
    folder = tmp_path_factory.mktemp("next") / "my model"
    config = maxtext.config(**SIZES)
    maxtext.LLM(config, make_template(config), initial_weights(config)).save(folder)
    write_bpe(folder / "hugging_face")
    turns = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}]
    rows = folder.parent / "rows.jsonl"
    rows.write_text((json.dumps({"messages": turns}) + "\n") * 8)
    (folder.parent / "text.txt").write_text("a quick brown fox " * 99)
    return folder


@pytest.mark.parametrize(
    "case",
    [
        "adapter",
        pytest.param("weights", marks=pytest.mark.slow),
        pytest.param("text", marks=pytest.mark.slow),
    ],
)
def test_a_run_ends_with_a_command_that_works(base, case, capsys, monkeypatch, tmp_path):
    kind = ["grain_file_type=jsonl", f"grain_train_files={base.parent}/rows.jsonl"]
    command = ["sft", f"load_parameters_path={base}", *kind]
    if case == "adapter":
        command.append("lora_rank=2")
    if case == "text":
        sizes = [f"{key}={value}" for key, value in (SIZES | {"vocab_size": 259}).items()]
        files = f"grain_train_files={base.parent}/text.txt"
        command = ["train", *sizes, "tokenizer_path=byte", "grain_file_type=text", files]
    command += [
        "dataset_type=grain", "max_target_length=32", "per_device_batch_size=2", "steps=1",
        "grain_worker_count=0", "enable_tensorboard=false", "jax_cache_dir=none",
        f"base_output_directory={tmp_path}",
    ]  # fmt: skip
    assert main(command) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("next: maxtext ")
    words = shlex.split(last)[2:]
    assert words[0] == ("decode" if case == "text" else "chat")
    assert ("--adapter" in words) == (case == "adapter")
    monkeypatch.setattr("sys.stdin", io.StringIO("a b\n"))
    assert main([*words, "jax_cache_dir=none"]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("name", ["", "run_name=mine"])
def test_a_stopped_run_ends_with_the_command_that_continues_it(name):
    """A name that comes from the clock is added, since the next start would have another."""
    data = ["dataset_type=grain", "grain_train_files=rows of mine.jsonl"]
    args = ["sft", *data, *([name] if name else [])]
    config = load("sft.yml", args[1:], environ={}, devices=Devices(1))
    words = shlex.split(next_command(config, signal.SIGTERM, args))
    assert words == ["maxtext", *args, *([] if name else [f"run_name={config.run_name}"])]


def test_a_reward_run_ends_with_the_command_that_trains_with_it(tmp_path):
    args = ["load_parameters_path=my model", f"base_output_directory={tmp_path}", "run_name=judge"]
    data = ["dataset_type=grain", "grain_train_files=pairs.jsonl"]
    config = load("reward.yml", [*args, *data], environ={}, devices=Devices(1))
    assert next_command(config, None, ["reward", *args]) == "", "it wrote no model"
    reward_model = tmp_path / "judge" / "reward_model"
    reward_model.mkdir(parents=True)
    words = shlex.split(next_command(config, None, ["reward", *args]))
    assert words == [
        "maxtext", "grpo", "my model", "problems.jsonl", f"reward_model_path={reward_model}"
    ]  # fmt: skip
