"""A run that is killed and restarted ends with the same bits as an uninterrupted one, whenever it
is killed.

The oracle is the uninterrupted run. Kills come at random moments (seeded): while a process starts,
reads its checkpoint, trains or saves; with saves every three steps of milliseconds, most of them
come during a save.
"""

import json
import random
import signal
import socket
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from maxtext.checkpoint.saved_step import SavedStep
from maxtext.checkpoint.steps import all_steps
from tests.compiling import cpu_devices
from tests.forked import ForkedProcess

pytestmark = pytest.mark.slow

MODEL = [
    "base_emb_dim=32", "base_num_query_heads=4", "base_num_kv_heads=2", "head_dim=8",
    "base_mlp_dim=64", "base_num_decoder_layers=1", "scan_layers=false", "vocab_size=259",
    "max_target_length=32", "per_device_batch_size=4", "dtype=float32", "learning_rate=0.01",
    "lr_schedule_type=wsd", "wsd_decay_steps_fraction=0", "warmup_steps_fraction=0",
    "learning_rate_schedule_steps=1000000", "enable_tensorboard=false", "remat_policy=none",
    "run_name=it",
]  # fmt: skip
PERIOD = 3


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Documents of uneven lengths, so that rows hold several, and some go over rows."""
    folder = tmp_path_factory.mktemp("text")
    generator = random.Random(5)
    for number in range(24):
        words = (
            generator.choice(["fox", "dog", "over", "lazy", "jumps", "quick"])
            for _ in range(40 + 13 * number)
        )
        (folder / f"{number:02d}.txt").write_text(" ".join(words))
    return folder


@pytest.fixture(scope="module")
def overrides(text, cache):
    return [
        *MODEL, "dataset_type=grain", "grain_file_type=text", f"grain_train_files={text}",
        "tokenizer_path=byte", "grain_num_threads=2", "use_truncation=false",
        "grain_worker_count=0", "packing=true", "num_epoch=40", "enable_dropout=true",
        "dropout_rate=0.1", f"jax_cache_dir={cache}", f"checkpoint_period={PERIOD}",
        "max_num_checkpoints_to_keep=2",
    ]  # fmt: skip


class Job:
    """A run of one or more processes in a folder of its own. It is started with the same overrides
    each time.
    """

    def __init__(self, folder, overrides, processes=1):
        self.folder, self.processes = folder, processes
        self.metrics = folder / "metrics.jsonl"
        self.overrides = [
            *overrides,
            f"base_output_directory={folder}",
            f"metrics_file={self.metrics}",
        ]
        self.alive = []

    def start(self):
        environment: dict[str, str] = {}
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{server.getsockname()[1]}"
        for index in range(self.processes):
            if self.processes > 1:
                environment |= {
                    "JAX_COORDINATOR_ADDRESS": address,
                    "JAX_NUM_PROCESSES": str(self.processes),
                    "JAX_PROCESS_ID": str(index),
                }
            log = self.folder / f"log{index}"
            self.alive.append(ForkedProcess(["train", *self.overrides], log, log, environment))

    def log(self):
        return "\n".join(
            path.read_text(errors="replace")[-4000:] for path in sorted(self.folder.glob("log*"))
        )

    def last_step(self):
        """Of the newest complete record."""
        try:
            lines = self.metrics.read_bytes().split(b"\n")
        except FileNotFoundError:  # not there yet, or renamed: a run from step 0 starts a new file
            return -1
        for line in reversed(lines):
            try:
                return json.loads(line)["step"]
            except ValueError:
                continue
        return -1

    def wait_for(self, step, seconds=300):
        """Until that step is recorded, or the run has ended."""
        deadline = time.monotonic() + seconds
        while self.last_step() < step:
            if any(process.poll() is not None for process in self.alive):
                return
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.002)

    def kill(self, gap=0.0):
        for process in self.alive:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            time.sleep(gap)
        codes = [process.wait() for process in self.alive]
        self.alive = []
        return codes

    def finish(self, seconds=300):
        codes = [process.wait(timeout=seconds) for process in self.alive]
        self.alive = []
        assert codes == [0] * self.processes, self.log()

    @property
    def checkpoints(self):
        return self.folder / "it" / "checkpoints"

    def final(self):
        """All arrays of the last checkpoint, on the host."""
        steps = all_steps(self.checkpoints)
        return arrays_of(self.checkpoints / str(steps[-1]))

    @property
    def summary(self):
        return json.loads((self.folder / "it" / "summary.json").read_text())

    @property
    def losses(self):
        records = [json.loads(line) for line in self.metrics.read_text().splitlines()]
        return {record["step"]: record["loss"] for record in records}


def arrays_of(step: Path):
    stored = SavedStep(step)
    wanted = {
        name: jax.ShapeDtypeStruct(tensor.shape, tensor.dtype)
        for name, tensor in stored.tensors.items()
    }
    return {"/".join(name): array for name, array in stored.restore(wanted).items()}


@pytest.fixture
def make_job(tmp_path, overrides):
    """Jobs, none of which outlives its test."""
    jobs = []

    def make(name, *more, processes=1, base=None):
        folder = tmp_path / name
        folder.mkdir()
        given = {override.partition("=")[0] for override in more}
        defaults = [
            override for override in base or overrides if override.partition("=")[0] not in given
        ]
        jobs.append(Job(folder, [*defaults, *more], processes))
        return jobs[-1]

    yield make
    for job in jobs:
        job.kill()


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name in expected:
        assert actual[name].tobytes() == expected[name].tobytes(), name


def killed_until_done(job, generator, kills, steps, early):
    """Kill at so many moments: `early` of them by the clock, from the start on; the others after a
    step and a bit.
    """
    times = [None] * (kills - early) + [generator.uniform(0.2, 5.0) for _ in range(early)]
    generator.shuffle(times)
    marks = iter(sorted(generator.sample(range(2, steps - 12), kills - early)))
    killed = 0
    for seconds in times:
        job.start()
        if seconds is None:
            job.wait_for(next(marks))
            time.sleep(generator.uniform(0, 0.05))
        else:
            deadline, step = time.monotonic() + seconds, job.last_step()
            # A fast machine is not to come to the end.
            while time.monotonic() < deadline and job.last_step() < step + 2:
                time.sleep(0.01)
        killed += job.kill(generator.uniform(0, 0.02))[0] == -signal.SIGKILL
    job.start()
    job.finish()
    return killed


@pytest.mark.parametrize(
    ("kills", "steps"), [(3, 24), pytest.param(30, 60, marks=pytest.mark.exhaustive)]
)
def test_kills_change_nothing(make_job, kills, steps):
    calm = make_job("calm", f"steps={steps}")
    calm.start()
    calm.finish()
    job = make_job("killed", f"steps={steps}")
    killed = killed_until_done(job, random.Random(30), kills, steps, early=-(-kills // 4))
    assert killed == kills, job.log()
    assert all_steps(job.checkpoints)[-1] == steps
    assert_same(job.final(), calm.final())
    assert job.losses == calm.losses, "each step once, and the same"
    assert job.summary["first_loss"] == calm.summary["first_loss"] == calm.losses[0]
    assert len(all_steps(job.checkpoints)) == 2, "no more than max_num_checkpoints_to_keep"
    assert {path.name for path in job.checkpoints.iterdir()} == {
        str(step) for step in all_steps(job.checkpoints)
    }


@pytest.mark.exhaustive
def test_kills_of_reinforcement_learning_change_nothing(make_job, tmp_path, cache):
    """Every other checkpoint is between the two updates of a batch of rollouts."""
    rows = [{"prompt": f"{number}+{number}="} for number in range(9)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "rewards.py").write_text(
        "def spread(prompts, completions, **columns):\n"
        "    return [sum(text.encode()) % 101 / 101 for text in completions]\n"
    )
    keys = [
        "use_grpo=true", "dataset_type=grain", "grain_file_type=jsonl",
        f"grain_train_files={tmp_path / 'rows.jsonl'}", "tokenizer_path=byte",
        "grain_worker_count=0", "num_epoch=40", "batch_size=2", "num_generations=3",
        "num_iterations=2", "max_prefill_predict_length=8", "max_target_length=16",
        "kv_cache_buffer=0", "grpo_beta=0.05", "num_test_batches=0",
        f"reward_functions_path={tmp_path / 'rewards.py'}", "reward_functions=[spread]",
        f"jax_cache_dir={cache}", f"checkpoint_period={PERIOD}", "max_num_checkpoints_to_keep=2",
    ]  # fmt: skip
    steps, kills = 24, 4
    calm = make_job("calm", f"steps={steps}", *keys, base=MODEL)
    calm.start()
    calm.finish()
    job = make_job("killed", f"steps={steps}", *keys, base=MODEL)
    killed = killed_until_done(job, random.Random(4), kills, steps, early=1)
    assert killed == kills, job.log()
    assert_same(job.final(), calm.final())
    assert job.losses == calm.losses
    rollouts = [(each.folder / "it" / "rollouts.jsonl").read_text() for each in (calm, job)]
    assert rollouts[0] == rollouts[1]


# tests/e2e/test_launch.py kills one of two processes by default.
@pytest.mark.exhaustive
@pytest.mark.parametrize("kills", [2, 20])
def test_kills_of_two_processes_change_nothing(make_job, kills):
    steps = -(-(kills + 13) // PERIOD) * PERIOD
    more = ("per_device_batch_size=2", "max_num_checkpoints_to_keep=9")
    calm = make_job("calm", f"steps={steps + 4}", *more, processes=2)
    calm.start()
    calm.finish()
    job = make_job("killed", f"steps={steps}", "per_device_batch_size=2", processes=2)
    assert (
        killed_until_done(job, random.Random(2), kills, steps, early=-(-2 * kills // 5)) == kills
    ), job.log()
    assert_same(job.final(), arrays_of(calm.checkpoints / str(steps)))
    assert job.losses == {step: loss for step, loss in calm.losses.items() if step < steps}
    # The data and the batch do not depend on the number of processes: the rest on one gives the
    # same numbers.
    alone = make_job("alone", f"steps={steps + 4}", f"load_full_state_path={job.checkpoints}")
    alone.start()
    alone.finish()
    assert list(alone.losses) == list(range(steps, steps + 4))
    np.testing.assert_allclose(
        list(alone.losses.values()), list(calm.losses.values())[steps:], rtol=1e-5
    )


def test_a_run_resumes_on_another_mesh(make_job, monkeypatch):
    """Four devices: parameters and moments sharded over all of them, then over tensor x data."""
    monkeypatch.setenv("XLA_FLAGS", cpu_devices(4)["XLA_FLAGS"])
    more = ("dropout_rate=0", "enable_dropout=false", "per_device_batch_size=1", "vocab_size=260")
    uninterrupted = make_job(
        "uninterrupted", "steps=8", "checkpoint_period=4", "ici_fsdp_parallelism=4", *more
    )
    uninterrupted.start()
    uninterrupted.finish()
    mesh = ("ici_fsdp_parallelism=1", "ici_tensor_parallelism=2", "ici_data_parallelism=2")
    rest = make_job(
        "rest", "steps=8", f"load_full_state_path={uninterrupted.checkpoints}/4", *mesh, *more
    )
    rest.start()
    rest.finish()
    actual, expected = rest.final(), uninterrupted.final()
    for name in expected:
        np.testing.assert_allclose(actual[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(
        list(rest.losses.values()), list(uninterrupted.losses.values())[4:], rtol=1e-5
    )
