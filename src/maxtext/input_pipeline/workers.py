"""Batches prepared in the background: data streams in worker processes, and a prefetch thread.

Each of the `Workers` serves some streams and prefetches their batches. A worker ends when its
connection closes, however this process ended. Batches and states are those of the stream itself:
the data does not depend on the workers.

`prefetch` is a thread that prepares batches while the device computes. The state is that of the
batch last delivered, not of the batch last prepared, so resuming repeats and skips nothing. An
exception, including StopIteration, reaches the consumer after the batches that preceded it.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from maxtext.common.errors import UserError
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline.interface import Batch, BatchIterator, ShardSpec, Split, State
from maxtext.input_pipeline.row_formats import RowFormat
from maxtext.input_pipeline.sources import make_iterator
from maxtext.input_pipeline.subprocesses import start_program
from maxtext.tokenizers.text_utils import num_cores


def prefetch(iterator: BatchIterator, depth: int) -> BatchIterator:
    """The same batches, up to `depth` of them prepared in advance. With 0 it is the iterator
    itself.
    """
    return PrefetchIterator(iterator, depth) if depth > 0 else iterator


class PrefetchIterator(BatchIterator):
    """While the thread runs, it alone uses the inner iterator. Methods that change the position
    stop the thread first.
    """

    def __init__(self, iterator: BatchIterator, depth: int):
        self.iterator = iterator
        self.depth = depth
        self.state = iterator.get_state()
        self.ready: deque[tuple[Batch, State]] = deque()
        self.error: BaseException | None = None
        self.stopping = False
        self.closed = False
        self.changed = threading.Condition()
        # Started by the first next(): a run that resumes sets its state before that.
        self.thread: threading.Thread | None = None

    def __next__(self) -> Batch:
        if self.closed:
            raise ValueError("next() of a prefetch iterator that was closed")
        if self.thread is None:
            self.thread = threading.Thread(target=self.work, name="maxtext-prefetch", daemon=True)
            self.thread.start()
        with self.changed:
            self.changed.wait_for(lambda: self.ready or self.error)
            if self.ready:
                batch, self.state = self.ready.popleft()
                self.changed.notify_all()
                return batch
            assert self.error is not None
            raise self.error

    def work(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.stopping or len(self.ready) < self.depth)
                if self.stopping:
                    return
            try:
                prepared = next(self.iterator), self.iterator.get_state()
            except BaseException as error:
                with self.changed:
                    self.error = error
                    self.changed.notify_all()
                return
            with self.changed:
                self.ready.append(prepared)
                self.changed.notify_all()

    def stop(self) -> None:
        """End the thread and discard the prepared batches. Waits for the batch in preparation."""
        if self.thread is not None:
            with self.changed:
                self.stopping = True
                self.changed.notify_all()
            self.thread.join()
        self.thread = None
        self.error = None
        self.stopping = False
        self.ready.clear()

    def get_state(self) -> State:
        return self.state

    def set_state(self, state: State) -> None:
        self.stop()
        self.iterator.set_state(state)
        self.state = self.iterator.get_state()

    def reset(self) -> None:
        self.stop()
        self.iterator.reset()
        self.state = self.iterator.get_state()

    def close(self) -> None:
        self.stop()
        self.closed = True
        self.iterator.close()


WORKER_MB = 256  # memory of a worker before it has read anything


def worker_count(config: MaxTextConfig, split: Split, row_format: RowFormat) -> int:
    is_encoded = row_format.train_source is not None and split is Split.TRAIN
    # Sending costs more than it saves.
    if is_encoded or row_format.has_records or config.dataset_type.value == "synthetic":
        return 0
    wanted = config.grain_worker_count if split is Split.TRAIN else config.grain_worker_count_eval
    return (
        wanted if wanted >= 0 else max(min(num_cores(), config.grain_ram_budget_mb // WORKER_MB), 1)
    )


def data_stream_factory(
    config: MaxTextConfig, split: Split, row_format: RowFormat
) -> Callable[[ShardSpec], BatchIterator | None]:
    """A function that opens a stream, in this process or in the configured number of workers."""
    count = worker_count(config, split, row_format)
    return partial(Workers(count).open if count else make_iterator, config, split, row_format)


class Workers:
    """Up to `count` worker processes, started on demand. Streams are assigned round-robin."""

    def __init__(self, count: int):
        self.workers: list[Worker | None] = [None] * count
        self.opened = 0
        self.lock = threading.Lock()

    def open(
        self, config: MaxTextConfig, split: Split, row_format: RowFormat, shard: ShardSpec
    ) -> "RemoteBatches | None":
        with self.lock:  # streams are opened by several threads
            worker_index = self.opened % len(self.workers)
            self.opened += 1
            worker = self.workers[worker_index]
            if worker is None or worker.closed:
                worker = self.workers[worker_index] = Worker(self.lock)
            number = worker.reserve_stream()
        return worker.open(number, config, split, row_format, shard)


class Worker:
    """A worker process, which ends with its last stream. `pool_lock` is held to assign a stream to
    it or to end it.
    """

    def __init__(self, pool_lock: threading.Lock) -> None:
        self.process, self.connection = start_program(__name__, "serve")
        self.pool_lock = pool_lock
        self.request_lock = threading.Lock()
        self.streams: set[int] = set()
        self.next = 0
        self.closed = False

    def reserve_stream(self) -> int:
        """The number of a new stream, which the caller opens next."""
        number, self.next = self.next, self.next + 1
        self.streams.add(number)
        return number

    def open(
        self,
        number: int,
        config: MaxTextConfig,
        split: Split,
        row_format: RowFormat,
        shard: ShardSpec,
    ) -> "RemoteBatches | None":
        state = None
        try:
            state = self.request("open", number, config, split, row_format, shard)
        finally:
            if state is None:
                self.release_stream(number)
        return None if state is None else RemoteBatches(self, number, state)

    def request(self, what: str, *arguments: object) -> Any:
        with self.request_lock:
            try:
                self.connection.send((what, *arguments))
                response = self.connection.recv()
            except (EOFError, OSError) as error:
                code = self.process.wait()
                raise UserError(
                    f"a worker process of the data pipeline ended (exit code {code}), perhaps for "
                    "lack of memory: look at its output above, or set grain_worker_count=0"
                ) from error
        if isinstance(response, BaseException):
            raise response
        return response

    def close(self, number: int) -> None:
        if number in self.streams:
            if len(self.streams) > 1:
                self.request("close", number)
            self.release_stream(number)

    def release_stream(self, number: int) -> None:
        with self.pool_lock:
            self.streams.discard(number)
            if self.streams or self.closed:
                return
            self.closed = True
        self.connection.close()
        self.process.kill()  # it may be busy with a request that nobody waits for
        self.process.wait()


class RemoteBatches(BatchIterator):
    def __init__(self, worker: Worker, number: int, state: State):
        self.worker = worker
        self.number = number
        self.state = state

    def __next__(self) -> Batch:
        response = self.worker.request("next", self.number)
        if response is None:
            raise StopIteration
        batch, self.state = response
        return batch

    def get_state(self) -> State:
        return self.state

    def set_state(self, state: State) -> None:
        self.state = self.worker.request("set_state", self.number, state)

    def reset(self) -> None:
        self.state = self.worker.request("reset", self.number)

    def close(self) -> None:
        self.worker.close(self.number)


class WorkerServer:
    """The worker's side: its streams by number, and a method for each request."""

    def __init__(self) -> None:
        self.streams: dict[int, BatchIterator] = {}

    def open(
        self,
        number: int,
        config: MaxTextConfig,
        split: Split,
        row_format: RowFormat,
        shard: ShardSpec,
    ) -> State | None:
        iterator = make_iterator(config, split, row_format, shard)
        if iterator is None:
            return None
        train = split is Split.TRAIN
        num_prefetched = (
            config.grain_per_worker_buffer_size
            if train
            else config.grain_per_worker_buffer_size_eval
        )
        self.streams[number] = prefetch(iterator, num_prefetched)
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
    """The main loop of a worker process."""
    connection = Connection(descriptor)
    # The training process handles signals; when it ends, the connection closes.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    served = WorkerServer()
    try:
        while True:
            what, *arguments = connection.recv()
            try:
                response = getattr(served, what)(*arguments)
            except Exception as error:
                response = error
            try:
                connection.send(response)
            except (TypeError, AttributeError, ValueError):  # an error that cannot be pickled
                connection.send(
                    RuntimeError(f"in a worker process of the data pipeline: {response!r}")
                )
    except (EOFError, ConnectionError):
        pass
    os._exit(0)  # without waiting for prefetch threads
