"""Connections of slow, large and malformed clients, without a model."""

import contextlib
import json
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import pytest

from maxtext.common import progress
from maxtext.common.errors import ConfigError
from maxtext.inference.server import http11, lifecycle
from maxtext.inference.server.errors import ApiError
from maxtext.inference.server.events import error_response
from maxtext.inference.server.lifecycle import LoadingApp, Tls, unix_listener
from maxtext.inference.server.middleware import KeyMiddleware, RequestMiddleware
from tests.inference.server.raw_http import exchange, serve

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


@pytest.fixture(scope="module")
def address():
    """Of an application that responds with status 503 and reads no bodies."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HEAD_SECONDS", "BODY_SECONDS", "STALL_SECONDS"):
            patch.setattr(http11, name, 0.3)
        with serve(LoadingApp()) as address:
            yield address


def check_error(response, status):
    head, _, body = response.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), response[:200]
    assert b"application/json" in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}


def test_model_that_is_loading(address, monkeypatch):
    host, port = address
    for path, status in (("/health", ""), ("/v1/models", "warm-up 3 of 12")):
        monkeypatch.setattr(progress, "_STATUS", status)
        response = httpx.get(f"http://{host}:{port}{path}", timeout=60)
        message = response.json()["error"]["message"]
        assert message == "the model is loading" + (f": {status}" if status else "")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "loading")
        assert response.headers["retry-after"]


@pytest.fixture
def certificate(tmp_path):
    """The files of a certificate that is its own authority, and of its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    files = tmp_path / "certificate.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-out", str(files[0]), "-keyout", str(files[1])]
    subprocess.run(command, check=True, capture_output=True)
    return [str(file) for file in files]


def test_tls(certificate):
    context = ssl.create_default_context(cafile=certificate[0])
    for authorities in (None, certificate[0]):
        tls = Tls(*certificate, authorities)
        tls.check()
        with serve(LoadingApp(), tls) as (host, port):
            if authorities is not None:  # clients need a certificate, too
                with pytest.raises(httpx.TransportError):
                    httpx.get(f"https://{host}:{port}/health", verify=context, timeout=60)
                context.load_cert_chain(*certificate)
            assert (
                httpx.get(f"https://{host}:{port}/health", verify=context, timeout=60).status_code
                == 503
            )
            with pytest.raises(httpx.TransportError):
                httpx.get(f"http://{host}:{port}/health", timeout=60)


def test_wrong_tls_files(certificate):
    for tls in (
        Tls(certificate[0]),
        Tls(key=certificate[1]),
        Tls(authorities=certificate[0]),
        Tls(certificate[0], certificate[0]),
        Tls(certificate[0], "missing"),
    ):
        with pytest.raises(ConfigError):
            tls.check()


def test_encrypted_key_is_refused_without_a_question(certificate, tmp_path):
    encrypted = str(tmp_path / "encrypted.pem")
    command = ["openssl", "pkey", "-in", certificate[1], "-aes128", "-passout", "pass:x"]
    subprocess.run([*command, "-out", encrypted], check=True, capture_output=True)
    with pytest.raises(ConfigError, match="is encrypted: decrypt it"):
        Tls(certificate[0], encrypted).check()


def test_connection_without_a_tls_handshake_ends(certificate, monkeypatch):
    """As one without headers does."""
    monkeypatch.setattr(http11, "HEAD_SECONDS", 0.5)
    with (
        serve(LoadingApp(), Tls(*certificate)) as address,
        socket.create_connection(address, timeout=20) as client,
    ):
        client.sendall(b"\x16\x03\x01\x02\x00")  # the begin of one
        assert client.recv(1) == b""


def test_path_of_a_unix_socket_is_removed_in_the_end(tmp_path):
    path = tmp_path / "socket"
    with unix_listener(str(path)) as listener:
        listener.listen()
        path.chmod(0o666)  # for a proxy
        with pytest.raises(ConfigError, match="another server"), unix_listener(str(path)):
            pass
        assert path.is_socket()
    assert not path.exists()


def test_unix_socket_of_the_next_server_stays(tmp_path):
    path = tmp_path / "socket"
    with unix_listener(str(path)) as first:
        first.close()
        with unix_listener(str(path)) as second:
            second.listen()
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
            assert path.is_socket()


@pytest.mark.parametrize("kind", ["file", "link"])
def test_file_in_place_of_a_unix_socket_stays(tmp_path, kind):
    path = tmp_path / "socket"
    with unix_listener(str(path)):
        path.unlink()
        path.write_text("x") if kind == "file" else path.symlink_to("x")
    assert path.is_file() or path.is_symlink()


def test_metrics_can_be_protected():
    """Without a key, they are open otherwise."""

    async def application(scope, receive, send):
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    for is_protected, status in ((False, 204), (True, 401)):
        app = KeyMiddleware(application, ["key"], is_protected)
        with serve(app) as (host, port):
            assert httpx.get(f"http://{host}:{port}/metrics", timeout=60).status_code == status
            assert httpx.get(f"http://{host}:{port}/health", timeout=60).status_code == 204


def test_head_that_does_not_end(address):
    check_error(exchange(address, b"GET /health HTTP/1.1\r\nX: "), 408)
    drops = [b"x: y\r\n"] * 20
    check_error(exchange(address, b"GET /health HTTP/1.1\r\n", *drops, pause=0.02), 408)


def test_connection_without_a_request(address):
    assert exchange(address) == b""


def test_body_that_does_not_end(address):
    """It is not read, since the response is an error; the connection ends all the same."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    start = time.monotonic()
    response = exchange(address, head, *[b" "] * 30, pause=0.02)
    assert response.startswith(b"HTTP/1.1 503 ")
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("size", [1, 200, 9000])
def test_large_head(address, size):
    """One large header, and many small ones."""
    header = b"x-a: " + b"a" * (70_000 // size) + b"\r\n"
    request = b"GET /health HTTP/1.1\r\nHost: x\r\n" + header * size
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
        b"Transfer-Encoding: gzip, chunked\r\n",
        b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n",
        b"X: a\x00b\r\n",
    ],
)
def test_ambiguous_length_ends_the_connection(address, headers):
    """A proxy may read another length than the server: a request could hide in a body."""
    hidden = b"GET /hidden HTTP/1.1\r\n\r\n"
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n0\r\n\r\n" + hidden
    response = exchange(address, request)
    check_error(response, 400)
    assert response.count(b"HTTP/1.1") == 1


def test_needs_one_host(address):
    """RFC 9112, section 3.2. HTTP/1.0 has none."""
    for request, status in (
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", 503),
        (b"GET /health HTTP/1.0\r\n\r\n", 503),
        # RFC 9112, section 3.2.2: the host of an absolute target replaces Host.
        (b"GET HTTP://evil.test/health HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET http://A:1/health HTTP/1.1\r\nHost: a:1\r\nConnection: close\r\n\r\n", 503),
        (b"GET /?http://evil.test HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", 503),
    ):
        check_error(exchange(address, request), status)


async def refuse(scope, receive, send):
    error = ApiError(413, "the body is too large")
    await error_response(error)(scope, receive, send)


def serve_with_ids(application):
    """Under the middleware that all requests pass."""
    engine = SimpleNamespace(arrival=contextlib.nullcontext)
    metrics = SimpleNamespace(count_http=lambda *_: None)
    return serve(RequestMiddleware(application, engine, metrics))


@pytest.mark.parametrize("length", [b"Content-Length: 67108864", b"Transfer-Encoding: chunked"])
def test_refused_body_ends_the_connection(monkeypatch, length):
    """The client reads the error though it sends eight megabytes first. What it sends after that is
    no request.
    """
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + length + b"\r\n\r\n"
    chunks = b"%x\r\n%s\r\n" % (len(CHUNK), CHUNK) * 128
    hidden = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with serve_with_ids(refuse) as address:
        start = time.monotonic()
        response = exchange(address, head + chunks, hidden)
        check_error(response, 413)
        assert b"connection: close" in response.lower()
        assert response.count(b"HTTP/1.1") == 1
        check_error(exchange(address, head), 413)  # and sends nothing
        assert time.monotonic() - start < http11.LINGER_SECONDS
        monkeypatch.setattr(http11, "LINGER_SECONDS", 0.2)
        with pytest.raises(ConnectionError):
            send_forever(address, head, b"x", pause=0.05)
        monkeypatch.setattr(http11, "LINGER_SECONDS", 60)
        monkeypatch.setattr(http11, "MAX_LINGER_BYTES", 2**20)
        with pytest.raises(ConnectionError):
            send_forever(address, head, chunks)


def send_forever(address, head, part, pause=0.0):
    with socket.create_connection(address, timeout=10) as connection:
        connection.sendall(head)
        for _ in range(100):
            connection.sendall(part)
            time.sleep(pause)


def test_refused_short_body_keeps_the_connection():
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n"
    with serve_with_ids(refuse) as address:
        requests = head + b"\r\n{}", head + b"Connection: close\r\n\r\n{}"
        assert exchange(address, *requests).count(b"HTTP/1.1 413") == 2


def test_end_of_the_server_is_an_error_of_the_api(monkeypatch):
    """Of requests that are not finished in the time that connections have."""
    monkeypatch.setattr(lifecycle, "CLOSE_SECONDS", 0.2)
    app = WaitingApp()
    with ThreadPoolExecutor(1) as thread, serve_with_ids(app) as (host, port):
        call = thread.submit(httpx.post, f"http://{host}:{port}/v1/completions", json={})
        assert app.started.wait(10)
    assert (call.result().status_code, call.result().json()["error"]["code"]) == (503, "draining")


class ReadingApp:
    """Reads bodies before it responds."""

    async def __call__(self, scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})


@pytest.mark.parametrize("body", [b"zz\r\n", b"-1\r\n", b"3\r\nabcd\r\n0\r\n\r\n"])
def test_malformed_chunks(body):
    """They come while the application waits for the body."""
    with serve(ReadingApp()) as address:
        head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        check_error(exchange(address, head, body, pause=0.1), 400)


class WaitingApp:
    """Never responds, and notes that the client has left."""

    def __init__(self):
        self.started = threading.Event()
        self.ended = threading.Event()

    async def __call__(self, scope, receive, send):
        self.started.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        self.ended.set()


@pytest.mark.parametrize("num_waiting", [0, 1, 3])
def test_client_that_leaves_with_pipelined_requests(num_waiting):
    """The requests that wait for the first response do not hide the end of the connection."""
    app = WaitingApp()
    with serve(app) as address:
        with socket.create_connection(address) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * (1 + num_waiting))
            assert app.started.wait(10)
        assert app.ended.wait(10)


def test_pipelined_requests_have_responses_in_order():
    """More than the server reads ahead."""
    paths = [f"/{index}" for index in range(60)]
    requests = [
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{{}}" for path in paths
    ]

    async def echo_path(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        body = f"<{scope['path']}>".encode()
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    last = b"GET /end HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with serve(echo_path) as echo_address:
        received = exchange(echo_address, "".join(requests).encode() + last).decode()
    assert re.findall("<(.*?)>", received) == [*paths, "/end"]


@pytest.mark.parametrize("part", [1, 7, 1000])
def test_offered_protocol_is_ignored(monkeypatch, part):
    """Java's client offers HTTP/2 with each request. A parser that follows it drops the body."""
    monkeypatch.setattr(http11, "IDLE_SECONDS", 60)  # a busy machine sends single bytes slowly
    offer = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAA\r\n"
    chunks = "Transfer-Encoding: chunked\r\n\r\n2\r\na \r\n4\r\nbody\r\n0\r\n\r\n"

    async def echo_body(scope, receive, send):
        body, more = scope["method"].encode() + b":", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        headers = [(b"content-length", str(len(body) + 2).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"<" + body + b">"})

    requests = "".join(
        [
            f"POST / HTTP/1.1\r\nHost: x\r\n{offer}Content-Length: 6\r\n\r\na body",
            f"POST / HTTP/1.1\r\nHost: x\r\n{offer}{chunks}",
            f"GET / HTTP/1.1\r\nHost: x\r\n{offer}\r\n",
            "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
            f"POST / HTTP/1.1\r\nHost: x\r\n{offer}Content-Length: 0\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        ]
    ).encode()
    parts = [requests[start : start + part] for start in range(0, len(requests), part)]
    with serve(echo_body) as address:
        received = exchange(address, *parts).decode()
    assert re.findall("<(.*?)>", received) == [
        *("POST:a body", "POST:a body", "GET:", "POST:{}", "POST:", "GET:")
    ]


def test_client_that_does_not_read(monkeypatch):
    monkeypatch.setattr(http11, "STALL_SECONDS", 0.2)
    app = LargeApp()
    with serve(app) as address, socket.create_connection(address) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert app.ended.wait(15)


def test_client_that_reads_slowly_stays_connected(monkeypatch):
    monkeypatch.setattr(http11, "STALL_SECONDS", 0.5)
    app = LargeApp()
    with serve(app) as address, socket.socket() as connection:
        connection.settimeout(10)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**15)
        connection.connect(address)
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            connection.recv(2**16)
            time.sleep(0.002)
        assert not app.ended.is_set()
