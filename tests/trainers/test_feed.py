"""From streams to devices: which process reads what, and what devices get."""

import os
import subprocess
import sys

import numpy as np
import pytest

from maxtext.input_pipeline import Share, Split
from maxtext.input_pipeline.sources import make_iterator
from maxtext.trainers.feed import TrainFeed
from maxtext.trainers.setup import Setup
from tests.trainers.conftest import TINY, with_defaults

FIELD = "inputs"


@pytest.fixture
def words(tmp_path):
    for number in range(60):
        (tmp_path / f"{number:02}.txt").write_text(f"document number {number} of sixty")
    return (
        "dataset_type=grain", "grain_file_type=text", f"grain_train_files={tmp_path}", "tokenizer_path=byte",
        "vocab_size=259", "grain_worker_count=0", "use_truncation=false", "grain_num_threads=2", "num_epoch=2",
    )  # fmt: skip


def taken(feed):
    batches = [np.asarray(batch[FIELD]) for batch in feed]
    feed.close()
    return batches


def stream(config, rows):
    return [batch[FIELD] for batch in make_iterator(config, Split.TRAIN, Share(rows))]


def test_one_device_has_one_stream(configure, words):
    config = configure(*words, "per_device_batch_size=3")
    np.testing.assert_array_equal(taken(TrainFeed(Setup.of(config))), stream(config, 3))


SCRIPT = """
import sys
import numpy as np
from maxtext.configs import load
from maxtext.trainers.feed import TrainFeed
from maxtext.trainers.setup import Setup

setup = Setup.of(load(None, sys.argv[2:]))
feed = TrainFeed(setup)
print(feed.streams.count)
np.save(sys.argv[1], [np.asarray(batch["inputs"]) for batch in feed])
"""


@pytest.mark.parametrize(("factor", "streams"), [(8, 1), (4, 2)])
def test_few_readers_load_for_all(configure, words, tmp_path_factory, factor, streams):
    """Eight devices, of which the first few get all rows, and deal them out."""
    words = with_defaults([*words, "per_device_batch_size=1", "ici_fsdp_parallelism=8"], TINY)
    out = tmp_path_factory.mktemp("out") / "batches.npy"
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(out), *words, f"expansion_factor_real_data={factor}"],
        env=os.environ | flags, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) == streams
    config = configure(*(word for word in words if not word.startswith("ici")))
    parts = [
        [batch[FIELD] for batch in make_iterator(config, Split.TRAIN, Share(8 // streams, number, streams))]
        for number in range(streams)
    ]
    got = np.load(out)
    expected = [np.concatenate(rows) for rows in zip(*parts, strict=False)]
    # Whole loads of `factor` batches at a time: what is left at the end of the data makes none.
    assert len(got) == len(expected) // factor * factor > 0
    np.testing.assert_array_equal(got, expected[: len(got)])


def test_the_last_batch_may_be_filled_up(configure, words):
    config = configure(*words, "per_device_batch_size=7", "generate_padding_batch_train=true")
    batches = taken(TrainFeed(Setup.of(config)))
    without = taken(TrainFeed(Setup.of(configure(*words, "per_device_batch_size=7"))))
    assert len(batches) == len(without) + 1
    np.testing.assert_array_equal(batches[:-1], without)
    last = batches[-1]
    assert 0 < (last.any(axis=1)).sum() < 7
    expected = stream(configure(*words, "per_device_batch_size=1"), 1)
    rows = np.concatenate(expected)
    np.testing.assert_array_equal(np.concatenate(batches)[: len(rows)], rows)


@pytest.mark.slow
def test_workers_give_what_the_process_itself_would(configure, words):
    """More streams for more workers, and the data of each stream is the same in a worker."""
    here = TrainFeed(Setup.of(configure(*words, "per_device_batch_size=4", "grain_use_elastic_iterator=true")))
    assert here.streams.count == 4
    there = (word for word in words if not word.startswith("grain_worker_count"))
    there = TrainFeed(Setup.of(configure(*there, "per_device_batch_size=4", "grain_worker_count=4")))
    assert there.streams.count == 4
    np.testing.assert_array_equal(taken(there), taken(here))
