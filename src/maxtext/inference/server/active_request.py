"""A request to the API while the engine works on it: one stream of deltas for each prompt."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from maxtext.inference.async_engine import AsyncEngine
from maxtext.inference.requests import CompletionDelta
from maxtext.inference.server.metrics import ServerMetrics
from maxtext.inference.text.session import PreparedRequest
from maxtext.inference.text.streams import AsyncCompletionStream


class ActiveRequest:
    """Submits the prompts of a request at once, in the running event loop. Raises EngineError if
    the engine does not accept all of them.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        prepared: Sequence[PreparedRequest],
        metrics: ServerMetrics,
        timeout: float | None,
    ):
        self.metrics = metrics
        self.streams: list[AsyncCompletionStream] = []
        self.started: set[int] = set()  # prompts with a delta
        self.last_delta_at: dict[tuple[int, int], float] = {}  # by prompt and choice
        try:
            for each in prepared:
                self.streams.append(engine.submit_async(each, timeout))
        except BaseException:
            for stream in self.streams:
                stream.cancel()
            raise

    async def deltas(self) -> AsyncGenerator[tuple[int, CompletionDelta], None]:
        """(index of the prompt, delta) as they come. At the end, finished or not, what the engine
        still works on is cancelled.
        """
        reason = "abort"
        try:
            async with aclosing(self.merged()) as merged:
                async for index, delta in merged:
                    self.observe(index, delta)
                    yield index, delta
        except Exception:
            reason = "error"
            raise
        finally:
            for stream in self.streams:
                if not stream.is_finished:
                    stream.cancel()
                    count = stream.num_choices - len(stream.completions)
                    self.metrics.count_finished(reason, count)

    async def merged(self) -> AsyncGenerator[tuple[int, CompletionDelta], None]:
        if len(self.streams) == 1:
            async for delta in self.streams[0]:
                yield 0, delta
            return
        queue: asyncio.Queue[tuple[int, CompletionDelta | BaseException | None]] = asyncio.Queue()

        async def forward(index: int, stream: AsyncCompletionStream) -> None:
            try:
                async for delta in stream:
                    queue.put_nowait((index, delta))
                queue.put_nowait((index, None))
            except Exception as error:
                queue.put_nowait((index, error))

        tasks = [asyncio.create_task(forward(*each)) for each in enumerate(self.streams)]
        num_open = len(tasks)
        try:
            while num_open:
                index, item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    num_open -= 1
                else:
                    yield index, item
        finally:
            for task in tasks:
                task.cancel()

    def observe(self, index: int, delta: CompletionDelta) -> None:
        """Record a delta in the metrics."""
        now, stream = time.monotonic(), self.streams[index]
        key = index, delta.choice
        if index not in self.started:
            self.started.add(index)
            self.metrics.start(len(stream.prompt_ids), now - stream.submitted_at)
        if key in self.last_delta_at and delta.token_ids:
            self.metrics.add_tokens(len(delta.token_ids), now - self.last_delta_at[key])
        if delta.token_ids or key not in self.last_delta_at:
            self.last_delta_at[key] = now
        if delta.completion is not None:
            self.metrics.finish(delta.completion, stream.submitted_at)
