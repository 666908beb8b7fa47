"""A batch as the rows of several streams: what it holds depends on their number, not on who loads them.

Stream v of V gives rows [v R/V, (v+1) R/V) of every batch of R, from documents of its own. A process loads the streams
that have rows for its devices; two processes whose devices hold the same rows load the same streams. So one process and
many train on the same batches, and a saved position, which is that of every stream, can be taken up by other numbers of
processes and devices.
"""

from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from maxtext.input_pipeline.interface import Batch, BatchIterator, State

OPENED_AT_ONCE = 16
MakeStream = Callable[[int, int], BatchIterator]  # of a stream's number and the number of all streams
Wanted = Callable[[int], Collection[int]]  # the streams that this process needs, of so many


def stream_count(rows: int, blocks: int, workers: int, elastic: bool, most: Callable[[], int]) -> int:
    """How many streams share `rows` rows of each batch: one for each of the `blocks` that devices hold, more if there
    are more workers to prepare them, and one for each row if it is to be `elastic`. All have as many rows, and there
    are not more than `most`, into which the documents can be dealt."""
    fitting = [number for number in range(blocks, rows + 1, blocks) if rows % number == 0]
    count = rows if elastic else next((number for number in fitting if number >= workers), fitting[-1])
    limit = most() if count > 1 else 1
    return max(number for number in range(1, count + 1) if count % number == 0 and number <= limit)


class Streams(BatchIterator):
    """Rows of this process's streams, in their order. `pad`: a stream that has ended gives padding until all have;
    otherwise the first that ends is the end."""

    def __init__(self, make: MakeStream, count: int, wanted: Wanted, pad: bool = False):
        self.make, self.wanted, self.pad = make, wanted, pad
        self.count = count
        self.streams = self.open(count)
        self.ended: set[int] = set()

    def open(self, count: int) -> dict[int, BatchIterator]:
        numbers = sorted(self.wanted(count))
        # At once: a worker takes seconds to start and to prepare its first batch.
        with ThreadPoolExecutor(max(1, min(len(numbers), OPENED_AT_ONCE))) as executor:
            opening = {number: executor.submit(self.make, number, count) for number in numbers}
        failed = [one for one in opening.values() if one.exception() is not None]
        if failed:
            for one in opening.values():
                if one not in failed:
                    one.result().close()
            failed[0].result()
        return {number: one.result() for number, one in opening.items()}

    def __next__(self) -> Batch:
        parts = {}
        for number, stream in self.streams.items():
            if number in self.ended:
                continue
            try:
                parts[number] = next(stream)
            except StopIteration:
                if not self.pad:
                    raise
                self.ended.add(number)
        if not self.streams:  # another process reads for this one
            return {}
        if not parts:
            raise StopIteration
        some = next(iter(parts.values()))
        padding = {name: np.zeros_like(field) for name, field in some.items()}
        each = [parts.get(number, padding) for number in self.streams]
        return {name: np.concatenate([part[name] for part in each]) for name in some}

    def get_state(self) -> State:
        return {"count": self.count, "streams": {str(at): stream.get_state() for at, stream in self.streams.items()}}

    def set_state(self, state: State) -> None:
        if state["count"] != self.count:
            self.close()
            self.count, self.streams = state["count"], self.open(state["count"])
        for number, stream in self.streams.items():
            stream.set_state(state["streams"][str(number)])
        self.ended = set()

    def reset(self) -> None:
        for stream in self.streams.values():
            stream.reset()
        self.ended = set()

    def close(self) -> None:
        for stream in self.streams.values():
            stream.close()


def join_states(states: Iterable[State]) -> State:
    """The position of a run from those that its processes saved: each knows its own streams."""
    joined: Any = {}
    for state in states:
        joined = merged(joined, state, "")
    return joined


def merged(first: Any, second: Any, where: str) -> Any:
    if isinstance(first, dict) and isinstance(second, dict):
        both = first | second
        return {
            key: merged(first[key], second[key], f"{where}/{key}") if key in first and key in second else value
            for key, value in both.items()
        }
    if first != second:
        raise ValueError(f"processes saved different data positions at {where}: {first} and {second}")
    return first
