"""From data streams to devices: which rows each device gets."""

import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from maxtext.input_pipeline import ShardSpec, Split, pipeline
from maxtext.trainers.build import build_run_context
from maxtext.trainers.data_loader import TrainDataLoader
from tests.compiling import cpu_devices
from tests.support.batches import make_iterator
from tests.trainers.conftest import TINY, with_defaults

FIELD = "inputs"


@pytest.fixture
def overrides(tmp_path):
    for number in range(60):
        (tmp_path / f"{number:02}.txt").write_text(f"document number {number} of sixty")
    return (
        "dataset_type=grain", "grain_file_type=text", f"grain_train_files={tmp_path}",
        "tokenizer_path=byte", "vocab_size=259", "grain_worker_count=0", "use_truncation=false",
        "grain_num_threads=2", "num_epoch=2",
    )  # fmt: skip


def collect(loader):
    batches = [np.asarray(batch.fields[FIELD]) for batch in loader]
    loader.close()
    return batches


def iterator_batches(config, rows):
    return [batch[FIELD] for batch in make_iterator(config, Split.TRAIN, ShardSpec(rows))]


def test_one_device_has_one_stream(configure, overrides):
    config = configure(*overrides, "per_device_batch_size=3")
    np.testing.assert_array_equal(
        collect(TrainDataLoader(build_run_context(config))), iterator_batches(config, 3)
    )


def test_batches_carry_the_most_segments_of_a_row(configure, overrides):
    config = configure(*overrides, "per_device_batch_size=3", "max_target_length=128")
    loader = TrainDataLoader(build_run_context(config))
    counts = []
    for batch in loader:
        rows = np.asarray(batch.fields["inputs_segmentation"])
        counts.append(max(len(list(itertools.groupby(row))) - 1 for row in rows))
        assert batch.max_segments == max(counts[-1], 1)
    loader.close()
    assert max(counts) > 1


SCRIPT = """
import sys
import numpy as np
from maxtext.models.configuration import load
from maxtext.trainers.data_loader import TrainDataLoader
from maxtext.trainers.build import build_run_context

out, layouts, *overrides = sys.argv[1:]
batches = {}
for layout in layouts.split(";"):
    loader = TrainDataLoader(build_run_context(load(None, [*overrides, *layout.split()])))
    batches[layout] = [np.asarray(batch.fields["inputs"]) for batch in loader]
    loader.close()
np.savez(out, **batches)
"""


def on_eight_devices(out, layouts, overrides):
    """The batches of each layout; a layout is a string of overrides."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(out), ";".join(layouts),
         *with_defaults(overrides, TINY)],
        env=os.environ | cpu_devices(8), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return np.load(out)


LAYOUTS = [
    "ici_fsdp_parallelism=8",
    "ici_data_parallelism=2 ici_tensor_parallelism=4",
    "ici_fsdp_parallelism=8 expansion_factor_real_data=4",
]


@pytest.mark.slow
def test_the_batches_do_not_depend_on_the_mesh(configure, overrides, tmp_path_factory):
    """One device with eight rows, and eight devices in any layout, also if few of them read for
    all."""
    overrides = [*overrides, "data_streams=4"]
    expected = collect(
        TrainDataLoader(build_run_context(configure(*overrides, "per_device_batch_size=8")))
    )
    out = tmp_path_factory.mktemp("out") / "batches.npz"
    batches = on_eight_devices(out, LAYOUTS, [*overrides, "per_device_batch_size=1"])
    assert len(expected) > 2
    for layout in LAYOUTS:
        np.testing.assert_array_equal(batches[layout], expected, err_msg=layout)


SYNTHETIC = ["dataset_type=synthetic"]


@pytest.mark.parametrize("source", ["concat_then_split", "best_fit", "synthetic"])
@pytest.mark.parametrize(("before", "after", "streams"), [(8, 4, 4), (4, 8, 4), (8, 6, 1)])
def test_another_batch_size_loses_and_repeats_no_row(
    configure, overrides, source, before, after, streams
):
    """As when a run resumes on another number of devices: `after` is their global batch size."""
    overrides = SYNTHETIC if source == "synthetic" else [*overrides, f"grain_packing_type={source}"]

    def loader_of(rows):
        return TrainDataLoader(
            build_run_context(
                configure(*overrides, f"per_device_batch_size={rows}", f"data_streams={streams}")
            )
        )

    def rows_of(loader, batches):
        taken = (np.asarray(batch.fields[FIELD]) for batch in itertools.islice(loader, batches))
        rows = [row.tobytes() for batch in taken for row in batch]
        loader.close()
        return rows

    total = 24 if source == "synthetic" else None
    straight = rows_of(loader_of(1), total or 10**6)
    first = loader_of(before)
    seen = [row.tobytes() for _ in range(2) for row in np.asarray(next(first).fields[FIELD])]
    state = json.loads(json.dumps(first.source.get_state()))
    first.close()
    resumed = loader_of(after)
    resumed.source.set_state(state)
    seen += rows_of(resumed, (total - len(seen)) // after if total else 10**6)
    assert len(seen) > 2 * before
    # Every row of a run that never stopped, in the same order but for that inside a batch; the rest
    # fills no batch.
    assert len(straight) - len(seen) < after
    assert sorted(seen) == sorted(straight[: len(seen)])


def test_the_last_batch_may_be_padded(configure, overrides):
    config = configure(*overrides, "per_device_batch_size=7", "generate_padding_batch_train=true")
    batches = collect(TrainDataLoader(build_run_context(config)))
    without = collect(
        TrainDataLoader(build_run_context(configure(*overrides, "per_device_batch_size=7")))
    )
    assert len(batches) == len(without) + 1
    np.testing.assert_array_equal(batches[:-1], without)
    last = batches[-1]
    assert 0 < (last.any(axis=1)).sum() < 7
    expected = iterator_batches(configure(*overrides, "per_device_batch_size=1"), 1)
    rows = np.concatenate(expected)
    np.testing.assert_array_equal(np.concatenate(batches)[: len(rows)], rows)


@pytest.mark.slow
def test_worker_processes_do_not_change_the_batches(configure, overrides):
    overrides = [*overrides, "per_device_batch_size=4", "data_streams=4"]
    here = collect(TrainDataLoader(build_run_context(configure(*overrides))))
    for workers in (1, 3):
        there = (
            override for override in overrides if not override.startswith("grain_worker_count")
        )
        there = TrainDataLoader(
            build_run_context(configure(*there, f"grain_worker_count={workers}"))
        )
        np.testing.assert_array_equal(collect(there), here)


def test_the_number_of_streams_depends_on_the_data_alone(configure, overrides, monkeypatch):
    """Not on workers or devices."""

    def count(*more):
        loader = TrainDataLoader(build_run_context(configure(*overrides, *more)))
        loader.close()
        return loader.streams.count

    assert count("per_device_batch_size=4") == 1  # of sixty documents
    monkeypatch.setattr(pipeline, "STREAM_DOCUMENTS", 8)
    assert count("per_device_batch_size=4") == 4
    assert count("per_device_batch_size=6") == 3
    assert count("per_device_batch_size=4", "data_streams=3") == 3
    assert count("per_device_batch_size=12") == 4
    assert count("per_device_batch_size=7", "grain_use_elastic_iterator=true") == 7
