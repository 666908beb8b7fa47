"""An HTTP server that answers completions with events at known times."""

import asyncio
import contextlib
import json
import threading

MODELS = {"data": [{"id": "stub", "object": "model", "max_model_len": 1000}]}


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(content):
    return b"data: " + json.dumps(content).encode() + b"\n\n"


class StubServer:
    """The first event of a response comes after `first_delay` seconds, the others `gap` apart, two
    tokens each. `faults` maps the number of a completion, from 0, to what happens instead: a
    status, "cut" (the connection closes in the stream) or "no [DONE]". With a `key`, requests
    without it get status 401.
    """

    def __init__(self, first_delay=0.0, gap=0.0, faults=None, key=None):
        self.first_delay = first_delay
        self.gap = gap
        self.faults = faults or {}
        self.key = key
        self.bodies = []  # of completions
        self.num_connections = 0
        self.num_open = self.most_open = 0

    async def serve(self, reader, writer):
        self.num_connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await self.answer(reader, writer):
                await writer.drain()
        writer.close()

    async def answer(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split()[1]
        length = next((line for line in head.lower().split("\r\n") if "content-length" in line), "")
        body = await reader.readexactly(int(length.partition(":")[2] or 0))
        if self.key is not None and f"authorization: bearer {self.key}" not in head.lower():
            data = b'{"error": {"message": "a key, please"}}'
            writer.write(b"HTTP/1.1 401 No\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
            return True
        if path != "/v1/completions":
            known = path == "/v1/models"
            data = json.dumps(MODELS if known else {"error": {"message": "unknown"}}).encode()
            status = b"200 OK" if known else b"404 Not Found"
            writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n" % (status, len(data)) + data)
            return True
        fault = self.faults.get(len(self.bodies))
        self.bodies.append(json.loads(body))
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            return await self.complete(writer, self.bodies[-1]["max_tokens"], fault)
        finally:
            self.num_open -= 1

    async def complete(self, writer, num_tokens, fault):
        await asyncio.sleep(self.first_delay)
        if isinstance(fault, int):
            data = b'{"error": {"message": "a fault"}}'
            writer.write(b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n" % (fault, len(data)))
            writer.write(data)
            return True
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
            b"\r\n"
        )
        num_events = (num_tokens + 1) // 2
        for index in range(num_events):
            await asyncio.sleep(self.gap if index else 0)
            writer.write(chunk(event({"choices": [{"text": "a b"}], "usage": None})))
            if fault == "cut":
                return False
        usage = {"completion_tokens": num_tokens}
        done = b"" if fault == "no [DONE]" else b"data: [DONE]\n\n"
        writer.write(chunk(event({"choices": [], "usage": usage}) + done) + chunk(b""))
        return True


@contextlib.contextmanager
def run_stub(**options):
    """(stub, URL) of a server in a thread."""
    stub = StubServer(**options)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    start = asyncio.start_server(stub.serve, "127.0.0.1", 0)
    server = asyncio.run_coroutine_threadsafe(start, loop).result(10)
    try:
        yield stub, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
