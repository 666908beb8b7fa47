"""Threads in which requests are parsed and tokenized, so that the event loop goes on meanwhile."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from maxtext.inference.errors import EngineError

RESULT = TypeVar("RESULT")
MAX_SHORT_BODY = 64 * 1024  # bytes; a longer body is parsed and tokenized by the long pool
NUM_SHORT_THREADS = 4
NUM_LONG_THREADS = 2
MAX_LONG_QUEUE = 64  # long requests that wait
NUM_GRAMMAR_THREADS = 16  # requests that wait for their grammars
RETRY_SECONDS = 5.0


class BoundedPool:
    """Threads with a queue of limited length."""

    def __init__(self, name: str, num_threads: int, max_queue: int):
        self.executor = ThreadPoolExecutor(num_threads, f"maxtext-{name}")
        self.capacity = num_threads + max_queue
        self.lock = threading.Lock()
        self.num_pending = 0  # calls that wait or run

    async def run(self, function: Callable[..., RESULT], *args: Any) -> RESULT:
        """The result of a call in one of the threads. Raises EngineError if the queue is full. A
        call that has not begun is dropped if the task that waits for it is cancelled.
        """
        with self.lock:
            if self.num_pending >= self.capacity:
                message = f"the queue is full: {self.num_pending} requests are being prepared"
                raise EngineError(message, "preparation_queue_full", RETRY_SECONDS)
            self.num_pending += 1
        future = self.executor.submit(function, *args)
        future.add_done_callback(self.on_done)
        return await asyncio.wrap_future(future)

    def on_done(self, future: Future[Any]) -> None:
        with self.lock:
            self.num_pending -= 1


class PreparationPools:
    """Long requests have few threads of their own, so that short ones do not wait for them; so do
    requests that wait for their grammars.
    """

    def __init__(self, capacity: int):
        """`capacity` is how many sequences the engine runs and queues."""
        self.short = BoundedPool("prepare", NUM_SHORT_THREADS, capacity)
        self.long = BoundedPool("prepare-long", NUM_LONG_THREADS, MAX_LONG_QUEUE)
        self.grammar = BoundedPool("prepare-grammar", NUM_GRAMMAR_THREADS, capacity)

    def for_size(self, num_bytes: int) -> BoundedPool:
        """The pool of a request whose body has so many bytes."""
        return self.long if num_bytes > MAX_SHORT_BODY else self.short
