"""Batches from a fixed number of data streams: the same rows for any mesh, hosts and workers.

The documents are divided over S data streams, and the rows of a run are taken from them
round-robin: row g of the run is row g // S of stream g % S. The batch of a step is the next R rows
of the run, ordered by stream, so that a process whose devices hold a contiguous part of the batch
loads few streams. S, and with it every batch, depends on the configuration and the data, never on
devices, processes or workers. R may change between steps (ramp-up) and on resume.

A process loads every data stream that has rows for its devices, and yields exactly those rows. Two
processes whose devices hold the same rows load the same data streams.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np

from maxtext.input_pipeline.interface import Batch, BatchIterator, State, check_position

# Default maximum: each stream packs a group of rows of its own before the first batch
DATA_STREAMS = 4
OPENED_AT_ONCE = 16
# Orders of streams in a batch that are examined to find the streams of a process. If there are
# more, it loads all streams.
MAX_BATCH_ORDERS = 4096
# (index, count, local_streams, full_window), see ShardSpec
StreamFactory = Callable[[int, int, int, bool], BatchIterator]


def choose_stream_count(rows: int, supports: Callable[[int], bool], elastic: bool = False) -> int:
    """The number of data streams of batches of `rows`: the largest divisor of `rows` up to
    DATA_STREAMS that the source supports. With `elastic`, up to one for each row.
    """
    max_count = rows if elastic else min(rows, DATA_STREAMS)
    divisors = [count for count in range(max_count, 1, -1) if rows % count == 0]
    return next((count for count in divisors if supports(count)), 1)


def rows_per_stream(rows: int, count: int, first: int) -> np.ndarray:
    """[count]: how many of the next `rows` rows each stream yields, starting with stream
    `first`.
    """
    return rows // count + ((np.arange(count) - first) % count < rows % count)


def stream_of_rows(rows: int, count: int, first: int) -> np.ndarray:
    """[rows]: the stream of each row of a batch."""
    return np.repeat(np.arange(count), rows_per_stream(rows, count, first))


class RowBuffer:
    """Rows of one data stream, in any number, from batches of any size.

    The state is that of `source` before the oldest batch that is not used up, and the number of
    rows used since. It is valid for any batch size of the source.
    """

    def __init__(self, source: BatchIterator):
        self.source = source
        self.clear()

    def clear(self, used: int = 0) -> None:
        self.batches: deque[tuple[State, Batch]] = deque()
        self.used = used
        self.loaded = 0  # rows in `batches`
        self.ended = False

    def load(self, rows: int) -> int:
        """Load until `rows` rows are ready or the stream ends, and return the number ready."""
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
        """The next `rows` rows, which must be loaded."""
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
        self.load(0)  # reads past the rows that were used, to check that they still exist

    def reset(self) -> None:
        self.source.reset()
        self.clear()


class DataStreams(BatchIterator):
    """Yields the rows of each batch that this process loads.

    `rows(step)` is the global batch size of a step, one of `sizes`. `local_rows(size)` are the
    sorted indices of the rows that this process yields (None: all). With `pad`, a stream that has
    ended yields padding until all have ended. Otherwise a single process continues with the
    remaining streams, and one of several processes ends with the first stream that ends.
    """

    def __init__(
        self,
        make: StreamFactory,
        count: int,
        rows: Callable[[int], int],
        sizes: Sequence[int],
        *,
        local_rows: Callable[[int], np.ndarray] | None = None,
        pad: bool = False,
        single_process: bool = True,
    ):
        self.make = make
        self.count = count
        self.rows = rows
        self.sizes = sizes
        self.local_rows = lru_cache(None)(local_rows or np.arange)
        self.pad = pad
        self.single_process = single_process
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
            or len(firsts) * len(local_rows) > MAX_BATCH_ORDERS
        ):
            return range(self.count) if any(map(len, local_rows.values())) else ()
        stream_indices = (
            stream_of_rows(size, self.count, first)[rows]
            for size, rows in local_rows.items()
            for first in firsts
        )
        return np.unique(np.concatenate(list(stream_indices))).tolist()

    def open(self) -> dict[int, RowBuffer]:
        stream_numbers = self.needed()
        # In parallel: a worker takes seconds to start and to prepare its first batch.
        with ThreadPoolExecutor(max(1, min(len(stream_numbers), OPENED_AT_ONCE))) as executor:
            opening = {
                number: executor.submit(
                    self.make, number, self.count, len(stream_numbers), self.full_window
                )
                for number in stream_numbers
            }
        failed = [future for future in opening.values() if future.exception() is not None]
        if failed:
            for future in opening.values():
                if future not in failed:
                    future.result().close()
            failed[0].result()
        return {number: RowBuffer(future.result()) for number, future in opening.items()}

    def __next__(self) -> Batch:
        rows = self.rows(self.step)
        counts = rows_per_stream(rows, self.count, self.first)
        following = (self.first + rows) % self.count
        ready = {
            number: stream.load(int(counts[number])) for number, stream in self.streams.items()
        }
        if any(ready[number] < counts[number] for number in ready):
            if self.pad and all(not stream.load(1) for stream in self.streams.values()):
                raise StopIteration
            if not self.pad:
                counts, following = self.remaining_counts(rows)
        self.step, self.first = self.step + 1, following
        if not self.streams:  # another process reads for this one
            return {}
        return self.gather(rows, counts)

    def remaining_counts(self, rows: int) -> tuple[np.ndarray, int]:
        """The rows of each stream, round-robin over those that have not ended, and the next stream.
        Raises StopIteration if too few rows are left.
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
        indices = []  # of the rows in the global batch
        padding: list[tuple[int, int]] = []  # (number of parts before it, rows of padding)
        for number, stream in self.streams.items():
            wanted = int(counts[number])
            taken = min(wanted, stream.load(wanted))
            parts += stream.take(taken)
            if taken < wanted:
                padding.append((len(parts) + len(padding), wanted - taken))
            indices.append(np.arange(ends[number] - wanted, ends[number]))
        if padding:
            example = parts[0] if parts else self.example_batch()
            for position, size in padding:
                parts.insert(
                    position,
                    {name: np.zeros((size, *f.shape[1:]), f.dtype) for name, f in example.items()},
                )
        batch = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        local_rows, loaded = self.local_rows(rows), np.concatenate(indices)
        if len(local_rows) == len(loaded):
            return batch
        chosen = np.searchsorted(loaded, local_rows)
        return {name: field[chosen] for name, field in batch.items()}

    def example_batch(self) -> Batch:
        """Any loaded batch, for the names and dtypes of its fields."""
        return next(stream.batches[0][1] for stream in self.streams.values() if stream.batches)

    def global_rows(self, batch: Batch) -> int | None:
        """The rows of the global batch of which `batch` is this process's part, or None if this
        process has no rows of any batch.
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
        # Older states had the step in each stream, and a number of streams that divides every
        # batch.
        self.step = (
            state["step"]
            if "step" in state
            else next((future["step"] for future in saved.values()), 0)
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
    """The state of a run from those of its processes, each of which has its own streams. Raises
    ValueError if they contradict each other.
    """
    merged: Any = {}
    for state in states:
        merged = merge_values(merged, state, "")
    return merged


def merge_values(first: object, second: object, path: str) -> Any:
    if isinstance(first, dict) and isinstance(second, dict):
        both = first | second
        return {
            key: merge_values(first[key], second[key], f"{path}/{key}")
            if key in first and key in second
            else value
            for key, value in both.items()
        }
    if first != second:
        raise ValueError(
            f"processes saved different data positions at {path}: {first} and {second}"
        )
    return first
