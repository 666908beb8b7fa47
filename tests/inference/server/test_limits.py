"""Connections of slow, large and malformed clients, without a model."""

import contextlib
import json
import socket
import threading
import time

import httpx
import pytest

from maxtext.inference.server import protocol
from maxtext.inference.server.lifecycle import HttpServer, LoadingApp, bind

CHUNK = b"x" * 2**16


class LargeApp:
    """Sends 64 MiB, and notes that the client has left."""

    def __init__(self):
        self.ended = threading.Event()

    async def __call__(self, scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1024):
            await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        self.ended.set()


@contextlib.contextmanager
def serve(app):
    listener = bind("127.0.0.1", 0)
    address = listener.getsockname()
    server = HttpServer(app, listener)
    server.start()
    try:
        yield address
    finally:
        server.stop()


@pytest.fixture(scope="module")
def address():
    """Of an application that responds with status 503 and reads no bodies."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HEAD_SECONDS", "BODY_SECONDS", "STALL_SECONDS"):
            patch.setattr(protocol, name, 0.3)
        with serve(LoadingApp()) as address:
            yield address


def exchange(address, *parts, pause=0.0):
    """All that the server sends until it closes the connection."""
    received = b""
    with socket.create_connection(address, timeout=10) as connection:
        for part in parts:
            with contextlib.suppress(ConnectionError):
                connection.sendall(part)
            time.sleep(pause)
        with contextlib.suppress(ConnectionError):
            while data := connection.recv(2**16):
                received += data
    return received


def check_error(response, status):
    head, _, body = response.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), response[:200]
    assert b"application/json" in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}


def test_model_that_is_loading(address):
    host, port = address
    for path in ("/health", "/v1/models"):
        response = httpx.get(f"http://{host}:{port}{path}")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "loading")
        assert response.headers["retry-after"]


def test_head_that_does_not_end(address):
    check_error(exchange(address, b"GET /health HTTP/1.1\r\nX: "), 408)
    drops = [b"x: y\r\n"] * 20
    check_error(exchange(address, b"GET /health HTTP/1.1\r\n", *drops, pause=0.02), 408)


def test_connection_without_a_request(address):
    assert exchange(address) == b""


def test_body_that_does_not_end(address):
    """It is not read, since the response is an error; the connection ends all the same."""
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1000\r\n\r\n"
    start = time.monotonic()
    response = exchange(address, head, *[b" "] * 30, pause=0.02)
    assert response.startswith(b"HTTP/1.1 503 ")
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("size", [1, 200])
def test_large_head(address, size):
    """One large header, and many."""
    header = b"x-a: " + b"a" * (70_000 // size) + b"\r\n"
    request = b"GET /health HTTP/1.1\r\n" + header * size
    check_error(exchange(address, request), 431)
    check_error(exchange(address, request + b"\r\n"), 431)


@pytest.mark.parametrize(
    "headers",
    [
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n",
        b"Content-Length: 4\r\nContent-Length: 5\r\n",
        b"Content-Length: +4\r\n",
        b"Content-Length : 4\r\n",
        b"Content-Length: 4\r\n folded: x\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"X: a\x00b\r\n",
    ],
)
def test_ambiguous_length_ends_the_connection(address, headers):
    """A proxy may read another length than the server: a request could hide in a body."""
    hidden = b"GET /hidden HTTP/1.1\r\n\r\n"
    request = b"POST /v1/completions HTTP/1.1\r\n" + headers + b"\r\n0\r\n\r\n" + hidden
    response = exchange(address, request)
    check_error(response, 400)
    assert response.count(b"HTTP/1.1") == 1


def test_client_that_does_not_read(monkeypatch):
    monkeypatch.setattr(protocol, "STALL_SECONDS", 0.2)
    app = LargeApp()
    with serve(app) as address, socket.create_connection(address) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert app.ended.wait(15)


def test_client_that_reads_slowly_stays_connected(monkeypatch):
    monkeypatch.setattr(protocol, "STALL_SECONDS", 0.5)
    app = LargeApp()
    with serve(app) as address, socket.socket() as connection:
        connection.settimeout(10)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**15)
        connection.connect(address)
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            connection.recv(2**16)
            time.sleep(0.002)
        assert not app.ended.is_set()
