"""HTTP/1.1 as RFC 9112 has it, by the standard library's client and by bytes."""

import ast
import asyncio
import http.client
import json
import socket
import time
from email.utils import parsedate_to_datetime
from pathlib import Path

import httptools
import pytest

from maxtext.inference.server import http11, lifecycle
from maxtext.inference.server.http11 import HttpProtocol, ServerState
from tests.inference.server.raw_http import exchange, serve

GET = b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n"
CLOSE = b"GET /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


async def application(scope, receive, send):
    """The path chooses the response."""
    path = scope["path"]

    async def start(status, *headers):
        await send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(body=b"", more=False):
        await send({"type": "http.response.body", "body": body, "more_body": more})

    if path == "/chunks":
        await start(200, (b"Content-Type", b"text/plain"))
        for part in (b"one", b"", b"two"):
            await write(part, True)
        await write()
    elif path == "/204":
        await start(204)
        await write()
    elif path == "/early":  # before the body of the request
        await start(200, (b"content-length", b"2"))
        await write(b"ok")
    elif path == "/cut":
        await start(200, (b"content-length", b"5"))
        await write(b"abc", True)
    elif path == "/long":
        await start(200, (b"content-length", b"1"))
        await write(b"abc")
    elif path == "/split":
        await start(200, (b"x-a", b"b\r\nx-c: d"))
    elif path == "/fail":
        raise ValueError
    elif path == "/slow":
        await asyncio.sleep(0.5)
        await start(200, (b"content-length", b"2"))
        await write(b"ok")
    elif path in ("/headers", "/length"):
        length, more = 0, True
        while more:
            message = await receive()
            length, more = length + len(message["body"]), message["more_body"]
        names = b" ".join(name for name, _ in scope["headers"])
        text = names + b" ok" if path == "/headers" else b"%d" % length
        await start(200, (b"content-length", b"%d" % len(text)))
        await write(text)
    else:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        target = scope["raw_path"] + b"?" + scope["query_string"]
        body = b"%s %s %s" % (scope["method"].encode(), target, body)
        await start(200, (b"content-length", b"%d" % len(body)))
        await write(body)


@pytest.fixture(scope="module")
def address():
    with serve(application) as address:
        yield address


@pytest.fixture
def client(address):
    client = http.client.HTTPConnection(*address, timeout=10)
    yield client
    client.close()


def fetch(client, method, path, body=None, **options):
    client.request(method, path, body, **options)
    response = client.getresponse()
    return response, response.read()


def test_framing_of_responses(client):
    """On one connection, so that a body of another length would be part of the next response."""
    response, body = fetch(client, "GET", "/chunks")
    assert (body, response.headers["transfer-encoding"]) == (b"onetwo", "chunked")
    assert abs(parsedate_to_datetime(response.headers["date"]).timestamp() - time.time()) < 60
    for method in ("HEAD", "GET"):
        response, body = fetch(client, method, "/echo?a=%20")
        assert response.headers["content-length"] == str(len(f"{method} /echo?a=%20 "))
        assert body == (b"GET /echo?a=%20 " if method == "GET" else b"")
    for method in ("HEAD", "GET"):
        response, body = fetch(client, method, "/204")
        assert (response.status, body) == (204, b"")
        assert not {"transfer-encoding", "content-length"} & {*map(str.lower, response.headers)}
    assert fetch(client, "POST", "/echo", b"x" * 300_000)[1].endswith(b"? " + b"x" * 300_000)
    chunks = [b"a", b"bc"]
    response, body = fetch(client, "POST", "/echo", iter(chunks), encode_chunked=True)
    assert body == b"POST /echo? abc"
    assert fetch(client, "POST", "/early", b"unread")[1] == b"ok"
    assert fetch(client, "GET", "/echo")[1] == b"GET /echo? "


def test_http_1_0_closes_the_connection(address):
    response = exchange(address, b"GET /echo HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    assert b"connection: close" in response
    assert response.endswith(b"\r\n\r\nGET /echo? ")


def test_continues_when_the_application_reads(address):
    """RFC 9110, section 10.1.1: no 100 if the final status is there already."""
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n"
    head += b"Connection: close\r\n\r\n"
    response = exchange(address, head % b"/echo", b"ab", pause=0.05)
    assert response.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
    assert exchange(address, head % b"/early", b"ab").startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("path", [b"/cut", b"/long"])
def test_response_of_another_length_ends_the_connection(address, path):
    response = exchange(address, GET % path, GET % b"/echo")
    assert response.count(b"HTTP/1.1") == 1
    assert len(response.partition(b"\r\n\r\n")[2]) == (3 if path == b"/cut" else 0)


@pytest.mark.parametrize("path", [b"/fail", b"/split"])
def test_application_that_fails(address, path):
    """A header cannot contain another one."""
    head, _, body = exchange(address, GET % path).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 500 ")
    assert b"x-c" not in head
    assert json.loads(body)["error"]["type"] == "server_error"


def test_refuses_to_be_a_proxy(address):
    for target in (b"x:443", b"/echo"):
        response = exchange(address, b"CONNECT %s HTTP/1.1\r\nHost: x\r\n\r\n" % target + CLOSE)
        assert response.startswith(b"HTTP/1.1 400 ")
        assert response.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("rest", [b"", b"\r\n"])
def test_idle_connection_is_closed(monkeypatch, address, rest):
    """Empty lines, which RFC 9112 allows before a request, are none."""
    monkeypatch.setattr(http11, "IDLE_SECONDS", 0.3)
    with socket.create_connection(address, timeout=10) as connection:
        connection.sendall(GET % b"/early")
        assert connection.recv(2**16).endswith(b"ok")
        connection.sendall(rest)
        start = time.monotonic()
        assert connection.recv(2**16) == b""
        assert 0.2 < time.monotonic() - start < 5


class Transport(asyncio.Transport):
    """Records what is written. The base class raises NotImplementedError for all other methods."""

    def __init__(self):
        super().__init__({"peername": ("1.2.3.4", 5), "sockname": ("5.6.7.8", 80)})
        self.written = b""
        self.is_closed = False

    def write(self, data):
        self.written += data

    def is_closing(self):
        return self.is_closed

    def close(self):
        self.is_closed = True

    abort = close

    def can_write_eof(self):
        return False

    def pause_reading(self):
        """More of the data is not there anyway."""

    resume_reading = pause_reading


async def run_protocol(*parts):
    """(protocol, transport) after the responses to parts of a connection's bytes."""
    state = ServerState(application)
    protocol, transport = HttpProtocol(state), Transport()
    protocol.connection_made(transport)
    for part in parts:
        protocol.data_received(part)
        while state.tasks:
            await asyncio.sleep(0)
    return protocol, transport


def test_body_does_not_count_as_the_next_head():
    """Though both come in one read."""

    async def run():
        body = b"x" * http11.MAX_HEAD_BYTES
        head = b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        requests = head + body + CLOSE
        protocol, transport = await run_protocol(requests[:-10], requests[-10:])
        assert transport.written.count(b"HTTP/1.1 200 OK") == 2
        assert transport.is_closed
        protocol.connection_lost(None)
        assert not protocol.state.connections
        large = b"GET / HTTP/1.1\r\nX: " + b"a" * http11.MAX_HEAD_BYTES
        transport = (await run_protocol(GET % b"/early", large))[1]
        assert transport.written.count(b"HTTP/1.1 431 ") == 1

    asyncio.run(run())


def test_pipelined_requests_are_parsed_a_few_at_a_time():
    """A read of 256 KiB may have 10,000 requests: to parse them at once stalls all clients."""
    count = 9000
    connection, application_calls = pipeline(GET % b"/" * count)
    assert application_calls == count
    assert connection.most_waiting < 300


def pipeline(data):
    """The connection that got all the data at once, and the number of requests it passed on."""

    class Connection(HttpProtocol):
        most_waiting = 0

        def on_headers_complete(self):
            super().on_headers_complete()
            self.most_waiting = max(self.most_waiting, len(self.exchanges))

    calls = 0

    async def ok(scope, receive, send):
        nonlocal calls
        calls += 1
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def run():
        connection = Connection(ServerState(ok))
        connection.connection_made(Transport())
        connection.data_received(data)
        while connection.exchanges or connection.unparsed:
            await asyncio.sleep(0)
        connection.connection_lost(None)
        return connection

    return asyncio.run(run()), calls


CHUNKED = b"POST /headers HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n"


def test_trailers_are_no_headers(address):
    """RFC 9110, section 6.5.1: they would be headers that no proxy has checked."""
    received = exchange(address, CHUNKED + b"Authorization: Bearer x\r\n\r\n" + CLOSE)
    assert b"host transfer-encoding ok" in received
    assert received.count(b"HTTP/1.1 200") == 2


@pytest.mark.parametrize("unit", [b"a: b\r\n", b"aaaaaa"])
def test_trailers_are_limited(address, unit):
    received = exchange(address, CHUNKED + b"X: ", unit * 20_000)
    assert received.startswith(b"HTTP/1.1 431 ")


def test_chunk_extensions_are_limited(address):
    head = CHUNKED.removesuffix(b"2\r\nok\r\n0\r\n")
    received = exchange(address, head + b"2;" + b"a" * 100_000)
    assert received.startswith(b"HTTP/1.1 431 ")


def test_no_chunks_for_http_1_0(address):
    """RFC 9112, section 6.1, and RFC 9110, section 10.1.1."""
    received = exchange(address, b"GET /chunks HTTP/1.0\r\n\r\n")
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert body == b"onetwo"
    request = b"POST /echo HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
    received = exchange(address, request, b"ok", pause=0.2)
    assert received.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("num_valid", [1, 3])
@pytest.mark.parametrize("end", [b"NONSENSE\r\n\r\n", b"POST / HTTP/1.1\r\n\r\n"])
def test_error_comes_after_the_responses_to_earlier_requests(address, num_valid, end):
    received = exchange(address, GET % b"/slow" * num_valid + end + b"x")
    assert received.count(b"HTTP/1.1 200 ") == num_valid
    assert received.count(b"HTTP/1.1 400 ") == 1
    assert received.rindex(b"HTTP/1.1 200 ") < received.rindex(b"HTTP/1.1 400 ")


def test_malformed_body_behind_another_request(address):
    bad = b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
    received = exchange(address, GET % b"/slow", bad, pause=0.1)
    assert received.count(b"HTTP/1.1 200 ") == received.count(b"HTTP/1.1 400 ") == 1


def test_next_request_does_not_end_a_response(monkeypatch, address):
    """A client that sends its next request, with a long body, waits for the server."""
    for name in ("HEAD_SECONDS", "BODY_SECONDS"):
        monkeypatch.setattr(http11, name, 0.2)
    body = b"x" * 200_000
    post = b"POST /length HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    received = exchange(address, GET % b"/slow" + post % len(body) + body)
    assert received.count(b"HTTP/1.1 200 ") == 2
    assert received.endswith(b"200000")
    received = exchange(address, GET % b"/slow" + b"GET / HT")
    assert received.count(b"HTTP/1.1 200 ") == received.count(b"HTTP/1.1 408 ") == 1


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET http://x HTTP/1.1", 200),
        (b"GET http://x?a HTTP/1.1", 200),
        (b"GET / HTTP/2.0", 505),
    ],
)
def test_request_lines(address, line, status):
    received = exchange(address, line + b"\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 %d " % status)


def test_uses_public_interfaces_only():
    """A transport has the methods that asyncio documents, and httptools the names it exports."""
    transport_names = {name for name in dir(asyncio.Transport) if not name.startswith("_")}
    for module in (http11, lifecycle):
        tree = ast.parse(Path(module.__file__).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                parts = {part for name in names for part in name.split(".")}
                assert "uvicorn" not in parts
                assert not [part for part in parts if part.startswith("_")]
            elif isinstance(node, ast.Attribute):
                is_dunder = node.attr.startswith("__") and node.attr.endswith("__")
                assert is_dunder or not node.attr.startswith("_"), node.attr
                owner = ast.unparse(node.value).rpartition(".")[2]
                if owner == "transport":
                    assert node.attr in transport_names, node.attr
                elif owner == "httptools":
                    assert node.attr in httptools.__all__, node.attr
