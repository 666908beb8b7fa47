"""Real processes: several compute what one does, failures are noticed in time, and a run continues
after them."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.compiling import cpu_devices
from tests.forked import ForkedProcess

# One layer and few tokens: what these tests wait for is the start of their processes.
SMALL = [
    "base_emb_dim=32", "base_num_query_heads=4", "base_num_kv_heads=2", "head_dim=8",
    "base_mlp_dim=64", "base_num_decoder_layers=1", "scan_layers=false", "remat_policy=none",
    "vocab_size=259", "max_target_length=32", "dtype=float32", "enable_tensorboard=false",
    "learning_rate=0.01", "lr_schedule_type=wsd", "wsd_decay_steps_fraction=0",
    "warmup_steps_fraction=0", "learning_rate_schedule_steps=1000000", "run_name=it",
]  # fmt: skip
SIMPLE = ["decoder_block=simple", "dataset_type=synthetic", "per_device_batch_size=1"]
WITHOUT_CHECKPOINTS = ["enable_checkpointing=false"]
NOTICED = 15.0  # seconds in which a dead process must be noticed

pytestmark = pytest.mark.slow


class Run:
    """A running command, and the files of its run."""

    def __init__(self, args, folder, environment):
        self.folder, self.metrics = folder / "it", folder / "metrics.jsonl"
        self.log = folder / f"log-{time.monotonic_ns()}"
        if args[0] == "launch":
            with self.log.open("w") as log:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "maxtext", *args],
                    stdout=log, stderr=subprocess.STDOUT, env=os.environ | environment,
                )  # fmt: skip
        else:
            self.process = ForkedProcess(args, self.log, self.log, environment)

    @property
    def records(self):
        lines = self.metrics.read_text().splitlines() if self.metrics.exists() else []
        return [json.loads(line) for line in lines]

    @property
    def losses(self):
        return {record["step"]: record["loss"] for record in self.records if "loss" in record}

    def text(self):
        return self.log.read_text(errors="replace")

    def end(self, seconds=400):
        """Its exit code."""
        return self.process.wait(timeout=seconds)

    def wait_until(self, condition, seconds=400):
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.05)

    def wait_for_steps(self, count):
        self.wait_until(
            lambda: self.metrics.exists() and self.metrics.read_bytes().count(b"\n") >= count
        )

    def children(self):
        pid = self.process.pid
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def begin(cache, tmp_path_factory):
    """Programs in folders of their own; none outlives the module."""
    started = []

    def start(verb, overrides, environment=None, folder=None):
        folder = folder or tmp_path_factory.mktemp("run")
        paths = [
            f"base_output_directory={folder}",
            f"metrics_file={folder}/metrics.jsonl",
            f"jax_cache_dir={cache}",
        ]
        environ = {
            "JAX_PLATFORMS": "cpu",
            **(environment or {}),
        }
        run = Run([*verb, *SMALL, *paths, *overrides], folder, environ)
        started.append(run)
        return run

    yield start
    for run in started:
        run.process.kill()
        run.process.wait()


@pytest.fixture(scope="module")
def launch(begin):
    def start(count, *overrides, devices=1, options=(), **keywords):
        line = [
            "launch",
            "--local",
            str(count),
            "--devices-per-process",
            str(devices),
            *options,
            "--",
            "train",
        ]
        return begin(line, overrides, **keywords)

    return start


@pytest.fixture(scope="module")
def train(begin):
    """One process with `devices` devices."""

    def start(*overrides, devices=1, **keywords):
        environment = cpu_devices(devices)
        return begin(
            ["train"], overrides, environment | keywords.pop("environment", {}), **keywords
        )

    return start


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for number in range(40):
        (folder / f"{number:02d}").write_text(
            f"document {number}: " + "some words " * (number % 7 + 1)
        )
    return folder


DATA = {
    "workers": ["data_streams=2"],
    # One of the two processes has nothing to read.
    "few readers": ["expansion_factor_real_data=2", "grain_worker_count=0", "num_epoch=9"],
}


@pytest.fixture(scope="module")
def run_both(launch, train, text):
    """(data, further overrides) -> (a run of one process with 4 devices, one of 2 processes with 2
    devices each).
    """

    def run(data, *more):
        overrides = [
            "per_device_batch_size=1", "steps=3", *DATA[data], *WITHOUT_CHECKPOINTS,
            "dataset_type=grain", "grain_file_type=text", f"grain_train_files={text}",
            "tokenizer_path=byte", "grain_num_threads=1",
        ]  # fmt: skip
        runs = train(*overrides, devices=4), launch(2, *overrides, *more, devices=2)
        for run in runs:
            assert run.end() == 0, run.text()
        return runs

    return run


@pytest.fixture(scope="module")
def few_readers(run_both):
    return run_both("few readers", "prompt=def ")


@pytest.mark.representative(
    "workers",
)
@pytest.mark.parametrize("data", DATA)
def test_processes_compute_what_one_process_does(run_both, request, data):
    one, two = request.getfixturevalue("few_readers") if data == "few readers" else run_both(data)
    assert "4 x cpu" in two.text()
    assert len(one.losses) == 3
    assert len(set(one.losses.values())) == 3
    np.testing.assert_allclose(list(two.losses.values()), list(one.losses.values()), rtol=1e-5)
    tokens = [[record["total_weights"] for record in run.records] for run in (one, two)]
    assert tokens[0] == tokens[1]
    # The first process speaks for all.
    assert not re.findall(r"^\[1\] .*(?:INFO|step \d|Model).*$", two.text(), re.M)


def test_processes_sample_text_together(few_readers):
    _, run = few_readers
    before, _, said = run.text().partition("what the model writes after 'def ':")
    assert "fsdp 4" in before
    assert re.match(r"\s+\[0\] \s*\[0\] def .", said), run.text()


@pytest.mark.representative(
    "coordinator",
)
@pytest.mark.parametrize("index", [1, 0], ids=["worker", "coordinator"])
def test_a_killed_process_ends_the_launcher_in_time(launch, index):
    run = launch(2, *SIMPLE, *WITHOUT_CHECKPOINTS, "steps=1000000")
    run.wait_for_steps(3)
    children = run.children()
    assert len(children) == 2
    os.kill(children[index], signal.SIGKILL)
    start = time.monotonic()
    assert run.end(NOTICED) == 128 + signal.SIGKILL, run.text()
    assert time.monotonic() - start < NOTICED
    assert f"process {index} was ended by SIGKILL: stopping the others" in run.text()
    assert not any(map(alive, children))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def by_hand(index, count=2, port=None):
    address = f"127.0.0.1:{port}"
    return {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_PROCESS_COUNT": str(count),
        "JAX_PROCESS_INDEX": str(index),
    }


@pytest.mark.representative("killed")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_process_without_a_launcher_notices_a_dead_peer(train, how):
    """A killed process closes its connections; of a frozen one, as of a lost host, only heartbeats
    tell.
    """
    port = free_port()
    overrides = [*SIMPLE, *WITHOUT_CHECKPOINTS, "steps=1000000"]
    first, second = (train(*overrides, environment=by_hand(index, port=port)) for index in (0, 1))
    first.wait_for_steps(3)
    second.process.send_signal(how)
    start = time.monotonic()
    assert first.end(NOTICED) != 0
    assert time.monotonic() - start < NOTICED


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        (
            1,
            "process 1 of 2: could not join the other processes at 127.0.0.1:{port} in 2 s, no "
            "answer",
        ),
        (
            0,
            "process 0 of 2: could not join the other processes at 127.0.0.1:{port} in 2 s, not "
            "all other processes connected",
        ),
    ],
)
def test_a_failed_rendezvous_is_one_error(train, index, sentence):
    port = free_port()
    overrides = [*SIMPLE, "jax_distributed_initialization_timeout=2"]
    run = train(*overrides, environment=by_hand(index, port=port))
    assert run.end() == 1
    assert sentence.format(port=port) in run.text()
    assert "Traceback" not in run.text()


NAMES = """
import sys
from types import SimpleNamespace
from maxtext.common import processes

processes.now = lambda: f"2026010{sys.argv[1]}-235959"  # clocks that differ
processes.start(SimpleNamespace(
    hardware="cpu", gpu_memory_utilization=0.95, skip_jax_distributed_system=False,
    jax_distributed_initialization_timeout=60))
from maxtext.models.configuration import load
print(load(None, []).run_name)
"""


def test_processes_agree_on_the_name_of_a_run():
    port = free_port()
    line = [sys.executable, "-c", NAMES]
    running = [
        subprocess.Popen(
            [*line, str(index + 3)], stdout=subprocess.PIPE, text=True, env=os.environ | environ
        )
        for index, environ in enumerate(by_hand(index, port=port) for index in (0, 1))
    ]
    names = [process.communicate(timeout=400)[0].splitlines()[-1] for process in running]
    assert names == ["default-20260103-235959"] * 2


def test_a_bad_configuration_of_one_process_does_not_keep_the_others_waiting(train):
    port = free_port()
    good, bad = SIMPLE, [*SIMPLE, "ici_fsdp_parallelism=3"]
    first = train(*good, *WITHOUT_CHECKPOINTS, "steps=5", environment=by_hand(0, port=port))
    second = train(*bad, environment=by_hand(1, port=port))
    assert second.end() == 2, second.text()
    assert "does not make 2 devices" in second.text()
    start = time.monotonic()
    assert first.end() != 0
    assert time.monotonic() - start < NOTICED


def test_sigterm_to_the_launcher_saves_and_ends_the_run(launch):
    run = launch(2, *SIMPLE, "steps=1000000")
    run.wait_for_steps(3)
    children = run.children()
    run.process.terminate()
    assert run.end() == 143, run.text()
    assert not any(map(alive, children))
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["stopped"] == "SIGTERM"
    assert summary["steps"] == len(run.records) < 1000000
    assert (run.folder / "checkpoints" / str(summary["steps"])).is_dir()


# The reference is an undisturbed run on four devices; the other runs lose processes.
STEPS = 30
RESUMED = [
    *SIMPLE, "per_device_batch_size=2", f"steps={STEPS}", "checkpoint_period=5",
    "async_checkpointing=false",
]  # fmt: skip
RESUMED.remove("per_device_batch_size=1")


@pytest.fixture(scope="module")
def undisturbed(train):
    run = train(*RESUMED, *WITHOUT_CHECKPOINTS, devices=4)
    assert run.end() == 0, run.text()
    return run


def kill_after_a_checkpoint(run, index):
    run.wait_until(lambda: (run.folder / "checkpoints" / "5").exists())
    run.wait_for_steps(7)
    os.kill(run.children()[index], signal.SIGKILL)


def assert_same(run, undisturbed, message):
    """`message`: what the launcher logs when it continues; no step before the checkpoint is run
    again after it."""
    assert run.end() == 0, run.text()
    after = run.text().partition(message)[2]
    assert after, run.text()
    assert min(map(int, re.findall(r"\[0\] step (\d+)/", after))) >= 5
    assert set(run.losses) == set(range(STEPS))
    actual, expected = (
        [losses[step] for step in range(STEPS)] for losses in (run.losses, undisturbed.losses)
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    weights = {record["total_weights"] for record in run.records}
    assert weights == {4 * 2 * 32}, "the global batch is the same throughout"


def test_restarts_continue_to_the_same_loss(launch, undisturbed):
    run = launch(2, *RESUMED, devices=2, options=("--restarts", "1"))
    kill_after_a_checkpoint(run, 1)
    assert_same(run, undisturbed, "starting all 2 processes again; restarts left: 0")


@pytest.mark.parametrize(
    ("count", "minimum"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.exhaustive)]
)
def test_elastic_continues_with_fewer_processes_and_the_same_batch(
    launch, undisturbed, count, minimum
):
    elastic = (
        "elastic_enabled=true",
        f"elastic_min_slice_count={minimum}",
        "elastic_max_retries=1",
    )
    run = launch(count, *RESUMED, *elastic, devices=4 // count)
    kill_after_a_checkpoint(run, count // 2)
    assert_same(run, undisturbed, f"going on with {minimum} of {count} processes; retries left: 0")
