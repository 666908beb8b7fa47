"""`maxtext` as a user runs it, in this process or in its own."""

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from maxtext.cli.main import main
from maxtext.common.log import LOGGER
from tests.forked import ForkedProcess

TINY = [
    "base_emb_dim=32", "base_num_query_heads=4", "base_num_kv_heads=2", "head_dim=8",
    "base_mlp_dim=64", "base_num_decoder_layers=2", "vocab_size=259", "max_target_length=32",
    "per_device_batch_size=4", "dtype=float32", "dataset_type=synthetic",
    "enable_tensorboard=false", "learning_rate=0.01", "lr_schedule_type=wsd",
    "wsd_decay_steps_fraction=0", "warmup_steps_fraction=0", "learning_rate_schedule_steps=1000000",
    "enable_checkpointing=false",
]  # fmt: skip


@dataclass
class Outcome:
    """An exit code, what was printed, and the files of the run."""

    code: int
    out: str
    err: str
    folder: Path
    metrics: Path

    @property
    def records(self):
        return [read_record(line) for line in self.metrics.read_text().splitlines()]

    @property
    def losses(self):
        return [record["loss"] for record in self.records if "loss" in record]

    @property
    def summary(self):
        return json.loads((self.folder / "summary.json").read_text())


def read_record(line):
    """A line of metrics, with the values that JSON cannot represent."""
    record = json.loads(line)
    return record | {name: float(value) for name, value in record.pop("not_finite", {}).items()}


def complete(overrides, base, cache):
    """(overrides with the tiny model and the paths of a run, its folder, metrics file)."""
    given = {override.partition("=")[0] for override in overrides}
    paths = [f"base_output_directory={base}", "run_name=it", f"metrics_file={base}/metrics.jsonl"]
    defaults = [*TINY, *paths, f"jax_cache_dir={cache}"]
    rest = [override for override in defaults if override.partition("=")[0] not in given]
    return [*overrides, *rest], base / "it", base / "metrics.jsonl"


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Shared with the runs of tests/trainers: what was compiled once is not compiled again."""
    return tmp_path_factory.getbasetemp() / "jax_cache"


@pytest.fixture(scope="module")
def train(cache, tmp_path_factory):
    """`maxtext train` in this process, in a folder of its own unless it names one; `file` is a
    configuration.
    """
    before = LOGGER.handlers[:], LOGGER.level, LOGGER.propagate
    seconds = jax.config.jax_persistent_cache_min_compile_time_secs

    def run(*overrides, base=None, file=None):
        base = base or tmp_path_factory.mktemp("run")
        args, folder, metrics = complete(overrides, base, cache)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(["train", *([str(file), *overrides] if file else args)])
        return Outcome(code, out.getvalue(), err.getvalue(), folder, metrics)

    yield run
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
    compilation_cache.reset_cache()
    LOGGER.handlers[:], LOGGER.level, LOGGER.propagate = before


@pytest.fixture
def start(cache, tmp_path):
    """`maxtext train` in a process of its own: (process, Outcome to be completed). It does not
    outlive the test.
    """
    processes = []

    def begin(*overrides, environment=None):
        args, folder, metrics = complete(overrides, tmp_path, cache)
        out, err = tmp_path / "out", tmp_path / "err"
        process = ForkedProcess(["train", *args], out, err, environment or {})
        processes.append(process)
        return process, Outcome(-1, "", "", folder, metrics)

    yield begin
    for process in processes:
        process.kill()
        process.wait()
