"""Batches dealt from a fixed number of data streams: the same rows whatever the mesh, hosts and
workers.

The documents are divided over S data streams. The rows of a run are dealt from them in turn: row g
of the run is row g // S of stream g % S. The batch of a step is the next R rows of the run, ordered
by stream, so that a process whose devices hold a contiguous part of the batch loads few streams. S
depends on the configuration and the data, never on devices, processes or workers, and so does a
batch. R may change between steps (ramp-up) and on resume: the deal goes on at the next row.

A process loads every data stream that has rows for its devices, and gives exactly those rows. Two
processes whose devices hold the same rows load the same data streams.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np

from maxtext.input_pipeline.interface import Batch, BatchIterator, State, check_position

DATA_STREAMS = (
    4  # by default, at most: each packs a group of rows of its own before the first batch
)
OPENED_AT_ONCE = 16
# layouts of a batch that are looked at to find the streams of a process; if there are more, it
# takes all
LAYOUTS = 4096
# Of index, count, local_streams, full_window (see ShardSpec)
MakeStream = Callable[[int, int, int, bool], BatchIterator]


def choose_stream_count(rows: int, supports: Callable[[int], bool], elastic: bool = False) -> int:
    """How many data streams share batches of `rows`: the largest divisor of `rows` up to
    DATA_STREAMS that the source supports. `elastic`: up to one for each row."""
    most = rows if elastic else min(rows, DATA_STREAMS)
    divisors = [number for number in range(most, 1, -1) if rows % number == 0]
    return next((number for number in divisors if supports(number)), 1)


def rows_per_stream(rows: int, count: int, first: int) -> np.ndarray:
    """[count]: how many of the next `rows` rows each stream gives if stream `first` gives the next
    one.
    """
    return rows // count + ((np.arange(count) - first) % count < rows % count)


def stream_of_rows(rows: int, count: int, first: int) -> np.ndarray:
    """[rows]: the stream of each row of a batch."""
    return np.repeat(np.arange(count), rows_per_stream(rows, count, first))


class RowBuffer:
    """The rows of one data stream, in any numbers, from batches of any size. A position is that of
    `source` before the oldest batch that is not used up, and the rows used since; it holds for any
    batch size of the source."""

    def __init__(self, source: BatchIterator):
        self.source = source
        self.clear()

    def clear(self, used: int = 0) -> None:
        self.batches: deque[tuple[State, Batch]] = deque()
        self.used = used
        self.loaded = 0  # rows in `batches`
        self.ended = False

    def load(self, rows: int) -> int:
        """How many rows are ready: at least `rows`, unless the stream ends before."""
        while self.loaded - self.used < rows and not self.ended:
            before = self.source.get_state()
            batch = next(self.source, None)
            if batch is None:
                self.ended = True
                check_position(self.used, self.loaded)
            else:
                self.batches.append((before, batch))
                self.loaded += batch_rows(batch)
                self.drop_used()
        return self.loaded - self.used

    def drop_used(self) -> None:
        while self.batches and self.used >= (size := batch_rows(self.batches[0][1])):
            self.batches.popleft()
            self.used, self.loaded = self.used - size, self.loaded - size

    def take(self, rows: int) -> list[Batch]:
        """The next `rows` rows, which are loaded."""
        parts = []
        while rows:
            batch = self.batches[0][1]
            part = {name: field[self.used : self.used + rows] for name, field in batch.items()}
            parts.append(part)
            self.used, rows = self.used + batch_rows(part), rows - batch_rows(part)
            self.drop_used()
        return parts

    def get_state(self) -> State:
        return {
            "used": self.used,
            "source": self.batches[0][0] if self.batches else self.source.get_state(),
        }

    def set_state(self, state: State) -> None:
        self.source.set_state(state["source"])
        # Older positions counted a batch that was not begun.
        self.clear(state["used"] if state.get("started", True) else 0)
        self.load(0)  # past the rows that were used, to learn now whether they are still there

    def reset(self) -> None:
        self.source.reset()
        self.clear()


class DataStreams(BatchIterator):
    """The rows of each batch that this process holds.

    `rows(step)`: the size of the whole batch of a step, one of `sizes`. `local_rows(size)`: sorted
    indices of the rows of a batch that this process gives; None: all. `pad`: a stream that has
    ended gives padding until all have. Otherwise a process that trains alone goes on with the
    streams that are left, and one of several ends with the first.
    """

    def __init__(
        self,
        make: MakeStream,
        count: int,
        rows: Callable[[int], int],
        sizes: Sequence[int],
        *,
        local_rows: Callable[[int], np.ndarray] | None = None,
        pad: bool = False,
        single_process: bool = True,
    ):
        self.make, self.count, self.rows, self.sizes = make, count, rows, sizes
        self.local_rows = lru_cache(None)(local_rows or np.arange)
        self.pad, self.single_process = pad, single_process
        self.first = self.step = 0
        self.full_window = False
        self.streams = self.open()

    def needed(self) -> Collection[int]:
        """The streams that have rows for this process, now or in a later step."""
        step = int(np.gcd.reduce([self.count, *self.sizes]))
        firsts = range(self.first % step, self.count, step)
        local_rows = {size: self.local_rows(size) for size in self.sizes}
        if (
            all(len(rows) == size for size, rows in local_rows.items())
            or len(firsts) * len(local_rows) > LAYOUTS
        ):
            return range(self.count) if any(map(len, local_rows.values())) else ()
        layouts = (
            stream_of_rows(size, self.count, first)[rows]
            for size, rows in local_rows.items()
            for first in firsts
        )
        return np.unique(np.concatenate(list(layouts))).tolist()

    def open(self) -> dict[int, RowBuffer]:
        numbers = self.needed()
        # At once: a worker takes seconds to start and to prepare its first batch.
        with ThreadPoolExecutor(max(1, min(len(numbers), OPENED_AT_ONCE))) as executor:
            opening = {
                number: executor.submit(
                    self.make, number, self.count, len(numbers), self.full_window
                )
                for number in numbers
            }
        failed = [one for one in opening.values() if one.exception() is not None]
        if failed:
            for one in opening.values():
                if one not in failed:
                    one.result().close()
            failed[0].result()
        return {number: RowBuffer(one.result()) for number, one in opening.items()}

    def __next__(self) -> Batch:
        rows = self.rows(self.step)
        counts, following = (
            rows_per_stream(rows, self.count, self.first),
            (self.first + rows) % self.count,
        )
        ready = {
            number: stream.load(int(counts[number])) for number, stream in self.streams.items()
        }
        if any(ready[number] < counts[number] for number in ready):
            if self.pad and all(not stream.load(1) for stream in self.streams.values()):
                raise StopIteration
            if not self.pad:
                counts, following = self.deal(rows)
        self.step, self.first = self.step + 1, following
        if not self.streams:  # another process reads for this one
            return {}
        return self.gather(rows, counts)

    def deal(self, rows: int) -> tuple[np.ndarray, int]:
        """The deal when a stream has ended: the others go on in turn. Rows of each stream, and who
        is next.
        """
        if not self.single_process:
            raise StopIteration
        counts, number, passed = np.zeros(self.count, int), self.first, 0
        while counts.sum() < rows:
            if self.streams[number].load(int(counts[number]) + 1) > counts[number]:
                counts[number], passed = counts[number] + 1, 0
            else:
                passed += 1
                if passed == self.count:
                    raise StopIteration
            number = (number + 1) % self.count
        return counts, number

    def gather(self, rows: int, counts: np.ndarray) -> Batch:
        ends = np.cumsum(counts)
        parts: list[Batch] = []
        indices = []  # of the rows in the whole batch
        missing: list[tuple[int, int]] = []  # (number of parts before it, rows of padding)
        for number, stream in self.streams.items():
            wanted = int(counts[number])
            taken = min(wanted, stream.load(wanted))
            parts += stream.take(taken)
            if taken < wanted:
                missing.append((len(parts) + len(missing), wanted - taken))
            indices.append(np.arange(ends[number] - wanted, ends[number]))
        if missing:
            some = parts[0] if parts else self.some_row()
            for place, size in missing:
                parts.insert(
                    place,
                    {name: np.zeros((size, *f.shape[1:]), f.dtype) for name, f in some.items()},
                )
        batch = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        local_rows, loaded = self.local_rows(rows), np.concatenate(indices)
        if len(local_rows) == len(loaded):
            return batch
        chosen = np.searchsorted(loaded, local_rows)
        return {name: field[chosen] for name, field in batch.items()}

    def some_row(self) -> Batch:
        """A row that is not used now, for the names and types of its fields."""
        return next(stream.batches[0][1] for stream in self.streams.values() if stream.batches)

    def global_rows(self, batch: Batch) -> int | None:
        """The rows of the whole batch of which this process holds `batch`; None: it holds none of
        any.
        """
        local_rows = batch_rows(batch) if batch else 0
        return (
            next((size for size in self.sizes if len(self.local_rows(size)) == local_rows), None)
            if local_rows
            else None
        )

    def get_state(self) -> State:
        streams = {str(number): stream.get_state() for number, stream in self.streams.items()}
        state = {"count": self.count, "first": self.first, "step": self.step, "streams": streams}
        return state | ({"whole_window": True} if self.full_window else {})

    def set_state(self, state: State) -> None:
        saved = state["streams"]
        # Older positions had the step with each stream, and a number of streams that divided every
        # batch.
        self.step = (
            state["step"] if "step" in state else next((one["step"] for one in saved.values()), 0)
        )
        self.first = state.get("first", 0)
        opened = self.count, self.full_window
        self.count = state["count"]
        self.full_window = self.count > 1 and state.get("whole_window", "first" not in state)
        if (self.count, self.full_window) != opened or set(self.needed()) - set(self.streams):
            self.close()
            self.streams = self.open()
        with ThreadPoolExecutor(max(1, min(len(self.streams), OPENED_AT_ONCE))) as executor:
            list(
                executor.map(
                    lambda number: self.streams[number].set_state(saved[str(number)]), self.streams
                )
            )

    def reset(self) -> None:
        self.first = self.step = 0
        for stream in self.streams.values():
            stream.reset()

    def close(self) -> None:
        for stream in self.streams.values():
            stream.source.close()


def batch_rows(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def merge_states(states: Iterable[State]) -> State:
    """The position of a run from those that its processes saved: each knows its own streams."""
    joined: Any = {}
    for state in states:
        joined = merged(joined, state, "")
    return joined


def merged(first: Any, second: Any, where: str) -> Any:
    if isinstance(first, dict) and isinstance(second, dict):
        both = first | second
        return {
            key: merged(first[key], second[key], f"{where}/{key}")
            if key in first and key in second
            else value
            for key, value in both.items()
        }
    if first != second:
        raise ValueError(
            f"processes saved different data positions at {where}: {first} and {second}"
        )
    return first
