"""Responses as JSON and as server-sent events, in plain ASGI messages, and active requests.

An `ActiveRequest` is a request to the API while the engine works on it: one stream of deltas for
each prompt, which it merges. An `EventStreamResponse` sends the events that a writer makes of them.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from maxtext.inference.async_engine import AsyncEngine
from maxtext.inference.requests import CompletionDelta
from maxtext.inference.server.errors import ApiError
from maxtext.inference.server.metrics import ServerMetrics
from maxtext.inference.text.session import PreparedRequest
from maxtext.inference.text.streams import AsyncCompletionStream

RESULT = TypeVar("RESULT")
FIRST_EVENT_SECONDS = 1.0  # after which status and headers are sent without an event
KEEP_ALIVE_SECONDS = 15.0  # without an event, after which a comment is sent
CLIENT_CLOSED_REQUEST = 499
EVENT_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies forward events at once
}
DONE = b"data: [DONE]\n\n"
JSON_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
MAX_ENCODED_ITEMS = 64  # of a list at a time


def encode_json(content: object) -> bytes:
    return JSON_ENCODER.encode(content).encode("utf-8", "replace")


def encode_json_in_parts(content: object) -> bytes:
    """The same bytes as `encode_json`, for a thread: the encoder lets no other thread run, so that
    it gets a part of a long list at a time.
    """
    return "".join(json_parts(content)).encode("utf-8", "replace")


def json_parts(content: object) -> Iterator[str]:
    if isinstance(content, dict) and content:
        for index, (name, value) in enumerate(content.items()):
            yield f"{',' if index else '{'}{JSON_ENCODER.encode(name)}:"
            yield from json_parts(value)
        yield "}"
    elif isinstance(content, list) and len(content) > MAX_ENCODED_ITEMS:
        for start in range(0, len(content), MAX_ENCODED_ITEMS):
            items = JSON_ENCODER.encode(content[start : start + MAX_ENCODED_ITEMS])
            yield f"{',' if start else '['}{items[1:-1]}"
        yield "]"
    else:
        yield JSON_ENCODER.encode(content)


def encode_event(content: object) -> bytes:
    return b"data: " + encode_json(content) + b"\n\n"


def json_response(
    content: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(encode_json(content), status, headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    return json_response(error.body(), error.status, error.headers)


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_while_connected(receive: Receive, work: Coroutine[None, None, RESULT]) -> RESULT:
    """The result of `work`, which is cancelled if the client leaves. The body must be read."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(CLIENT_CLOSED_REQUEST, "the client closed the connection")
        return task.result()
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


class EventStreamResponse(Response):
    """Sends events as they come: the client sees an error of the first second as a status, a later
    one as an event with which the response ends. `on_error` converts exceptions.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        on_error: Callable[[BaseException], ApiError],
        headers: dict[str, str],
    ):
        super().__init__(headers={**EVENT_HEADERS, **headers})
        del self.headers["content-length"]
        self.events = events
        self.on_error = on_error
        self.first_event: asyncio.Task[bytes | None] = asyncio.create_task(self.take())
        self.sent_at = time.monotonic()

    async def take(self) -> bytes | None:
        return await anext(self.events, None)

    async def start(self) -> "EventStreamResponse":
        """Wait for the first event, up to FIRST_EVENT_SECONDS. Raises its error."""
        await asyncio.wait({self.first_event}, timeout=FIRST_EVENT_SECONDS)
        if self.first_event.done() and (error := self.first_event.exception()) is not None:
            raise error
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ApiError):  # the client has left
            await run_while_connected(receive, self.send_events(send))

    async def send_events(self, send: Send) -> None:
        headers = self.raw_headers
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        keep_alive = asyncio.create_task(self.keep_alive(send))
        try:
            event = await self.first_event
            while event is not None:
                await self.send_event(send, event)
                # Without a task and a timeout for each event, which would cost a quarter more.
                event = await anext(self.events, None)
        except Exception as error:
            await self.send_event(send, encode_event(self.on_error(error).body()))
        finally:
            keep_alive.cancel()
            await self.close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send_event(self, send: Send, event: bytes) -> None:
        self.sent_at = time.monotonic()
        await send({"type": "http.response.body", "body": event, "more_body": True})

    async def keep_alive(self, send: Send) -> None:
        """Send a comment whenever nothing was sent for KEEP_ALIVE_SECONDS."""
        while True:
            seconds = self.sent_at + KEEP_ALIVE_SECONDS - time.monotonic()
            if seconds > 0:
                await asyncio.sleep(seconds)
            else:
                await self.send_event(send, b": keep-alive\n\n")

    async def close(self) -> None:
        """Cancel what the engine still works on."""
        self.first_event.cancel()
        await asyncio.gather(self.first_event, return_exceptions=True)
        await self.events.aclose()


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
