"""dataset_type=olmo_grain on shards written here; the expected rows are cut by hand from the same
numbers.
"""

import json
from collections import Counter

import numpy as np
import pytest

from maxtext.common.errors import ConfigError, UserError
from maxtext.configs.types import DatasetType
from maxtext.input_pipeline import ShardSpec, Split, max_data_streams
from maxtext.input_pipeline.olmo_index import write_index
from maxtext.input_pipeline.row_formats import DOCUMENTS
from tests.support.batches import make_eval_iterator, make_iterator, make_train_iterator

LENGTH = 8
SIZES = (3 * LENGTH + 5, LENGTH - 1, 20 * LENGTH, 7 * LENGTH + 1)  # 30 instances


def shards(sizes=SIZES):
    """Arrays without a common token, so that a token identifies its position."""
    ends = np.cumsum(sizes)
    return [np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def instances(arrays):
    return [
        array[at : at + LENGTH]
        for array in arrays
        for at in range(0, len(array) - LENGTH + 1, LENGTH)
    ]


@pytest.fixture
def corpus(make_config, tmp_path):
    """Writes shards and their index, and returns a configuration that reads them."""

    def write(arrays, dtype="uint32", header=False, length=LENGTH, **update):
        paths = []
        for number, array in enumerate(arrays):
            paths.append(str(tmp_path / f"{number}.npy"))
            if header:
                np.save(paths[-1], array.astype(dtype))
            else:
                array.astype(dtype).tofile(paths[-1])
        write_index(tmp_path / "index.json", paths, length, dtype)
        settings = {
            "dataset_type": DatasetType.OLMO_GRAIN,
            "olmo_index_path": str(tmp_path / "index.json"),
            "max_target_length": length,
            "vocab_size": 1000,
            "global_batch_size_to_load": 2,
        }
        return make_config(**settings | update)

    return write


def rows(iterator):
    return [row for batch in iterator for row in batch["inputs"]]


def same(left, right):
    assert len(left) == len(right)
    for actual, expected in zip(left, right, strict=True):
        for field in actual:
            np.testing.assert_array_equal(actual[field], expected[field])


@pytest.mark.parametrize(
    ("dtype", "header"),
    [
        ("uint16", False),
        ("uint32", False),
        ("uint16", True),
        ("uint32", True),
        ("int64", True),
        (">u4", True),
    ],
)
def test_rows_are_the_instances_in_order(corpus, dtype, header):
    batches = list(make_train_iterator(corpus(shards(), dtype, header)))
    assert all(
        array.dtype == np.int32 and array.shape == (2, LENGTH)
        for batch in batches
        for array in batch.values()
    )
    expected = instances(shards())
    assert len(expected) == 30
    for number, tokens in enumerate(expected):
        row = {name: array[number % 2].tolist() for name, array in batches[number // 2].items()}
        assert row == {
            "inputs": tokens.tolist(),
            "inputs_position": [0, 1, 2, 3, 4, 5, 6, 7],
            "inputs_segmentation": [1] * 8,
            "targets": [*tokens[1:].tolist(), 0],
            "targets_position": [0, 1, 2, 3, 4, 5, 6, 0],
            "targets_segmentation": [1] * 7 + [0],
        }


def test_resume_is_exact_after_every_batch(corpus):
    config = corpus(shards(), enable_data_shuffling=True, num_epoch=3, global_batch_size_to_load=4)
    iterator = make_train_iterator(config)
    states, batches = [json.dumps(iterator.get_state())], []
    for batch in iterator:
        batches.append(batch)
        states.append(json.dumps(iterator.get_state()))
    assert len(batches) == 3 * 30 // 4
    for done in range(len(states)):
        resumed = make_train_iterator(config)
        resumed.set_state(json.loads(states[done]))
        assert json.dumps(resumed.get_state()) == states[done]
        same([batch for batch, _ in zip(resumed, range(3), strict=False)], batches[done : done + 3])


@pytest.mark.parametrize("shuffle", [True, False])
def test_two_streams_read_every_instance_once_per_epoch(corpus, shuffle):
    arrays = shards((13 * LENGTH, 18 * LENGTH + 2))
    config = corpus(arrays, enable_data_shuffling=shuffle, num_epoch=3)
    seen = [
        rows(make_iterator(config, Split.TRAIN, ShardSpec(1, index=index, count=2)))
        for index in (0, 1)
    ]
    assert [len(part) for part in seen] == [3 * 16, 3 * 15]
    first = Counter(int(row[0]) for row in seen[0][:16] + seen[1][:15])
    assert first == Counter(int(tokens[0]) for tokens in instances(arrays))
    every = Counter(tuple(row.tolist()) for part in seen for row in part)
    assert every == Counter({tuple(tokens.tolist()): 3 for tokens in instances(arrays)})
    assert (set(map(int, seen[0][0])) == set(range(LENGTH))) == (not shuffle)


def test_order_is_determined_by_the_seed(corpus):
    def order(**update):
        return [int(row[0]) for row in rows(make_train_iterator(corpus(shards(), **update)))]

    in_order = order(enable_data_shuffling=False)
    assert in_order == [int(tokens[0]) for tokens in instances(shards())]
    first = order(enable_data_shuffling=True, data_shuffle_seed=1)
    assert first == order(enable_data_shuffling=True, data_shuffle_seed=1)
    other = order(enable_data_shuffling=True, data_shuffle_seed=2)
    assert first != other
    assert in_order not in (first, other)
    assert sorted(first) == sorted(other) == in_order
    twice = order(enable_data_shuffling=True, data_shuffle_seed=1, num_epoch=2)
    assert twice[:30] == first
    assert twice[30:] != first


def test_moved_shards_are_found_by_remap(corpus, tmp_path):
    config = corpus(shards())
    expected = list(make_train_iterator(config))
    there = tmp_path / "elsewhere"
    there.mkdir()
    for path in tmp_path.glob("*.npy"):
        path.rename(there / path.name)
    index = (tmp_path / "index.json").read_text()
    (tmp_path / "index.json").write_text(index.replace(str(tmp_path), "gs://bucket/data"))
    moved = config.model_copy(
        update={"olmo_path_remap_from": "gs://bucket/data", "olmo_path_remap_to": str(there)}
    )
    same(list(make_train_iterator(moved)), expected)
    with pytest.raises(ConfigError, match="gs://bucket/data/0.npy does not exist"):
        make_train_iterator(config)
    with pytest.raises(
        ConfigError, match="olmo_path_remap_from=s3:.*the first is gs://bucket/data/0.npy"
    ):
        make_train_iterator(moved.model_copy(update={"olmo_path_remap_from": "s3:"}))


def test_repetitive_instances_are_masked_in_the_loss(corpus):
    generator = np.random.default_rng(0)
    array = generator.permutation(1000)[: 4 * 80].reshape(4, 80)
    array[1, 10:74] = np.tile([5, 6], 32)
    array[2, 20:80] = np.tile(
        [5, 6], 30
    )  # and the next goes on with it: repetitions do not count across instances
    array[3, :40] = np.tile([5, 6], 20)
    filtered, plain = (
        next(
            make_train_iterator(
                corpus([array.reshape(-1)], length=80, global_batch_size_to_load=4, **update)
            )
        )
        for update in ({}, {"olmo_apply_ngram_filter": False})
    )
    np.testing.assert_array_equal(plain["targets_segmentation"].sum(1), [79] * 4)
    np.testing.assert_array_equal(filtered["targets_segmentation"].sum(1), [79, 0, 79, 79])
    rest = [name for name in plain if name != "targets_segmentation"]
    same([{name: filtered[name] for name in rest}], [{name: plain[name] for name in rest}])


def test_tokens_outside_the_vocabulary(corpus):
    arrays = shards()
    config = corpus(arrays, vocab_size=int(arrays[-1][-1]) + 1)
    assert len(rows(make_train_iterator(config))) == 30
    bad = int(arrays[2][15])  # the last of its instance
    with pytest.raises(
        UserError, match=rf"2.npy has token {bad} at position 15, outside vocab_size={bad}: "
    ):
        list(make_train_iterator(config.model_copy(update={"vocab_size": bad})))
    arrays[2][0] = -4
    with pytest.raises(UserError, match="2.npy has token -4 at position 0, outside"):
        list(make_train_iterator(corpus(arrays, "int32")))


def test_a_shard_that_changes_during_the_run(corpus, tmp_path):
    config = corpus(shards(), grain_prefetch_buffer_size=1, grain_num_threads=1)
    for change, said in (
        (lambda path: path.write_bytes(b""), "become shorter"),
        (lambda path: path.unlink(), "No such"),
    ):
        iterator = make_train_iterator(config)
        path = tmp_path / "2.npy"
        content = path.read_bytes()
        change(path)
        with pytest.raises(UserError, match=f"2.npy .*{said}"):
            list(iterator)
        path.write_bytes(content)


def test_last_rows_are_dropped_or_padded(corpus):
    config = corpus(shards(), global_batch_size_to_load=7)
    assert len(list(make_train_iterator(config))) == 30 // 7
    padded = list(
        make_train_iterator(config.model_copy(update={"generate_padding_batch_train": True}))
    )
    assert len(padded) == 5
    assert not any(array[2:].any() for array in padded[-1].values())
    assert padded[-1]["targets_segmentation"][:2].all(axis=1).sum() == 0
    assert padded[-1]["targets_segmentation"][:2].sum() == 2 * (LENGTH - 1)


@pytest.mark.parametrize(
    ("update", "said"),
    [
        ({"olmo_index_path": ""}, "needs olmo_index_path"),
        (
            {"max_target_length": 16},
            "cuts instances of 8 tokens, but max_target_length=16: set it to 8",
        ),
        (
            {"global_batch_size_to_load": 31},
            "has 30 instances, and num_epoch=1, but one batch needs 31",
        ),
    ],
)
def test_settings_that_contradict_the_index_raise(corpus, update, said):
    with pytest.raises(ConfigError, match=said):
        make_train_iterator(corpus(shards(), **update))


def test_position_in_another_index_raises(corpus):
    state = make_train_iterator(corpus(shards(), enable_data_shuffling=True)).get_state()
    with pytest.raises(
        ConfigError, match="made with data_shuffle_seed=0, but this run has data_shuffle_seed=3"
    ):
        make_train_iterator(
            corpus(shards(), enable_data_shuffling=True, data_shuffle_seed=3)
        ).set_state(state)
    with pytest.raises(ConfigError, match="made with index=sha256:"):
        make_train_iterator(corpus(shards()[:3], enable_data_shuffling=True)).set_state(state)


def test_streams_and_evaluation(corpus):
    config = corpus(shards())
    assert max_data_streams(config, Split.TRAIN, DOCUMENTS) == 1  # of thirty instances
    assert make_eval_iterator(config) is None
