"""Streams: the same batches whoever loads them, a position that other numbers of processes can take up."""

import json

import numpy as np
import pytest

from maxtext.input_pipeline import FIELDS, BatchIterator, Share, Split, Streams, join_states, sources, stream_count


class Counting(BatchIterator):
    """Batch n of stream v is one row that says 100 v + n; `length` batches."""

    def __init__(self, number, count, length=10**9):
        self.number, self.length, self.step = number, length, 0

    def __next__(self):
        if self.step == self.length:
            raise StopIteration
        self.step += 1
        return {"inputs": np.full((1, 2), 100 * self.number + self.step - 1)}

    def get_state(self):
        return {"step": self.step}

    def set_state(self, state):
        self.step = state["step"]

    def reset(self):
        self.step = 0


def rows(streams):
    return next(streams)["inputs"][:, 0].tolist()


def test_rows_are_in_the_order_of_streams():
    whole = Streams(Counting, 4, range)
    assert rows(whole) == [0, 100, 200, 300]
    assert rows(whole) == [1, 101, 201, 301]


def test_two_processes_load_what_one_loads():
    low, high = (Streams(Counting, 4, lambda count, half=half: range(half * count // 2, (half + 1) * count // 2))
                 for half in (0, 1))  # fmt: skip
    whole = Streams(Counting, 4, range)
    for _ in range(3):
        assert rows(low) + rows(high) == rows(whole)
    # The position of both together is that of one, also through JSON, in any order.
    saved = [json.loads(json.dumps(part.get_state())) for part in (high, low)]
    assert join_states(saved) == whole.get_state()
    resumed = Streams(Counting, 4, range)
    resumed.set_state(join_states(saved))
    assert rows(resumed) == rows(whole)


def test_a_position_keeps_its_number_of_streams():
    saved = Streams(Counting, 4, range)
    rows(saved)
    other = Streams(Counting, 2, range)
    other.set_state(saved.get_state())
    assert other.count == 4
    assert rows(other) == [1, 101, 201, 301]


def test_positions_that_contradict_each_other():
    with pytest.raises(ValueError, match="different data positions at /streams/0/step: 1 and 2"):
        join_states([{"streams": {"0": {"step": 1}}}, {"streams": {"0": {"step": 2}}}])


def test_the_first_stream_that_ends_is_the_end():
    streams = Streams(lambda number, count: Counting(number, count, 2 + number), 2, range)
    assert rows(streams) == [0, 100]
    assert rows(streams) == [1, 101]
    with pytest.raises(StopIteration):
        next(streams)


def test_evaluation_goes_on_until_all_have_ended():
    streams = Streams(lambda number, count: Counting(number, count, 1 + number), 2, range, pad=True)
    for _ in range(2):
        assert rows(streams) == [0, 100]
        assert rows(streams) == [0, 101]  # padding is zeros
        with pytest.raises(StopIteration):
            next(streams)
        streams.reset()


def test_streams_of_text_cover_every_document_once(make_config, write):
    """Four streams of files, one document a row: together they have each document once, and none twice."""
    documents = [f"document number {number:02d}" for number in range(32)]
    config = make_config(grain_train_files=write(*documents), packing=False, max_target_length=32, num_epoch=1)

    def make(number, count):
        return sources.make_train_iterator(config, Share(1, number, count))

    assert sources.most_streams(config, Split.TRAIN) == 4
    streams = Streams(make, 4, range)
    seen = [tuple(row) for batch in streams for row in batch["inputs"]]
    assert len(seen) == len(set(seen)) == len(documents)
    assert set(next(Streams(make, 4, range))) == set(FIELDS)


@pytest.mark.parametrize(
    ("rows", "blocks", "workers", "elastic", "most", "count"),
    [
        (12, 1, 1, False, 99, 1),
        (12, 1, 0, False, 99, 1),
        (12, 4, 1, False, 99, 4),  # one for each part of the batch
        (12, 4, 5, False, 99, 12),  # twelve can be divided among five workers, four cannot
        (12, 1, 5, False, 99, 6),
        (12, 1, 50, False, 99, 12),
        (12, 4, 1, True, 99, 12),  # one a row
        (12, 4, 1, True, 5, 4),  # of few documents
        (12, 4, 1, False, 3, 2),
        (7, 1, 2, False, 99, 7),
    ],
)
def test_how_many_streams(rows, blocks, workers, elastic, most, count):
    assert stream_count(rows, blocks, workers, elastic, lambda: most) == count
    assert rows % count == 0
