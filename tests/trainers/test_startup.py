"""The keys that configure JAX for the whole process act at every entry."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from maxtext import LLM, tune
from maxtext.cli.main import main
from maxtext.common.errors import ConfigError
from maxtext.configs.startup import use_compilation_cache

FLAGS = (
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_use_shardy_partitioner",
)
TINY = {
    "base_emb_dim": 8,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 2,
    "head_dim": 4,
    "base_mlp_dim": 8,
    "base_num_decoder_layers": 1,
    "vocab_size": 300,
    "max_target_length": 8,
}

NAMED = ("model_name=llama2-7b", "override_model_config=true")


class Started(Exception):
    """The entry has configured its process."""


def command(name, *args):
    """`name` with `args`, in which {file} is a file with a line of JSON."""

    def run(tmp_path, keys):
        file = tmp_path / "rows.jsonl"
        file.write_text('{"text": "a", "prompt": "a", "question": "a", "answer": "1"}\n')
        words = [arg.format(file=file) for arg in args]
        code = main([name, *words, *(f"{key}={value}" for key, value in (TINY | keys).items())])
        assert code == 2

    return run


PYTHON = {
    "LLM.load": lambda tmp_path, keys: LLM.load("default", **TINY, **keys),
    "tune.sft": lambda tmp_path, keys: tune.sft(
        "default", [{"prompt": "a", "completion": "b"}], tokenizer_path="byte", **TINY, **keys
    ),
}
COMMANDS = {
    "train": command("train", "dataset_type=synthetic", "steps=1"),
    "decode": command("decode", *NAMED, "prompt=a", "tokenizer_path=byte"),
    "bench": command("bench", "inference", *NAMED),
    "eval": command("eval", "llama2-7b", "--perplexity", "{file}", NAMED[1]),
    "evaluate": command(
        "evaluate",
        *NAMED,
        "tokenizer_path=byte",
        "dataset_type=grain",
        "grain_file_type=jsonl",
        "grain_eval_files={file}",
        "max_prefill_predict_length=4",
    ),
    "batch": command("batch", "{file}", "{file}.out", "--model", "llama2-7b", NAMED[1]),
    "chat": command("chat", "llama2-7b", NAMED[1], "tokenizer_path=byte"),
    "distill-logits": command(
        "distill-logits", "--top-k", "2", "{file}.logits", "dataset_type=synthetic"
    ),
    "grpo": command(
        "grpo",
        "dataset_type=grain",
        "grain_train_files={file}",
        "max_prefill_predict_length=4",
    ),
    "serve": command("serve", *NAMED, "--port=0", "tokenizer_path=byte"),
    "estimate": command("estimate", "--no-compile"),
    "compile": command("compile", "compiled_trainstep_file=/nowhere/step"),
}
ENTRIES = PYTHON | COMMANDS


@pytest.fixture
def flags(monkeypatch):
    before = {flag: getattr(jax.config, flag) for flag in FLAGS}

    def stop(*args, **keys):
        raise Started

    for name in (
        "maxtext.inference.llm.make_template",
        "maxtext.trainers.train.run_folder",
        "maxtext.cli.estimate.estimate_memory",
        "maxtext.trainers.compilation.aot.check_writable",
        "maxtext.trainers.methods.distillation.write_logits.write_logits",
    ):
        monkeypatch.setattr(name, stop)
    yield jax.config
    for flag, value in before.items():
        jax.config.update(flag, value)
    compilation_cache.reset_cache()


@pytest.mark.parametrize("entry", ENTRIES)
def test_cache_folder_and_partitioner_act_at_every_entry(entry, flags, tmp_path):
    with pytest.raises(Started):
        ENTRIES[entry](tmp_path, {"jax_cache_dir": str(tmp_path / "cache"), "shardy": False})
    assert flags.jax_compilation_cache_dir == str(tmp_path / "cache")
    assert flags.jax_use_shardy_partitioner is False


@pytest.mark.parametrize("entry", ENTRIES)
def test_hardware_that_is_missing_is_refused_at_every_entry(entry, flags, tmp_path, capsys):
    message = "hardware=gpu, but JAX finds no GPU, only cpu"
    is_command = entry in COMMANDS
    with nullcontext() if is_command else pytest.raises(ConfigError, match=message):
        ENTRIES[entry](tmp_path, {"hardware": "gpu"})
    if is_command:
        assert message in capsys.readouterr().err


def test_second_cache_folder_replaces_the_first(flags, tmp_path):
    folders = [tmp_path / name for name in ("first", "second")]
    for index, folder in enumerate(folders):
        use_compilation_cache(str(folder), is_chosen=True)
        flags.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.jit(lambda x, index=index: x * 3 + index)(jnp.arange(3.0))
        assert list(folder.glob("*-cache")), folder
    use_compilation_cache(str(tmp_path / "default"), is_chosen=False)
    assert flags.jax_compilation_cache_dir == str(folders[1])
    use_compilation_cache(None, is_chosen=True)
    assert flags.jax_compilation_cache_dir is None


def test_default_cache_folder_respects_a_disabled_cache(flags, tmp_path):
    flags.update("jax_enable_compilation_cache", False)
    use_compilation_cache(str(tmp_path), is_chosen=False)
    assert flags.jax_compilation_cache_dir is None
