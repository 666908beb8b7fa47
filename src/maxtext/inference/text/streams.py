"""The deltas of one request on their way from the engine's thread to a consumer.

A `CompletionStream` is iterated in a thread, an `AsyncCompletionStream` in an event loop. Both end
after the last delta of the last choice, or raise the error that ended the request.
"""

import asyncio
import math
import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum
from typing import Any, Final

from maxtext.inference.errors import EngineError
from maxtext.inference.requests import Completion, CompletionDelta


class StreamEnd(Enum):
    """The last item of a stream whose request was cancelled."""

    END = "end"


END: Final = StreamEnd.END
StreamItem = CompletionDelta | BaseException | StreamEnd


class BaseStream(ABC):
    """`request_id` is unique in its engine. `prompt_ids` are the tokens of the prompt."""

    loop: asyncio.AbstractEventLoop | None = None

    def __init__(
        self,
        request_id: int,
        prompt_ids: tuple[int, ...],
        num_choices: int,
        cancel: Callable[[int], None],
        deadline: float,
    ):
        self.request_id = request_id
        self.prompt_ids = prompt_ids
        self.num_choices = num_choices
        self.cancel_request = cancel
        self.deadline = deadline
        self.completions: list[Completion] = []  # that the consumer has received
        self.num_put = 0  # characters and tokens; written by the engine's thread only
        self.num_read = 0  # written by the consumer only
        self.read_at = self.submitted_at = time.monotonic()

    @abstractmethod
    def put(self, item: StreamItem) -> None:
        """Append a delta, an exception or END. Runs in the thread of the consumer's loop, if the
        stream has one."""

    def cancel(self) -> None:
        """Drop the request: its slots and blocks are free after the step in progress. May be
        called from any thread, and more than once.
        """
        self.cancel_request(self.request_id)

    @property
    def is_finished(self) -> bool:
        return len(self.completions) == self.num_choices

    @property
    def backlog(self) -> int:
        return self.num_put - self.num_read

    def timeout_error(self) -> EngineError:
        seconds = self.deadline - self.submitted_at
        message = f"the request is not finished after {seconds:.0f} seconds"
        return EngineError(message, "request_timeout")

    def receive(self, item: StreamItem) -> CompletionDelta | None:
        """The delta of an item; None at the end. Raises the error that ended the request."""
        if item is END:
            return None
        if isinstance(item, BaseException):
            raise item
        self.read_at = time.monotonic()
        self.num_read += item_size(item)
        if item.completion is not None:
            self.completions.append(item.completion)
        return item


class CompletionStream(BaseStream):
    """The stream of a consumer in a thread; iterate it in one thread only."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.items: queue.SimpleQueue[StreamItem] = queue.SimpleQueue()

    def put(self, item: StreamItem) -> None:
        self.items.put(item)

    def __iter__(self) -> "CompletionStream":
        return self

    def __next__(self) -> CompletionDelta:
        if self.is_finished or (delta := self.receive(self.items.get())) is None:
            raise StopIteration
        return delta


class AsyncCompletionStream(BaseStream):
    """Iterate it with `async for` in the event loop that it was submitted from. It ends at its
    deadline even if the engine's thread is in a step, which may compile a program.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.loop = asyncio.get_running_loop()
        self.items: asyncio.Queue[StreamItem] = asyncio.Queue()
        self.timer: asyncio.TimerHandle | None = None
        if math.isfinite(self.deadline):
            seconds = max(self.deadline - time.monotonic(), 0.0)
            self.timer = self.loop.call_later(seconds, self.expire)

    def expire(self) -> None:
        self.put(self.timeout_error())
        self.cancel()

    def put(self, item: StreamItem) -> None:
        self.items.put_nowait(item)
        if self.timer is not None and not isinstance(item, CompletionDelta):
            self.timer.cancel()

    def __aiter__(self) -> "AsyncCompletionStream":
        return self

    async def __anext__(self) -> CompletionDelta:
        if not self.items.empty():  # a consumer that is behind lets the others run
            await asyncio.sleep(0)
        if self.is_finished or (delta := self.receive(await self.items.get())) is None:
            raise StopAsyncIteration
        if self.is_finished and self.timer is not None:
            self.timer.cancel()
        return delta


def item_size(item: CompletionDelta) -> int:
    return len(item.text) + len(item.token_ids)
