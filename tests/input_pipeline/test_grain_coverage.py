"""Every document is read exactly once: over epochs, processes, packing types and the last batch."""

import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from maxtext.input_pipeline import ShardSpec, Split
from tests.support.batches import make_eval_iterator, make_iterator, make_train_iterator

pytestmark = pytest.mark.usefixtures("few_open_rows")

PACKINGS = ["first_fit", "best_fit", "concat_then_split", None]


def with_packing(packing):
    return {"packing": False} if packing is None else {"grain_packing_type": packing}


def segments(batches):
    """The targets of each segment, as text without the end token."""
    for batch in batches:
        for targets, segmentation in zip(
            batch["targets"], batch["targets_segmentation"], strict=True
        ):
            for number in range(1, segmentation.max() + 1):
                yield bytes(
                    int(token) - 3 for token in targets[segmentation == number] if token > 2
                ).decode()


def words(count, longest, seed=0):
    """Different documents of 2 to `longest` letters."""
    generator = random.Random(seed)
    texts = set()
    while len(texts) < count:
        texts.add("".join(generator.choices("abcdefgh", k=generator.randint(2, longest))))
    return sorted(texts, key=lambda word: generator.random())


@pytest.mark.parametrize("packing", ["first_fit", "best_fit", None])
@pytest.mark.parametrize("shuffle", [True, False])
def test_two_processes_read_every_document_once_per_epoch(make_config, write, packing, shuffle):
    documents = words(count=41, longest=7)
    config = make_config(
        grain_train_files=write(*documents),
        enable_data_shuffling=shuffle,
        num_epoch=3,
        **with_packing(packing),
    )
    seen = [
        Counter(
            segments(make_iterator(config, Split.TRAIN, ShardSpec(rows=1, index=index, count=2)))
        )
        for index in (0, 1)
    ]
    assert seen[0] + seen[1] == Counter(dict.fromkeys(documents, 3))
    assert seen[0].total() == 3 * 21
    assert seen[1].total() == 3 * 20


def test_each_epoch_has_its_own_order_and_shards(make_config, write):
    documents = words(count=20, longest=7)
    config = make_config(
        grain_train_files=write(*documents),
        enable_data_shuffling=True,
        num_epoch=2,
        packing=False,
        # a window mixes the end of an epoch with the start of the next
        grain_shuffle_buffer_size=1,
    )
    seen = [
        list(segments(make_iterator(config, Split.TRAIN, ShardSpec(1, index=index, count=2))))
        for index in (0, 1)
    ]
    for epoch in (slice(0, 10), slice(10, 20)):
        assert sorted(seen[0][epoch] + seen[1][epoch]) == sorted(documents)
    assert set(seen[0][:10]) != set(seen[0][10:])


def test_order_is_determined_by_the_seed(make_config, write):
    documents = words(count=20, longest=7)
    folder = write(*documents)

    def order(**update):
        return list(
            segments(
                make_train_iterator(make_config(grain_train_files=folder, packing=False, **update))
            )
        )

    assert order(enable_data_shuffling=False) == documents
    first = order(enable_data_shuffling=True, data_shuffle_seed=1)
    assert first == order(enable_data_shuffling=True, data_shuffle_seed=1)
    assert first != documents
    assert first != order(enable_data_shuffling=True, data_shuffle_seed=2)
    assert sorted(order(enable_data_shuffling=True, data_shuffle_seed=2**40 + 3)) == sorted(
        documents
    )


@pytest.mark.parametrize("packing", PACKINGS)
def test_keeps_every_pair_without_truncation(make_config, write, packing):
    documents = words(count=40, longest=60)
    config = make_config(
        grain_train_files=write(*documents),
        enable_data_shuffling=True,
        use_truncation=False,
        **with_packing(packing),
    )
    expected: Counter = Counter()
    for document in documents:
        tokens = [1, *(byte + 3 for byte in document.encode()), 2]
        expected.update(pairwise(tokens))
    seen: Counter = Counter()
    for batch in make_train_iterator(config):
        mask = batch["targets_segmentation"] != 0
        seen.update(
            zip(batch["inputs"][mask].tolist(), batch["targets"][mask].tolist(), strict=True)
        )
        # The shift, inside each segment.
        inside = (
            batch["inputs_segmentation"][:, 1:] == batch["inputs_segmentation"][:, :-1]
        ) & mask[:, 1:]
        np.testing.assert_array_equal(
            batch["targets"][:, :-1][inside], batch["inputs"][:, 1:][inside]
        )
    assert seen == expected


def test_training_drops_and_evaluation_pads_the_last_batch(make_config, write):
    documents = words(count=7, longest=7)
    folder = write(*documents)
    config = make_config(
        grain_train_files=folder,
        grain_eval_files=folder,
        packing=False,
        global_batch_size_to_load=3,
        global_batch_size_to_load_eval=3,
        enable_data_shuffling=True,
        num_epoch=2,
    )
    assert len(list(make_train_iterator(config))) == 14 // 3
    batches = list(make_eval_iterator(config))
    assert list(segments(batches)) == documents  # once, in order
    assert [batch["inputs"].shape for batch in batches] == [(3, 8)] * 3
    assert not any(array[1:].any() for array in batches[-1].values())
    assert batches[-1]["targets_segmentation"][0].any()


def test_reset_restarts_evaluation(make_config, write):
    documents = words(count=5, longest=7)
    iterator = make_eval_iterator(make_config(grain_eval_files=write(*documents)))
    once = list(segments(iterator))
    assert list(segments(iterator)) == []
    iterator.reset()
    assert list(segments(iterator)) == once
    iterator.reset()
    next(iterator)
    iterator.reset()
    assert list(segments(iterator)) == once


def test_no_evaluation_without_files(make_config, write):
    assert make_eval_iterator(make_config(grain_train_files=write("abc"))) is None
