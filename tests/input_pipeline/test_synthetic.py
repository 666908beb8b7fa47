"""Synthetic batches, and reuse_example_batch."""

import json

import numpy as np
import pytest

from maxtext.common.errors import ConfigError
from maxtext.configs.types import DatasetType
from maxtext.input_pipeline import FIELDS, ShardSpec, Split
from tests.support.batches import make_eval_iterator, make_iterator, make_train_iterator


@pytest.fixture
def config(make_config):
    return make_config(
        dataset_type=DatasetType.SYNTHETIC,
        vocab_size=50,
        max_target_length=64,
        global_batch_size_to_load=4,
        global_batch_size_to_load_eval=2,
    )


def test_a_batch_is_one_full_segment_shifted_once(config):
    batch = next(make_train_iterator(config))
    assert tuple(batch) == FIELDS
    assert all(array.dtype == np.int32 and array.shape == (4, 64) for array in batch.values())
    np.testing.assert_array_equal(batch["targets"][:, :-1], batch["inputs"][:, 1:])
    assert (batch["inputs_segmentation"] == 1).all()
    assert (batch["targets_segmentation"] == 1).all()
    np.testing.assert_array_equal(batch["targets_position"][3], np.arange(64))


def test_samples_all_token_ids(config):
    iterator = make_train_iterator(config)
    seen = np.unique(np.stack([next(iterator)["inputs"] for _ in range(10)]))
    np.testing.assert_array_equal(seen, np.arange(50))


def test_batches_depend_on_seed_process_split_and_step(config):
    other_seed = config.model_copy(update={"data_shuffle_seed": 1})
    streams = [
        make_iterator(config, Split.TRAIN, ShardSpec(2)),
        make_iterator(other_seed, Split.TRAIN, ShardSpec(2)),
        make_iterator(config, Split.TRAIN, ShardSpec(2, index=1, count=2)),
        make_iterator(config, Split.EVAL, ShardSpec(2)),
    ]
    batches = [next(stream)["inputs"].tobytes() for stream in streams for _ in range(3)]
    assert len(set(batches)) == 12
    assert next(make_iterator(config, Split.TRAIN, ShardSpec(2)))["inputs"].tobytes() == batches[0]


def test_position_is_the_row(config):
    iterator = make_train_iterator(config)
    batches = [next(iterator) for _ in range(3)]
    state = json.loads(json.dumps(iterator.get_state()))
    assert state["position"] == {"row": 3 * len(batches[0]["inputs"])}
    following = next(iterator)
    resumed = make_train_iterator(config)
    resumed.set_state(state)
    np.testing.assert_array_equal(next(resumed)["inputs"], following["inputs"])
    resumed.reset()
    np.testing.assert_array_equal(next(resumed)["inputs"], batches[0]["inputs"])


def test_rows_do_not_depend_on_the_batch_size(config):
    small, large = (make_iterator(config, Split.TRAIN, ShardSpec(rows)) for rows in (2, 6))
    np.testing.assert_array_equal(
        np.concatenate([next(small)["inputs"] for _ in range(3)]), next(large)["inputs"]
    )
    large.set_state(small.get_state())
    np.testing.assert_array_equal(next(large)["inputs"][:2], next(small)["inputs"])


def test_reads_positions_of_older_versions(config):
    iterator = make_train_iterator(config)
    start = iterator.get_state()
    first = next(iterator)["inputs"]
    iterator.set_state({**start, "position": {"step": 3}})  # counted in batches
    assert (next(iterator)["inputs"] != first).any()


def test_evaluation_has_its_own_batch_size(config):
    assert next(make_eval_iterator(config))["inputs"].shape == (2, 64)


def test_reuse_example_batch(config):
    first = next(make_train_iterator(config))["inputs"]
    iterator = make_train_iterator(config.model_copy(update={"reuse_example_batch": 1}))
    start = iterator.get_state()
    for _ in range(3):
        np.testing.assert_array_equal(next(iterator)["inputs"], first)
    assert iterator.get_state() == start
    later = make_train_iterator(config)
    later.set_state({**start, "position": {"row": 7}})
    iterator.set_state({**start, "position": {"row": 7}})
    np.testing.assert_array_equal(next(iterator)["inputs"], next(later)["inputs"])
    iterator.reset()
    np.testing.assert_array_equal(next(iterator)["inputs"], first)


def test_position_of_another_source_raises(config, make_config, write):
    state = make_train_iterator(make_config(grain_train_files=write("abcdefgh"))).get_state()
    with pytest.raises(
        ConfigError, match="dataset_type=grain, but this run has dataset_type=synthetic"
    ):
        make_train_iterator(config).set_state(state)
