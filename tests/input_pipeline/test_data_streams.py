"""Data streams: batches independent of processes, and states valid for other batch sizes and
processes.
"""

import json

import numpy as np
import pytest

from maxtext.common.errors import UserError
from maxtext.input_pipeline import (
    FIELDS,
    BatchIterator,
    DataStreams,
    ShardSpec,
    Split,
    choose_stream_count,
    merge_states,
    sources,
)
from maxtext.input_pipeline.data_streams import RowBuffer
from maxtext.input_pipeline.row_formats import DOCUMENTS


class Counting(BatchIterator):
    """Row n of stream v says 100 v + n; `length` rows, `size` at a time."""

    def __init__(self, number, count, local_streams, full_window=False, length=10**9, size=1):
        self.number, self.length, self.size, self.row = number, length, size, 0

    def __next__(self):
        rows = np.arange(self.row, min(self.row + self.size, self.length))
        if not len(rows):
            raise StopIteration
        self.row += len(rows)
        return {"inputs": (100 * self.number + rows)[:, None] * np.ones(2, int)}

    def get_state(self):
        return {"row": self.row}

    def set_state(self, state):
        self.row = state["row"]

    def reset(self):
        self.row = 0


def of_size(size, length=10**9):
    return lambda *shard: Counting(*shard, length, size)


def streams_of(count, rows, make=Counting, local_rows=None, **more):
    """`local_rows`: the part of the batch that the process has, as (which, of how many)."""
    which, parts = local_rows or (0, 1)
    indices = (lambda size: np.array_split(np.arange(size), parts)[which]) if local_rows else None
    more = {"single_process": local_rows is None} | more
    return DataStreams(make, count, lambda step: rows, [rows], local_rows=indices, **more)


def rows(streams):
    return next(streams)["inputs"][:, 0].tolist()


def dealt(count, first, number):
    """Rows `first`, … of the deal, by its definition: row g is row g // count of stream g %
    count.
    """
    return [100 * (row % count) + row // count for row in range(first, first + number)]


def test_rows_of_a_batch_are_ordered_by_stream():
    single = streams_of(4, 4)
    assert rows(single) == [0, 100, 200, 300]
    assert rows(single) == [1, 101, 201, 301]
    assert rows(streams_of(2, 4)) == [0, 1, 100, 101]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 12])
@pytest.mark.parametrize("loaded", [1, 5])
def test_batches_take_rows_round_robin(count, size, loaded):
    batches = streams_of(count, size, of_size(loaded))
    for step in range(7):
        assert sorted(rows(batches)) == sorted(dealt(count, step * size, size))


@pytest.mark.parametrize(
    ("count", "size"), [(4, 4), (4, 8), (8, 4), (1, 4), (8, 12), (3, 4), (4, 6)]
)
@pytest.mark.parametrize("parts", [2, 4])
def test_processes_load_the_rows_of_a_single_process(count, size, parts):
    processes = [streams_of(count, size, local_rows=(part, parts)) for part in range(parts)]
    single = streams_of(count, size)
    for _ in range(5):
        assert [row for process in processes for row in rows(process)] == rows(single)
    # The position of all together is that of one, also through JSON, in any order.
    saved = [json.loads(json.dumps(process.get_state())) for process in reversed(processes)]
    assert merge_states(saved) == single.get_state()
    resumed = streams_of(count, size)
    resumed.set_state(merge_states(saved))
    assert rows(resumed) == rows(single)


@pytest.mark.parametrize(
    ("count", "size", "streams"), [(8, 8, 4), (8, 64, 4), (8, 4, 4), (16, 4, 8), (4, 2, 2)]
)
def test_half_of_the_devices_load_half_of_the_streams(count, size, streams):
    assert len(streams_of(count, size, local_rows=(1, 2)).streams) == streams


@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize(("before", "after"), [(8, 4), (4, 8), (8, 3), (3, 7), (16, 2), (2, 16)])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_resume_with_another_batch_size_continues_at_the_next_row(count, before, after, steps):
    """The source loads as many rows at a time as a batch has, so the size of its batches changes as
    well.
    """
    saved = streams_of(count, before, of_size(before))
    for _ in range(steps):
        rows(saved)
    resumed = streams_of(count, after, of_size(after))
    resumed.set_state(json.loads(json.dumps(saved.get_state())))
    for step in range(6):
        assert sorted(rows(resumed)) == sorted(dealt(count, steps * before + step * after, after))


def test_resume_keeps_the_number_of_streams():
    saved = streams_of(4, 4)
    rows(saved)
    other = streams_of(2, 4)
    other.set_state(saved.get_state())
    assert other.count == 4
    assert rows(other) == [1, 101, 201, 301]


def test_reads_positions_of_older_versions():
    """Each stream had the step, and the rows used of a batch, which was as large as the batch size
    of that run.
    """
    saved = {
        str(number): {"step": 2, "used": 2, "started": True, "source": {"row": 2}}
        for number in range(4)
    } | {"3": {"step": 2, "used": 0, "started": False, "source": {"row": 4}}}
    resumed = streams_of(4, 4)
    resumed.set_state({"count": 4, "streams": saved})
    assert resumed.step == 2
    assert rows(resumed) == [4, 104, 204, 304]


def test_contradicting_states_raise():
    with pytest.raises(ValueError, match="different data positions at /streams/0/step: 1 and 2"):
        merge_states([{"streams": {"0": {"step": 1}}}, {"streams": {"0": {"step": 2}}}])


def test_missing_rows_before_the_position_raise():
    buffer = RowBuffer(Counting(0, 1, 1, length=3))
    with pytest.raises(UserError, match="past the end of the data"):
        buffer.set_state({"used": 5, "source": {"row": 0}})


def test_several_processes_end_with_the_first_stream():
    streams = streams_of(2, 2, lambda *shard: Counting(*shard, 2 + shard[0]), single_process=False)
    assert rows(streams) == [0, 100]
    assert rows(streams) == [1, 101]
    with pytest.raises(StopIteration):
        next(streams)


def test_single_process_continues_with_remaining_streams():
    """Three streams of 2, 7 and 4 rows: every row once, in turn, but those that fill no batch; also
    after a resume.
    """
    lengths = [2, 7, 4]

    def make(*shard):
        return Counting(*shard, lengths[shard[0]], 3)

    deal, left = (
        [],
        [list(range(100 * number, 100 * number + length)) for number, length in enumerate(lengths)],
    )
    while any(left):
        deal += [stream.pop(0) for stream in left if stream]
    for size in (1, 2, 3, 4, 5, 13):
        streams = streams_of(3, size, make)
        seen, states = [], [json.dumps(streams.get_state())]
        for batch in streams:
            seen.append(batch["inputs"][:, 0].tolist())
            states.append(json.dumps(streams.get_state()))
        assert [sorted(batch) for batch in seen] == [
            sorted(deal[start : start + size]) for start in range(0, 13 // size * size, size)
        ]
        for done, state in enumerate(states):
            resumed = streams_of(3, size, make)
            resumed.set_state(json.loads(state))
            assert [batch["inputs"][:, 0].tolist() for batch in resumed] == seen[done:]


def test_evaluation_pads_until_all_streams_end():
    streams = streams_of(2, 2, lambda *shard: Counting(*shard, 1 + shard[0]), pad=True)
    for _ in range(2):
        assert rows(streams) == [0, 100]
        assert rows(streams) == [0, 101]  # padding is zeros
        with pytest.raises(StopIteration):
            next(streams)
        streams.reset()


def test_padding_replaces_rows_of_ended_streams():
    streams = streams_of(3, 6, lambda *shard: Counting(*shard, [5, 1, 3][shard[0]], 2), pad=True)
    assert rows(streams) == [0, 1, 100, 0, 200, 201]
    assert rows(streams) == [2, 3, 0, 0, 202, 0]
    assert rows(streams) == [4, 0, 0, 0, 0, 0]
    assert next(streams, None) is None


def test_streams_of_text_cover_every_document_once(make_config, write):
    """Four streams of files, one document a row: together they have each document once, and none
    twice.
    """
    documents = [f"document number {number:02d}" for number in range(32)]
    config = make_config(
        grain_train_files=write(*documents), packing=False, max_target_length=32, num_epoch=1
    )

    def make(number, count, local_streams, full_window):
        shard = ShardSpec(1, index=number, count=count, min_rows=1)
        return sources.make_iterator(config, Split.TRAIN, DOCUMENTS, shard)

    assert (
        sources.max_data_streams(config, Split.TRAIN, DOCUMENTS) == 1
    )  # too few to be worth more, unless data_streams says so
    streams = streams_of(4, 4, make)
    seen = [tuple(row) for batch in streams for row in batch["inputs"]]
    assert len(seen) == len(set(seen)) == len(documents)
    assert set(next(streams_of(4, 4, make))) == set(FIELDS)


@pytest.mark.parametrize(
    ("rows", "elastic", "supports", "count"),
    [
        (12, False, lambda count: True, 4),
        (4096, False, lambda count: True, 4),
        (6, False, lambda count: True, 3),  # not more than four, and a divisor
        (7, False, lambda count: True, 1),
        (11, False, lambda count: True, 1),
        (12, True, lambda count: True, 12),  # one a row
        (12, True, lambda count: count <= 5, 4),  # of few documents
        (12, False, lambda count: 10 % count == 0, 2),  # of ten shards
        (1, False, lambda count: True, 1),
    ],
)
def test_choose_stream_count(rows, elastic, supports, count):
    assert choose_stream_count(rows, supports, elastic) == count
