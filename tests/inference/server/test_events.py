"""Server-sent events as ASGI messages."""

import asyncio
import json

import pytest

from maxtext.inference.server import events as module
from maxtext.inference.server.errors import ApiError
from maxtext.inference.server.events import EventStreamResponse, encode_json_in_parts


async def respond(events, disconnect=None):
    """The bodies that a response of these events sends. The client leaves at `disconnect`."""
    bodies = []

    async def send(message):
        bodies.append(message.get("body"))

    async def receive():
        await (disconnect or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    response = EventStreamResponse(events, lambda error: ApiError(500, str(error)), {})
    await (await response.start())({}, receive, send)
    return bodies


def test_comments_bridge_silence(monkeypatch):
    monkeypatch.setattr(module, "KEEP_ALIVE_SECONDS", 0.05)

    async def events():
        yield b"one"
        await asyncio.sleep(0.18)
        yield b"two"

    first, *middle, two, last = asyncio.run(respond(events()))[1:]
    assert (first, two, last) == (b"one", b"two", b"")
    assert 1 <= len(middle) <= 3
    assert set(middle) == {b": keep-alive\n\n"}


def test_late_error_is_an_event():
    async def events():
        yield b"one"
        raise ValueError("broken")

    _, first, error, last = asyncio.run(respond(events()))
    assert (first, last) == (b"one", b"")
    assert b'"message":"broken"' in error


def test_error_of_the_first_event_is_raised():
    async def events():
        raise ValueError("broken")
        yield b""

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(respond(events()))


def test_client_that_leaves_closes_the_events():
    closed = []

    async def events():
        try:
            yield b"one"
            await asyncio.sleep(60)
        finally:
            closed.append(True)

    async def leave():
        disconnect = asyncio.Event()
        asyncio.get_running_loop().call_later(0.05, disconnect.set)
        return await asyncio.wait_for(respond(events(), disconnect), 10)

    assert b"one" in asyncio.run(leave())
    assert closed


LONG = [{"token": str(index), "logprob": -index / 7} for index in range(200)]


@pytest.mark.parametrize(
    "content",
    [
        {"text": 'é\ud800"', "logprobs": {"content": LONG, "refusal": None}, "empty": {}},
        {"a": [], "b": LONG[:64], "c": LONG[:65], "d": (1, 2)},
        [LONG, LONG[:1]],
        list(range(128)),
        None,
    ],
)
def test_json_in_parts_is_that_of_the_encoder(content):
    expected = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    assert encode_json_in_parts(content) == expected.encode("utf-8", "replace")
