"""Properties of every source and packing: exact resume, every document once, and batches that
depend on the seed only.
"""

import json
import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from maxtext.input_pipeline import ShardSpec, Split
from tests.input_pipeline.corpora import SOURCES
from tests.support.batches import make_iterator, make_train_iterator, open_data_streams

pytestmark = pytest.mark.usefixtures("few_open_rows")
PACKINGS = ["first_fit", "best_fit", "concat_then_split", "none"]
# c4_mlperf has a way of its own.
CASES = [
    (source, packing)
    for source in SOURCES
    for packing in (PACKINGS if source != "c4_mlperf" else ["its own"])
]


def words(count=48, longest=7, seed=0):
    """Different documents, each short enough for a row of 8."""
    generator = random.Random(seed)
    texts = set()
    while len(texts) < count:
        texts.add("".join(generator.choices("abcdefgh", k=generator.randint(2, longest))))
    return sorted(texts, key=lambda word: generator.random())


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """The settings of each source, written once."""
    corpora = {}

    def settings(name):
        if name not in corpora:
            folder = tmp_path_factory.mktemp(name)
            corpora[name] = SOURCES[name](folder, words())
        return corpora[name]

    return settings


@pytest.fixture
def configured(make_config, corpus):
    def config(source, packing="first_fit", **update):
        how = {"packing": False} if packing == "none" else {"grain_packing_type": packing}
        how = {} if source == "c4_mlperf" else how
        defaults = {"enable_data_shuffling": True, "num_epoch": 2, "global_batch_size_to_load": 2}
        defaults["grain_shuffle_buffer_size"] = 5
        return make_config(**defaults | corpus(source) | how | update)

    return config


def pairs(batches):
    """How often each (input, target) was predicted."""
    seen: Counter = Counter()
    for batch in batches:
        mask = batch["targets_segmentation"] != 0
        seen.update(
            zip(batch["inputs"][mask].tolist(), batch["targets"][mask].tolist(), strict=True)
        )
    return seen


def expected(documents, times):
    """The same by the definition of the byte tokenizer."""
    seen: Counter = Counter()
    for document in documents:
        for pair in pairwise([1, *(byte + 3 for byte in document.encode()), 2]):
            seen[pair] += times
    return seen


def same(left, right):
    assert len(left) == len(right)
    for actual, expected in zip(left, right, strict=True):
        for field in actual:
            np.testing.assert_array_equal(actual[field], expected[field])


@pytest.mark.parametrize(("source", "packing"), CASES)
def test_resume_is_exact(configured, source, packing):
    config = configured(source, packing)
    iterator = make_train_iterator(config)
    batches, states = [], [json.dumps(iterator.get_state())]
    for batch in iterator:
        batches.append(batch)
        states.append(json.dumps(iterator.get_state()))
    assert len(batches) >= 10
    for done in random.Random(f"{source} {packing}").sample(range(len(batches)), 2):
        resumed = make_train_iterator(config)
        resumed.set_state(json.loads(states[done]))
        same(list(resumed), batches[done:])
        resumed.close()


@pytest.mark.parametrize(("source", "packing"), CASES)
def test_two_hosts_read_every_document_once_per_epoch(configured, source, packing):
    config = configured(source, packing)
    halves = [
        pairs(make_iterator(config, Split.TRAIN, ShardSpec(rows=1, index=index, count=2)))
        for index in (0, 1)
    ]
    assert halves[0] + halves[1] == expected(words(), 2)
    assert abs(halves[0].total() - halves[1].total()) < 0.4 * halves[0].total()


@pytest.mark.parametrize("source", SOURCES)
def test_order_depends_on_the_seed(configured, source):
    first, again, other = (
        np.concatenate(
            [
                batch["inputs"]
                for batch in make_train_iterator(configured(source, data_shuffle_seed=seed))
            ]
        )
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert first.shape != other.shape or (first != other).any()


@pytest.mark.parametrize("source", SOURCES)
def test_batches_are_independent_of_processes(configured, source):
    """Two processes, each with half of the rows of a batch, have together what one has."""
    config = configured(source, grain_worker_count=0, data_streams=2)

    def batches(local_rows=None, processes=1):
        streams = open_data_streams(config, Split.TRAIN, lambda step: 4, [4], local_rows, processes)
        texts = [batch["inputs"] for batch in streams]
        streams.close()
        return texts

    batches_of_one_process = batches()
    halves = [
        batches(lambda rows, half=half: np.arange(rows)[2 * half : 2 * half + 2], 2)
        for half in (0, 1)
    ]
    # Several processes end with the first stream that does, one goes on with the other stream.
    steps = min(map(len, halves))
    assert len(batches_of_one_process) >= steps > 2
    for step in range(steps):
        np.testing.assert_array_equal(
            np.concatenate([half[step] for half in halves]), batches_of_one_process[step]
        )
