"""HTTP/1.1 for an ASGI application, with limits for slow and large clients.

httptools parses requests. Responses of a connection are sent in the order of its requests.
"""

import asyncio
import http
import re
import time
import urllib.parse
from collections import deque
from collections.abc import Awaitable, Callable
from email.utils import formatdate
from typing import Any

import httptools

from maxtext.common.log import LOGGER
from maxtext.inference.server.errors import SERVER_ERROR, ApiError
from maxtext.inference.server.events import Receive, Send, encode_json
from maxtext.inference.server.http_head import (
    MAX_HEAD_BYTES,
    check_head,
    head_too_large,
    invalid_request,
    socket_address,
)

HEAD_SECONDS = 30.0  # from the connection, or the first byte of a request, to the end of its head
BODY_SECONDS = 35.0  # from there to the end of the body; the application gives up earlier
STALL_SECONDS = 30.0  # in which a client reads nothing of a response that waits for it
IDLE_SECONDS = 5.0  # from a response to the first byte of the next request
MAX_BUFFERED_BYTES = 64 * 1024  # of bodies that wait for the application while more is read
# For the rest of a body after a response that closes the connection: a connection that is closed
# while data arrives is reset, and the client may lose the response.
LINGER_SECONDS = 5.0
MAX_LINGER_BYTES = 64 * 2**20
MAX_PIPELINED = 16  # requests of a connection that wait for earlier responses while more is parsed
MAX_PARSED_BYTES = 4096  # at a time: some 150 of the shortest requests
STATUS_LINE = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode()
    for status in http.HTTPStatus
}
NOT_IN_NAME = re.compile(rb'[\x00-\x20\x7f()<>@,;:\\"/\[\]?={}]')
NOT_IN_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")  # such as the end of the line

AsgiApp = Callable[[Any, Receive, Send], Awaitable[None]]


class ServerState:
    """State that the connections of a server share."""

    def __init__(self, app: AsgiApp):
        self.app = app
        self.connections: set[HttpProtocol] = set()
        self.tasks: set[asyncio.Task[None]] = set()  # of responses
        self.date_second = 0
        self.date_line = b""

    def date(self) -> bytes:
        """The header Date of a response."""
        second = int(time.time())
        if second != self.date_second:
            self.date_second = second
            self.date_line = f"date: {formatdate(second, usegmt=True)}\r\n".encode()
        return self.date_line


class HttpProtocol(asyncio.Protocol):
    """A connection. Ends it if its client exceeds a limit. A request that is not valid HTTP, such
    as one with both Content-Length and chunks, gets an error with OpenAI's envelope.
    """

    transport: asyncio.Transport

    def __init__(self, state: ServerState):
        self.state = state
        self.loop = asyncio.get_running_loop()
        self.request_timer: asyncio.TimerHandle | None = None
        self.write_timer: asyncio.TimerHandle | None = None
        self.writable = asyncio.Event()
        self.writable.set()
        self.is_reading_paused = False
        self.scope: dict[str, Any] = {}  # the same for each request
        self.exchanges: deque[Exchange] = deque()  # without complete responses; the first one runs
        # Bytes after the last request that is read; None: before its end.
        self.num_discarded: int | None = None
        self.last_error: ApiError | None = None  # to send after the responses of `exchanges`
        # The request that is parsed.
        self.unparsed = bytearray()
        self.start_parser()
        self.in_head = False
        self.num_head_bytes = 0  # of a head, and between parts of a body
        self.num_received = 0  # bytes that the parser has last been given
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.incoming: Exchange | None = None  # whose body is not complete
        self.refusal = invalid_request()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.state.connections.add(self)
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "server": socket_address(transport.get_extra_info("sockname")),
            "client": socket_address(transport.get_extra_info("peername")),
            "scheme": "https" if transport.get_extra_info("sslcontext") else "http",
            "root_path": "",
        }
        self.start_request_timer(HEAD_SECONDS, self.end_slow_request)

    def connection_lost(self, exc: Exception | None) -> None:
        self.state.connections.discard(self)
        for timer in (self.request_timer, self.write_timer):
            if timer is not None:
                timer.cancel()
        self.disconnect()

    def disconnect(self) -> None:
        """Tell the application that the client has left."""
        for exchange in self.exchanges:
            exchange.is_disconnected = True
            exchange.changed.set()
        self.writable.set()

    def end(self) -> None:
        """The server ends: close the connection after the last response."""
        if self.exchanges:
            self.exchanges[-1].keep_alive = False
        else:
            self.transport.close()

    # Requests.

    def start_request_timer(self, seconds: float, callback: Callable[[], None]) -> None:
        if self.request_timer is not None:
            self.request_timer.cancel()
        self.request_timer = self.loop.call_later(seconds, callback)

    def start_parser(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        # Else it raises an error for requests after one with Connection: close, which is answered.
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def data_received(self, data: bytes) -> None:
        if self.num_discarded is not None:
            self.num_discarded += len(data)
            if self.num_discarded > MAX_LINGER_BYTES:
                self.transport.abort()
            return
        self.unparsed += data
        self.parse_unparsed()

    def parse_unparsed(self) -> None:
        """Parse what was received, until enough requests or bytes wait for the application."""
        while self.unparsed and not self.is_full() and not self.transport.is_closing():
            data = bytes(self.unparsed[:MAX_PARSED_BYTES])
            del self.unparsed[:MAX_PARSED_BYTES]
            self.num_received = len(data)
            try:
                self.parse(data)
            except httptools.HttpParserError:
                self.refuse(self.refusal)
                return
            self.num_head_bytes += len(data)
            if self.num_head_bytes > MAX_HEAD_BYTES:
                self.refuse(head_too_large())

    def parse(self, data: bytes) -> None:
        """The parser stops at a head with Upgrade, without its body. Java's client so offers
        HTTP/2. As RFC 9110 says, the request goes on in HTTP/1.1: another parser gets the head
        without the offer, and what follows.
        """
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                rest = data[offer.args[0] :]
                version = self.parser.get_http_version().encode()
                lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
                lines += [
                    name + b": " + value for name, value in self.headers if name != b"upgrade"
                ]
                data = b"\r\n".join([*lines, b"", rest])
                self.start_parser()

    def on_message_begin(self) -> None:
        self.in_head = True
        self.url = b""
        self.headers = []
        self.start_request_timer(HEAD_SECONDS, self.end_slow_request)

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.in_head:  # a trailer does not belong to the head, and is ignored
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        method = self.parser.get_method()
        if self.parser.should_upgrade() and method != b"CONNECT":
            return  # the head comes again, see `parse`
        version = self.parser.get_http_version()
        if (refusal := check_head(method, self.url, version, self.headers)) is not None:
            self.refusal = refusal
            raise ValueError("the head is refused")  # the parser stops, see data_received
        self.in_head = False
        self.start_request_timer(BODY_SECONDS, self.end_slow_request)
        target = httptools.parse_url(self.url)
        path = target.path or b"/"
        scope = {
            **self.scope,
            "http_version": version,
            "method": method.decode("ascii"),
            "path": urllib.parse.unquote(path.decode("ascii")),
            "raw_path": path,
            "query_string": target.query or b"",
            "headers": self.headers,
            "state": {},
        }
        keep_alive = version != "1.0" and self.parser.should_keep_alive()
        self.incoming = Exchange(self, scope, keep_alive)
        self.exchanges.append(self.incoming)
        if len(self.exchanges) == 1:
            self.start_response()
        self.update_reading()

    def on_body(self, body: bytes) -> None:
        self.num_head_bytes = -self.num_received
        if self.incoming is not None and not self.incoming.is_complete:
            self.incoming.body += body
            self.incoming.changed.set()
            self.update_reading()

    def on_message_complete(self) -> None:
        if self.in_head:
            return  # at an offer, see `parse`
        if self.request_timer is not None:
            self.request_timer.cancel()
        self.num_head_bytes = -self.num_received  # the rest of these bytes is not counted
        if self.incoming is not None:
            self.incoming.more_body = False
            self.incoming.changed.set()
            self.incoming = None
        self.start_idle_timer()

    def start_idle_timer(self) -> None:
        if not self.exchanges and not self.in_head and self.incoming is None:
            self.start_request_timer(IDLE_SECONDS, self.transport.close)

    def is_full(self) -> bool:
        """Whether much waits for the application."""
        num_bytes = sum(len(exchange.body) for exchange in self.exchanges)
        is_full = len(self.exchanges) > MAX_PIPELINED + 1 or num_bytes > MAX_BUFFERED_BYTES
        return is_full and self.num_discarded is None

    def update_reading(self) -> None:
        """Read no more while much waits for the application. An end of the connection is not
        noticed meanwhile.
        """
        is_full = self.is_full()
        if is_full == self.is_reading_paused or self.transport.is_closing():
            return
        self.is_reading_paused = is_full
        if is_full:
            self.transport.pause_reading()
            return
        self.parse_unparsed()
        if not self.is_full() and not self.transport.is_closing():
            self.transport.resume_reading()

    def end_slow_request(self) -> None:
        if self.is_reading_paused:  # the client waits for earlier responses
            self.start_request_timer(BODY_SECONDS, self.end_slow_request)
        elif self.in_head:
            self.refuse(ApiError(408, f"the head did not come in {HEAD_SECONDS:.0f} seconds"))
        elif len(self.exchanges) > 1:
            self.refuse(ApiError(408, f"the body did not come in {BODY_SECONDS:.0f} seconds"))
        else:
            self.transport.abort()

    def refuse(self, error: ApiError) -> None:
        """Send an error instead of a response to the request that is parsed, after the responses
        to earlier requests, and close the connection; only close it if this response has begun.
        """
        if self.transport.is_closing():
            return
        if self.incoming is not None and self.exchanges and self.exchanges[0] is self.incoming:
            if self.incoming.is_started:
                self.transport.abort()
            else:
                self.send_error(error)
            return
        if self.exchanges and self.exchanges[-1] is self.incoming:
            self.exchanges.pop()
        if not self.exchanges:
            self.send_error(error)
            return
        self.last_error = error
        self.discard()
        if self.request_timer is not None:
            self.request_timer.cancel()

    # Responses.

    def start_response(self) -> None:
        """Of the first exchange."""
        task = self.loop.create_task(self.exchanges[0].run(self.state.app))
        self.state.tasks.add(task)
        task.add_done_callback(self.state.tasks.discard)

    def end_response(self) -> None:
        """The response of the first exchange is complete."""
        exchange = self.exchanges.popleft()
        if not exchange.keep_alive:
            if exchange.more_body or self.exchanges or self.unparsed:
                self.linger()
            else:
                self.transport.close()
        elif self.last_error is not None and not self.exchanges:
            self.send_error(self.last_error)
        elif not self.transport.is_closing():
            if self.exchanges:
                self.start_response()
            else:
                self.start_idle_timer()
            self.update_reading()

    def send_error(self, error: ApiError) -> None:
        """Instead of a response, and close the connection."""
        if self.transport.is_closing():
            return
        body = encode_json(error.body())
        headers = b"content-type: application/json\r\nconnection: close\r\ncontent-length: "
        head = STATUS_LINE[error.status] + headers + str(len(body)).encode() + b"\r\n\r\n"
        self.transport.write(head + body)
        self.linger()
        self.disconnect()

    def linger(self) -> None:
        """Close the connection when the client has closed its side, and no later than
        LINGER_SECONDS; discard what it sends until then.
        """
        if self.transport.is_closing():
            return
        self.discard()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.start_request_timer(LINGER_SECONDS, self.transport.close)

    def discard(self) -> None:
        """Discard what the client sends from now on."""
        self.unparsed.clear()
        if self.num_discarded is None:
            self.num_discarded = 0
            self.update_reading()

    def pause_writing(self) -> None:
        self.writable.clear()
        self.start_write_timer()

    def resume_writing(self) -> None:
        if self.write_timer is not None:
            self.write_timer.cancel()
        self.writable.set()

    def start_write_timer(self) -> None:
        size = self.transport.get_write_buffer_size()
        self.write_timer = self.loop.call_later(STALL_SECONDS, self.check_progress, size)

    def check_progress(self, size: int) -> None:
        """End the connection if the client has read nothing since `size` bytes waited for it."""
        if self.transport.get_write_buffer_size() >= size:
            self.transport.abort()
        else:
            self.start_write_timer()


class Exchange:
    """A request and its response, as an ASGI application receives and sends them."""

    def __init__(self, connection: HttpProtocol, scope: dict[str, Any], keep_alive: bool):
        self.connection = connection
        self.scope = scope
        self.keep_alive = keep_alive  # the connection, after the response
        self.waits_to_continue = scope["http_version"] != "1.0" and any(
            name == b"expect" and value.lower() == b"100-continue"
            for name, value in scope["headers"]
        )
        self.body = bytearray()  # that the application has not received
        self.more_body = True
        self.changed = asyncio.Event()
        self.is_disconnected = False
        # The response.
        self.is_started = False
        self.is_complete = False
        self.is_chunked = False
        self.num_left: int | None = None  # bytes of a body with Content-Length

    async def run(self, app: AsgiApp) -> None:
        try:
            await app(self.scope, self.receive, self.send)
        except Exception as error:
            LOGGER.error("the application failed", exc_info=error)
        finally:
            if not self.is_complete and not self.is_disconnected:
                if self.is_started:  # the client notices that the response is cut
                    self.connection.transport.close()
                else:
                    self.connection.send_error(ApiError(500, "an internal error", SERVER_ERROR))

    async def receive(self) -> dict[str, Any]:
        if self.waits_to_continue and not self.connection.transport.is_closing():
            self.connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.waits_to_continue = False
        if not self.is_disconnected and not self.is_complete:
            await self.changed.wait()
            self.changed.clear()
        if self.is_disconnected or self.is_complete:
            return {"type": "http.disconnect"}
        body, self.body = bytes(self.body), bytearray()
        message = {"type": "http.request", "body": body, "more_body": self.more_body}
        self.connection.update_reading()  # it may parse the rest of the body
        return message

    async def send(self, message: Any) -> None:
        """Raises RuntimeError for a message that ASGI does not allow here, and for a header that
        is not valid.
        """
        if not self.is_disconnected:
            await self.connection.writable.wait()
        if self.is_disconnected:
            return
        expected = "http.response.body" if self.is_started else "http.response.start"
        if self.is_complete or message["type"] != expected:
            raise RuntimeError(f"{message['type']} does not come next in a response")
        if self.is_started:
            self.send_body(message.get("body", b""), message.get("more_body", False))
        else:
            self.send_head(message["status"], message.get("headers", []))

    def send_head(self, status: int, headers: Any) -> None:
        parts = [STATUS_LINE[status], self.connection.state.date()]
        has_length = says_close = False
        for name, value in headers:
            if NOT_IN_NAME.search(name) or NOT_IN_VALUE.search(value):
                raise RuntimeError(f"the response has a header that is not valid: {name!r}")
            name = name.lower()
            if name == b"content-length":
                has_length = True
                self.num_left = int(value)
            elif name == b"transfer-encoding":
                raise RuntimeError("the server chooses the transfer coding of a response")
            elif name == b"connection" and b"close" in value.lower().replace(b" ", b"").split(b","):
                says_close = True
                self.keep_alive = False
            parts += [name, b": ", value, b"\r\n"]
        if not self.keep_alive and not says_close:
            parts.append(b"connection: close\r\n")
        if self.scope["method"] == "HEAD":
            self.num_left = 0
        elif status in (204, 304):
            self.num_left = self.num_left or 0
        elif not has_length and self.scope["http_version"] != "1.0":  # its bodies end by closing
            self.is_chunked = True
            parts.append(b"transfer-encoding: chunked\r\n")
        parts.append(b"\r\n")
        self.is_started = True
        self.waits_to_continue = False
        self.connection.transport.write(b"".join(parts))

    def send_body(self, body: bytes, more_body: bool) -> None:
        if self.is_chunked:
            chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            self.connection.transport.write(chunk if more_body else chunk + b"0\r\n\r\n")
        elif self.num_left is None:
            self.connection.transport.write(body)
        elif self.scope["method"] != "HEAD":
            if len(body) > self.num_left:
                raise RuntimeError("the body of the response is longer than its Content-Length")
            self.num_left -= len(body)
            self.connection.transport.write(body)
            if self.num_left and not more_body:
                raise RuntimeError("the body of the response is shorter than its Content-Length")
        if not more_body:
            self.is_complete = True
            self.changed.set()
            self.connection.end_response()
