"""The chat page over an API with scripted replies, so that a test chooses what the model writes."""

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from maxtext.inference.server.app import ChatPage
from maxtext.inference.server.lifecycle import HttpServer, bind

USAGE = {"prompt_tokens": 12, "completion_tokens": 34, "total_tokens": 46}


@dataclass
class Reply:
    """A response to one request: `text` in parts of `part` characters, `seconds` between them.
    An endless one repeats its text until the client leaves.
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    status: int = 200
    code: str | None = None  # of an error
    headers: dict[str, str] = field(default_factory=dict)
    part: int = 7
    seconds: float = 0.0
    wait: float = 0.0  # seconds before the first part
    is_endless: bool = False
    is_cut: bool = False  # ends without [DONE]
    error: str = ""  # of an event at the end
    finish_reason: str = "stop"


class StubApi:
    """An ASGI application. `replies` are used up one a request; the last one stays."""

    def __init__(self, key: str = "", models: tuple[str, ...] = ("stub",), facts=None):
        self.key = key
        self.models = models
        self.page = ChatPage({"needs_key": False, "defaults": {}, **(facts or {})})
        self.replies: list[Reply] = [Reply("Hello.")]
        self.bodies: list[dict[str, Any]] = []
        self.num_cancelled = 0
        self.prefix = ""  # of paths, as behind a proxy
        self.health = {}

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        path = scope["path"].removeprefix(self.prefix) or "/"
        response = StubResponse(send)
        if path == "/":
            page = await self.page.respond(Request(scope))
            await page(scope, receive, send)
        elif path == "/health":
            await response.whole(self.health)
        elif self.key and headers.get("authorization") != f"Bearer {self.key}":
            await response.fail(401, "give one of the server's API keys")
        elif path == "/v1/models":
            cards = [{"id": name, "object": "model"} for name in self.models]
            await response.whole({"object": "list", "data": cards})
        elif path == "/v1/chat/completions":
            await self.chat(await read_body(receive), receive, response)
        else:
            await response.fail(404, f"no {path}")

    async def chat(self, body, receive, response):
        self.bodies.append(body)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if reply.status != 200:
            await response.fail(reply.status, "the stub refuses", reply.headers, reply.code)
            return
        await response.begin(200, {"Content-Type": "text/event-stream"})
        stream = asyncio.create_task(response.stream(reply))
        leave = asyncio.create_task(receive())  # comes when the client has left
        await asyncio.wait({stream, leave}, return_when=asyncio.FIRST_COMPLETED)
        self.num_cancelled += not stream.done()
        stream.cancel()
        leave.cancel()
        await response.write("", more=False)


class StubResponse:
    """Writes one response."""

    def __init__(self, send):
        self.send = send

    async def begin(self, status, headers):
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, text, more=True):
        await self.send({"type": "http.response.body", "body": text.encode(), "more_body": more})

    async def whole(self, content, status=200, headers=None):
        await self.begin(status, {"Content-Type": "application/json", **(headers or {})})
        await self.write(json.dumps(content), more=False)

    async def fail(self, status, message, headers=None, code=None):
        await self.whole({"error": {"message": message, "code": code}}, status, headers)

    async def event(self, content):
        await self.write(f"data: {json.dumps(content)}\n\n")

    async def delta(self, delta):
        await self.event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})

    async def stream(self, reply):
        await self.delta({"role": "assistant", "content": ""})
        await asyncio.sleep(reply.wait)
        for start in range(0, len(reply.reasoning), reply.part):
            await self.delta({"reasoning_content": reply.reasoning[start : start + reply.part]})
            await asyncio.sleep(reply.seconds)
        while True:
            for start in range(0, len(reply.text), reply.part):
                await self.delta({"content": reply.text[start : start + reply.part]})
                await asyncio.sleep(reply.seconds)
            if not reply.is_endless:
                break
        for call in reply.tool_calls:
            await self.delta({"tool_calls": [call]})
        if reply.error:
            await self.event({"error": {"message": reply.error}})
        elif not reply.is_cut:
            end = {"index": 0, "delta": {}, "finish_reason": reply.finish_reason}
            await self.event({"choices": [end]})
            await self.event({"choices": [], "usage": USAGE})
            await self.write("data: [DONE]\n\n")


async def read_body(receive):
    data, more = b"", True
    while more:
        message = await receive()
        data, more = data + message.get("body", b""), message.get("more_body", False)
    return json.loads(data)


@contextlib.contextmanager
def run_stub(**options):
    """(stub, base URL) of a server on a free port."""
    stub = StubApi(**options)
    listener = bind("127.0.0.1", 0)
    server = HttpServer(stub, listener)
    server.start()
    try:
        yield stub, f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.stop()
