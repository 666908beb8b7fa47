"""uvicorn's protocol for HTTP connections, with limits for slow and large clients.

uvicorn itself waits for heads and bodies of requests, and for readers of responses, without end.
"""

import asyncio
import re
import sys
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from maxtext.inference.server.errors import ApiError
from maxtext.inference.server.events import encode_json

HEAD_SECONDS = 30.0  # from the connection, or the first byte of a request, to the end of its head
BODY_SECONDS = 35.0  # from there to the end of the body; the application gives up earlier
STALL_SECONDS = 30.0  # in which a client reads nothing of a response that waits for it
MAX_HEAD_BYTES = 64 * 1024
# The host of such a target counts, not the header Host, which the application checks.
ABSOLUTE_TARGET = re.compile(rb"[a-zA-Z][\w+.-]*://(?P<host>[^/?#]*)")
# For the rest of a body after a response that closes the connection: a connection that is closed
# while data arrives is reset, and the client may lose the response.
LINGER_SECONDS = 5.0
MAX_LINGER_BYTES = 64 * 2**20
MAX_PIPELINED = 16  # requests of a connection that wait for earlier responses while more is read


class LimitedProtocol(HttpToolsProtocol):
    """Ends connections whose client exceeds a limit. A request that is not valid HTTP, such as one
    with both Content-Length and chunks, gets an error with OpenAI's envelope.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.request_timer: asyncio.TimerHandle | None = None
        self.write_timer: asyncio.TimerHandle | None = None
        self.in_head = True
        self.num_head_bytes = 0
        self.refusal = ApiError(400, "this is no valid HTTP request")
        self.running: Any = None  # the cycle of the response in progress; `cycle` is the newest
        # The parser stops at a head with Upgrade, see `_unsupported_upgrade_warning`.
        self.data = b""  # that it was given
        self.is_at_upgrade = False
        self.num_discarded: int | None = None  # bytes after the last response; None: before it

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.start_request_timer(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self.request_timer, self.write_timer):
            if timer is not None:
                timer.cancel()
        if self.running is not None and not self.running.response_complete:
            self.running.disconnected = True
            self.running.message_event.set()
        super().connection_lost(exc)

    # Requests.

    def start_request_timer(self, seconds: float) -> None:
        if self.request_timer is not None:
            self.request_timer.cancel()
        self.request_timer = self.loop.call_later(seconds, self.end_slow_request)

    def data_received(self, data: bytes) -> None:
        if self.num_discarded is not None:
            self.num_discarded += len(data)
            if self.num_discarded > MAX_LINGER_BYTES:
                self.transport.abort()
            return
        self.data = data
        super().data_received(data)
        if self.in_head:
            self.num_head_bytes += len(data)
            if self.num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.refuse(self.head_too_large())

    def _unsupported_upgrade_warning(self) -> None:
        """uvicorn calls it in its handler of HttpParserUpgrade: the parser has stopped at a head
        with Upgrade, without its body. Java's client so offers HTTP/2. As RFC 9110 says, the
        request goes on in HTTP/1.1: another parser, whose head has the same length of the body,
        gets the rest.
        """
        error = sys.exc_info()[1]
        assert isinstance(error, httptools.HttpParserUpgrade), "uvicorn has caught it"
        rest = self.data[error.args[0] :]
        names = (b"content-length", b"transfer-encoding")
        lengths = [name + b": " + value for name, value in self.headers if name in names]
        self.parser = httptools.HttpRequestParser(BodyCallbacks(self))
        self.is_at_upgrade = False
        self.parser.feed_data(b"\r\n".join([b"POST / HTTP/1.1", *lengths, b"", b""]))
        self.data_received(rest)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.in_head = True
        self.num_head_bytes = 0
        self.start_request_timer(HEAD_SECONDS)

    def on_headers_complete(self) -> None:
        if (refusal := self.check_head()) is not None:
            self.refusal = refusal
            raise ValueError("the head is refused")  # the parser stops, see send_400_response
        self.in_head = False
        self.is_at_upgrade = self.parser.should_upgrade()
        self.start_request_timer(BODY_SECONDS)
        super().on_headers_complete()
        cycle: Any = self.cycle
        cycle.transport = ResponseTransport(self, cycle)
        if self.pipeline and len(self.pipeline) <= MAX_PIPELINED:
            self.flow.resume_reading()  # else the end of the connection would not be noticed

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """uvicorn calls it for a request, and at the end of a response for the next one."""
        self.running = cycle
        super()._start_asgi_task(cycle, app)

    def on_message_complete(self) -> None:
        if self.is_at_upgrade:
            return  # the body comes
        if self.request_timer is not None:
            self.request_timer.cancel()
        super().on_message_complete()

    def end_slow_request(self) -> None:
        if self.transport.is_closing():
            return
        if not self.in_head or not self.num_head_bytes:
            self.transport.abort()
            return
        self.refuse(ApiError(408, f"the head did not come in {HEAD_SECONDS:.0f} seconds"))

    def check_head(self) -> ApiError | None:
        """The error of a head that the parser accepts and RFC 9112 does not, or that is too
        large.
        """
        # A header also has a colon, a space and the end of its line.
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > MAX_HEAD_BYTES:
            return self.head_too_large()
        values: dict[bytes, list[bytes]] = {b"host": [], b"transfer-encoding": []}
        for name, value in self.headers:
            if name in values:
                values[name].append(value.strip().lower())
        num_hosts = len(values[b"host"])
        if num_hosts > 1 or (not num_hosts and self.parser.get_http_version() != "1.0"):
            return ApiError(400, f"the request has {num_hosts} headers Host: send one")
        target = ABSOLUTE_TARGET.match(self.url)
        if target is not None and values[b"host"] != [target["host"].lower()]:
            return ApiError(400, "the target of the request and its header Host are two servers")
        if values[b"transfer-encoding"] not in ([], [b"chunked"]):
            return ApiError(400, "the body has a transfer coding: send plain JSON, or chunks of it")
        return None

    @staticmethod
    def head_too_large() -> ApiError:
        return ApiError(431, f"the head of the request is larger than {MAX_HEAD_BYTES} bytes")

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls it when its parser fails."""
        self.refuse(self.refusal)

    def refuse(self, error: ApiError) -> None:
        """Send an error and close the connection; only close it within another response. A request
        whose body is malformed, for which the application waits, has no response yet.
        """
        cycle = self.cycle
        is_open = cycle is not None and not cycle.response_complete
        if is_open and (cycle.response_started or self.pipeline):
            self.transport.abort()
            return
        body = encode_json(error.body())
        headers = b"content-type: application/json\r\nconnection: close\r\ncontent-length: "
        head = STATUS_LINE[error.status] + headers + str(len(body)).encode() + b"\r\n\r\n"
        self.transport.write(head + body)
        self.linger()

    # Responses.

    def linger(self) -> None:
        """Close the connection when the client has closed its side, and no later than
        LINGER_SECONDS; discard what it sends until then.
        """
        if self.transport.is_closing() or self.num_discarded is not None:
            return
        self.num_discarded = 0
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        if self.request_timer is not None:
            self.request_timer.cancel()
        self.request_timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.start_write_timer()

    def resume_writing(self) -> None:
        if self.write_timer is not None:
            self.write_timer.cancel()
        super().resume_writing()

    def start_write_timer(self) -> None:
        size = self.transport.get_write_buffer_size()
        self.write_timer = self.loop.call_later(STALL_SECONDS, self.check_progress, size)

    def check_progress(self, size: int) -> None:
        """End the connection if the client has read nothing since `size` bytes waited for it."""
        if self.transport.get_write_buffer_size() >= size:
            self.transport.abort()
        else:
            self.start_write_timer()


class BodyCallbacks:
    """Callbacks of a parser that begins with the body of a request, whose head is known."""

    def __init__(self, protocol: LimitedProtocol):
        self.protocol = protocol
        self.on_body = protocol.on_body
        self.is_first = True

    def on_message_begin(self) -> None:
        if not self.is_first:
            self.protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self.is_first:
            self.protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.is_first:
            self.protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self.is_first:
            self.protocol.on_headers_complete()

    def on_message_complete(self) -> None:
        self.is_first = False
        self.protocol.on_message_complete()


class ResponseTransport:
    """The transport that uvicorn writes a response to. Closing it leaves the client time to read
    the response if the body of the request is not complete.
    """

    def __init__(self, protocol: LimitedProtocol, cycle: Any):
        self.protocol = protocol
        self.cycle = cycle
        self.inner = protocol.transport
        self.write = self.inner.write
        self.is_closing = self.inner.is_closing

    def close(self) -> None:
        if self.cycle.more_body:
            self.protocol.linger()
        else:
            self.inner.close()
