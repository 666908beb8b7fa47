"""An HTTP/1.1 client for streamed responses, on asyncio protocols.

One process drives thousands of streams without becoming the bottleneck of the measurement: an event
takes 20 to 30 microseconds of a CPU, where httpx takes 170 with 200 streams and 550 with 1,000. It
reads bodies with Content-Length and chunked bodies, and keeps connections open for further
requests.
"""

import asyncio
import json
import ssl
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from maxtext.common.errors import ConfigError
from maxtext.common.types import Json

DONE = b"data: [DONE]"
MAX_HEADER_BYTES = 64 * 1024
CONNECT_SECONDS = 30.0


@dataclass
class RequestRecord:
    """The measurements of one request. Times are those of `time.perf_counter`.

    `error` is empty if the response ended as it should: a status other than 200, `connection`,
    `timeout`, `incomplete` (no [DONE]) or `error event`.
    """

    prompt_tokens: int
    new_tokens: int  # that were asked for
    started_at: float = 0.0
    finished_at: float = 0.0
    status: int = 0
    error: str = ""
    message: str = ""  # of an error
    event_times: list[float] = field(default_factory=list)  # of reads with new text
    completion_tokens: int = 0  # by the server's usage
    body: bytearray = field(default_factory=bytearray)  # all of it, if the client collects bodies

    @property
    def first_token_seconds(self) -> float:
        return self.event_times[0] - self.started_at

    @property
    def seconds(self) -> float:
        return self.finished_at - self.started_at


@dataclass(frozen=True)
class Target:
    """Where to send requests."""

    host: str
    port: int
    tls: bool
    prefix: str  # of paths, without a slash at the end
    api_key: str | None = None

    @classmethod
    def from_url(cls, url: str, api_key: str | None = None, option: str = "--url") -> "Target":
        """The target of `http://HOST:PORT`, with or without /v1 at the end. Raises ConfigError,
        which names `option`.
        """
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port, parts = None, None, urlsplit("")
        if parts.scheme not in ("http", "https") or not host:
            raise ConfigError(
                f"{option} takes an address such as http://127.0.0.1:8000, not {url!r}"
            )
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(host, port or (443 if tls else 80), tls, prefix, api_key)

    def encode(self, method: str, path: str, body: Json | None = None) -> bytes:
        """A request as it goes over the wire."""
        data = b"" if body is None else json.dumps(body).encode()
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.prefix}{path} HTTP/1.1", f"Host: {host}:{self.port}"]
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
        return "\r\n".join([*lines, "", ""]).encode("utf-8") + data


class Connection(asyncio.Protocol):
    """One connection, with at most one request at a time. `collect`: also keep the bodies of
    streamed responses.
    """

    def __init__(self, collect: bool = False) -> None:
        self.collect = collect
        self.transport: Any = None
        self.is_open = False
        self.record: RequestRecord | None = None
        self.finished: asyncio.Future[None] | None = None

    # For the caller.

    async def send(self, data: bytes, record: RequestRecord) -> None:
        """Send a request and fill in its record. Returns at the end of the response; errors are in
        the record.
        """
        self.record = record
        self.finished = asyncio.get_running_loop().create_future()
        self.buffer = b""  # of the header, then of a chunk that is not complete
        self.event = b""  # the beginning of an event
        self.usage_event = b""
        self.in_header = True
        self.is_chunked = self.is_stream = self.has_done = False
        self.num_missing = 0  # bytes of a body with a length
        self.must_close = False
        self.transport.write(data)
        try:
            await self.finished
        finally:
            self.record = None

    def close(self) -> None:
        self.is_open = False
        if self.transport is not None:
            self.transport.abort()

    # asyncio.Protocol.

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.is_open = True

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self.record is not None and not self.record.error:
            self.record.error = "incomplete" if self.record.status else "connection"
            self.record.message = str(error or "the server closed the connection")
        self.finish()

    def data_received(self, data: bytes) -> None:
        if self.record is None:
            self.close()  # nothing was asked for
            return
        now = time.perf_counter()
        if self.in_header:
            self.buffer += data
            head, separator, rest = self.buffer.partition(b"\r\n\r\n")
            if not separator:
                if len(self.buffer) > MAX_HEADER_BYTES:
                    self.fail("connection", "the header of the response is too long")
                return
            self.in_header, self.buffer = False, b""
            if not self.read_header(head):
                self.fail("connection", "the response is no HTTP/1.1")
                return
            data = rest
        if self.is_chunked:
            self.read_chunks(data, now)
            return
        self.num_missing -= len(data)
        self.add_body(data, now)
        if self.num_missing <= 0:
            self.end_response(now)

    # Responses.

    def read_header(self, head: bytes) -> bool:
        assert self.record is not None
        status_line, *lines = head.split(b"\r\n")
        parts = status_line.split(b" ", 2)
        if not parts[0].startswith(b"HTTP/1.") or len(parts) < 2 or not parts[1].isdigit():
            return False
        pairs = (line.partition(b":") for line in lines)
        headers = {name.strip().lower(): value.strip().lower() for name, _, value in pairs}
        self.is_chunked = headers.get(b"transfer-encoding") == b"chunked"
        length = headers.get(b"content-length", b"0")
        self.num_missing = int(length) if length.isdigit() else 0
        self.must_close = headers.get(b"connection") == b"close"
        self.is_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        self.record.status = int(parts[1])
        return True

    def read_chunks(self, data: bytes, now: float) -> None:
        data = self.buffer + data
        start = 0
        body = []
        is_last = False
        while (end := data.find(b"\r\n", start)) >= 0:
            try:
                size = int(data[start:end].partition(b";")[0], 16)
            except ValueError:
                self.fail("connection", "the response has a malformed chunk")
                return
            if len(data) < end + 2 + size + 2:
                break
            body.append(data[end + 2 : end + 2 + size])
            start = end + 2 + size + 2
            if size == 0:
                is_last = True
                break
        self.buffer = data[start:]
        if body:
            self.add_body(b"".join(body), now)
        if is_last:
            self.end_response(now)

    def add_body(self, data: bytes, now: float) -> None:
        record = self.record
        assert record is not None
        if self.collect or not self.is_stream:
            record.body += data
        if not self.is_stream:
            return
        *events, self.event = (self.event + data).split(b"\n\n")
        has_text = False
        for event in events:
            if event.startswith(DONE):
                self.has_done = True
            elif event.startswith(b'data: {"error"'):
                record.error, record.message = "error event", event[6:].decode(errors="replace")
            elif b'"choices":[]' in event or b'"choices": []' in event:
                self.usage_event = event
            elif event.startswith(b"data: "):
                has_text = True
        if has_text:
            record.event_times.append(now)

    def end_response(self, now: float) -> None:
        record = self.record
        assert record is not None
        record.finished_at = now
        if record.status != 200:
            record.error = str(record.status)
            record.message = error_message(bytes(record.body))
        elif self.is_stream and not self.has_done and not record.error:
            record.error, record.message = "incomplete", "the stream ended without [DONE]"
        if self.usage_event:
            usage = json.loads(self.usage_event[6:]).get("usage") or {}
            record.completion_tokens = usage.get("completion_tokens", 0)
        if self.must_close:
            self.close()
        self.finish()

    def fail(self, error: str, message: str) -> None:
        assert self.record is not None
        self.record.error, self.record.message = error, message
        self.close()
        self.finish()

    def finish(self) -> None:
        if self.record is not None and not self.record.finished_at:
            self.record.finished_at = time.perf_counter()
        if self.finished is not None and not self.finished.done():
            self.finished.set_result(None)


class Client:
    """A pool of connections to one target."""

    def __init__(self, target: Target, timeout: float = 600.0, collect: bool = False):
        self.target = target
        self.timeout = timeout
        self.collect = collect
        self.idle: list[Connection] = []
        self.tls = ssl.create_default_context() if target.tls else None

    async def post(self, path: str, body: Json, record: RequestRecord) -> RequestRecord:
        """Send a request and return its record, with `started_at`; never raises."""
        return await self.send(self.target.encode("POST", path, body), record)

    async def get(self, path: str) -> RequestRecord:
        return await self.send(self.target.encode("GET", path), RequestRecord(0, 0))

    async def send(self, data: bytes, record: RequestRecord) -> RequestRecord:
        record.started_at = time.perf_counter()
        connection = None
        try:
            async with asyncio.timeout(self.timeout):
                while self.idle and connection is None:
                    candidate = self.idle.pop()
                    connection = candidate if candidate.is_open else None
                is_reused = connection is not None
                connection = connection or await self.connect()
                await connection.send(data, record)
                if is_reused and record.error == "connection":
                    # The server closed the idle connection just before.
                    record.error = record.message = ""
                    record.finished_at = 0.0
                    connection = await self.connect()
                    await connection.send(data, record)
        except TimeoutError:
            record.error, record.message = "timeout", f"no end after {self.timeout:g} seconds"
        except OSError as error:
            record.error, record.message = "connection", error.strerror or str(error)
        if not record.finished_at:
            record.finished_at = time.perf_counter()
        if connection is not None:
            if connection.is_open and (not record.error or record.error.isdigit()):
                self.idle.append(connection)
            else:
                connection.close()
        return record

    async def connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_SECONDS):
            _, connection = await loop.create_connection(
                lambda: Connection(self.collect), self.target.host, self.target.port, ssl=self.tls
            )
        return connection

    def close(self) -> None:
        while self.idle:
            self.idle.pop().close()


def error_message(body: bytes) -> str:
    """The message of an error in OpenAI's envelope, or the beginning of the body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
