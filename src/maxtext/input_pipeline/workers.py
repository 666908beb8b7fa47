"""Streams that are prepared in other processes: each worker serves some of them, and keeps batches
ready.

A worker is a program of its own and ends when its connection closes, however this process ended.
Batches and positions are those of the stream itself: whether a worker prepared it, and which, makes
no difference to the data.
"""

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from maxtext.common.errors import UserError
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline.interface import Batch, BatchIterator, ShardSpec, Split, State
from maxtext.input_pipeline.prefetch import prefetch
from maxtext.input_pipeline.sources import make_iterator
from maxtext.input_pipeline.subprocesses import start_program
from maxtext.tokenizers.text_utils import num_cores

WORKER_MB = 256  # what a worker takes before it has read anything


def worker_count(config: MaxTextConfig, split: Split) -> int:
    if config.dataset_type.value == "synthetic":  # a worker would send more than it saves
        return 0
    wanted = config.grain_worker_count if split is Split.TRAIN else config.grain_worker_count_eval
    return (
        wanted if wanted >= 0 else max(min(num_cores(), config.grain_ram_budget_mb // WORKER_MB), 1)
    )


def data_stream_factory(
    config: MaxTextConfig, split: Split
) -> Callable[[ShardSpec], BatchIterator | None]:
    """What makes a stream: here, or in the configured number of workers."""
    count = worker_count(config, split)
    return partial(Workers(count).open if count else make_iterator, config, split)


class Workers:
    """Up to `count` processes, started when there is something for them; streams go to them in
    turn.
    """

    def __init__(self, count: int):
        self.workers: list[Worker | None] = [None] * count
        self.opened = 0
        self.lock = threading.Lock()

    def open(self, config: MaxTextConfig, split: Split, shard: ShardSpec) -> "RemoteBatches | None":
        with self.lock:  # streams are opened by several threads
            place = self.opened % len(self.workers)
            self.opened += 1
            worker = self.workers[place]
            if worker is None or worker.closed:
                worker = self.workers[place] = Worker(self.lock)
            number = worker.promise()
        return worker.open(number, config, split, shard)


class Worker:
    """It ends with its last stream. `deciding`: held by who promises it a stream or ends it."""

    def __init__(self, deciding: threading.Lock) -> None:
        self.process, self.connection = start_program(__name__, "serve")
        self.deciding, self.asking = deciding, threading.Lock()
        self.streams: set[int] = set()
        self.next = 0
        self.closed = False

    def promise(self) -> int:
        """The number of a stream that will be opened."""
        number, self.next = self.next, self.next + 1
        self.streams.add(number)
        return number

    def open(
        self, number: int, config: MaxTextConfig, split: Split, shard: ShardSpec
    ) -> "RemoteBatches | None":
        state = None
        try:
            state = self.ask("open", number, config, split, shard)
        finally:
            if state is None:
                self.forget(number)
        return None if state is None else RemoteBatches(self, number, state)

    def ask(self, what: str, *arguments: Any) -> Any:
        with self.asking:
            try:
                self.connection.send((what, *arguments))
                answer = self.connection.recv()
            except (EOFError, OSError) as error:
                code = self.process.wait()
                raise UserError(
                    f"a worker process of the data pipeline ended (exit code {code}), perhaps for lack of memory: "
                    "look at its output above, or set grain_worker_count=0"
                ) from error
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self, number: int) -> None:
        if number in self.streams:
            if len(self.streams) > 1:
                self.ask("close", number)
            self.forget(number)

    def forget(self, number: int) -> None:
        with self.deciding:
            self.streams.discard(number)
            if self.streams or self.closed:
                return
            self.closed = True
        self.connection.close()
        self.process.kill()  # it may be in the middle of something that nobody waits for any more
        self.process.wait()


class RemoteBatches(BatchIterator):
    def __init__(self, worker: Worker, number: int, state: State):
        self.worker, self.number, self.state = worker, number, state

    def __next__(self) -> Batch:
        answer = self.worker.ask("next", self.number)
        if answer is None:
            raise StopIteration
        batch, self.state = answer
        return batch

    def get_state(self) -> State:
        return self.state

    def set_state(self, state: State) -> None:
        self.state = self.worker.ask("set_state", self.number, state)

    def reset(self) -> None:
        self.state = self.worker.ask("reset", self.number)

    def close(self) -> None:
        self.worker.close(self.number)


class WorkerServer:
    """The worker's side: its streams by number, and an answer to each question."""

    def __init__(self) -> None:
        self.streams: dict[int, BatchIterator] = {}

    def open(
        self, number: int, config: MaxTextConfig, split: Split, shard: ShardSpec
    ) -> State | None:
        iterator = make_iterator(config, split, shard)
        if iterator is None:
            return None
        train = split is Split.TRAIN
        ahead = (
            config.grain_per_worker_buffer_size
            if train
            else config.grain_per_worker_buffer_size_eval
        )
        self.streams[number] = prefetch(iterator, ahead)
        return self.streams[number].get_state()

    def next(self, number: int) -> tuple[Batch, State] | None:
        batch = next(self.streams[number], None)
        return None if batch is None else (batch, self.streams[number].get_state())

    def set_state(self, number: int, state: State) -> State:
        self.streams[number].set_state(state)
        return self.streams[number].get_state()

    def reset(self, number: int) -> State:
        self.streams[number].reset()
        return self.streams[number].get_state()

    def close(self, number: int) -> None:
        self.streams.pop(number).close()


def serve(descriptor: int) -> None:
    """The whole of a worker's life."""
    connection = Connection(descriptor)
    # A signal to all processes is for the one that trains; when it ends, so does the connection.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    served = WorkerServer()
    try:
        while True:
            what, *arguments = connection.recv()
            try:
                answer = getattr(served, what)(*arguments)
            except Exception as error:
                answer = error
            try:
                connection.send(answer)
            except (TypeError, AttributeError, ValueError):  # an error that cannot be sent as it is
                connection.send(
                    RuntimeError(f"in a worker process of the data pipeline: {answer!r}")
                )
    except (EOFError, ConnectionError):
        pass
    os._exit(0)  # threads that read ahead are not waited for
