"""Data streams in worker processes: the same batches, states and errors, and no leaked process."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from maxtext.common.errors import ConfigError, UserError
from maxtext.input_pipeline import DataStreams, ShardSpec, Split, workers
from maxtext.input_pipeline.row_formats import DOCUMENTS
from maxtext.input_pipeline.subprocesses import start_program
from maxtext.input_pipeline.workers import Workers, worker_count
from tests.support.batches import data_stream_factory, make_iterator

TEXTS = [
    "".join(chr(97 + (index * number) % 26) for index in range(number % 30)) for number in range(40)
]


@pytest.fixture
def config(make_config, write):
    return make_config(
        grain_train_files=write(*TEXTS),
        enable_data_shuffling=True,
        use_truncation=False,
        num_epoch=2,
        grain_shuffle_buffer_size=7,
        grain_worker_count=2,
        grain_per_worker_buffer_size=3,
    )


def streams(open_stream):
    return DataStreams(lambda *shard: open_stream(ShardSpec(2, *shard[:3])), 3, lambda step: 6, [6])


def here(config):
    return streams(lambda shard: make_iterator(config, Split.TRAIN, shard))


def alive(process):
    return (
        os.path.exists(f"/proc/{process}")
        and "Z" not in open(f"/proc/{process}/stat").read().split()[2]
    )


def test_workers_give_the_same_batches_and_states(config):
    local = here(config)
    remote = streams(data_stream_factory(config, Split.TRAIN))
    try:
        workers = {stream.source.worker.process.pid for stream in remote.streams.values()}
        assert len(workers) == 2
        for step in range(8):
            if step == 4:  # a place that was saved earlier, and the start
                saved = json.loads(json.dumps(remote.get_state()))
            expected, got = next(local), next(remote)
            for field, array in expected.items():
                np.testing.assert_array_equal(got[field], array)
            assert remote.get_state() == local.get_state()
        for move in (lambda iterator: iterator.set_state(saved), lambda iterator: iterator.reset()):
            move(local)
            move(remote)
            np.testing.assert_array_equal(next(remote)["inputs"], next(local)["inputs"])
        count = sum(1 for _ in local)
        assert sum(1 for _ in remote) == count > 5
        assert next(remote, None) is None
    finally:
        remote.close()
    assert not any(map(alive, workers))


@pytest.mark.slow
def test_workers_forward_errors_of_the_source(config):
    open_stream = data_stream_factory(
        config.model_copy(update={"grain_train_files": "/nowhere"}), Split.TRAIN
    )
    with pytest.raises(ConfigError, match="grain_train_files: /nowhere does not exist"):
        open_stream(ShardSpec(1))
    with pytest.raises(ConfigError, match="but one batch needs 80000"):
        data_stream_factory(config, Split.TRAIN)(ShardSpec(10**4))
    assert data_stream_factory(config, Split.EVAL)(ShardSpec(1)) is None


@pytest.mark.slow
def test_error_of_one_stream_is_raised_when_streams_open_in_parallel(config):
    """Six threads use one worker, which ends after the last response."""
    open_stream = data_stream_factory(
        config.model_copy(update={"grain_worker_count": 1}), Split.TRAIN
    )
    with pytest.raises(ConfigError, match="but one batch needs 80000"):
        DataStreams(
            lambda *shard: open_stream(ShardSpec(10**4, *shard[:3])), 6, lambda step: 6, [6]
        )


@pytest.mark.slow
def test_dead_worker_raises(config):
    stream = Workers(1).open(config, Split.TRAIN, DOCUMENTS, ShardSpec(1))
    next(stream)
    stream.worker.process.kill()
    stream.worker.process.wait()
    with pytest.raises(
        UserError, match=r"worker process of the data pipeline ended \(exit code -9\)"
    ):
        next(stream)


@pytest.mark.slow
def test_workers_end_with_their_process(config, tmp_path):
    """The parent is killed with SIGKILL."""
    (tmp_path / "config").write_bytes(pickle.dumps(config))
    script = (
        "import pickle, sys, time\n"
        "from maxtext.input_pipeline import ShardSpec, Split, data_stream_factory\n"
        "from maxtext.input_pipeline.row_formats import DOCUMENTS\n"
        f"config = pickle.load(open({str(tmp_path / 'config')!r}, 'rb'))\n"
        "stream = data_stream_factory(config, Split.TRAIN, DOCUMENTS)(ShardSpec(1))\n"
        "print(stream.worker.process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    worker = int(process.stdout.readline())
    assert alive(worker)
    os.kill(worker, signal.SIGTERM)  # meant for the process that trains
    time.sleep(0.3)
    assert alive(worker)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while alive(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(worker)


def test_workers_ignore_sigint_from_the_start():
    """A terminal sends SIGINT to all processes, even while their Python is starting."""
    process, connection = start_program("time", "sleep")
    os.kill(process.pid, signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    connection.close()
    process.kill()
    process.wait()


def test_worker_count(make_config, monkeypatch):
    monkeypatch.setattr(workers, "num_cores", lambda: 6)

    def count(split=Split.TRAIN, **settings):
        return worker_count(make_config(**settings), split, DOCUMENTS)

    assert count(grain_worker_count=3) == 3
    assert count(Split.EVAL, grain_worker_count=3, grain_worker_count_eval=0) == 0
    assert count(grain_worker_count=-1, grain_ram_budget_mb=10**6) == 6
    assert count(grain_worker_count=-1, grain_ram_budget_mb=1024) == 4
    assert count(grain_worker_count=-1, grain_ram_budget_mb=1) == 1
