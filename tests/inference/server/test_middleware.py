"""Middleware around an application that responds with status 204 to everything."""

import asyncio
import contextlib
from types import SimpleNamespace

import httpx
import pytest

from maxtext.inference.server.allowed_hosts import HostMiddleware, OriginMiddleware
from maxtext.inference.server.middleware import KeyMiddleware, RequestMiddleware

ORIGIN = "https://chat.test"


async def application(scope, receive, send):
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


def status(app, method, path, **headers):
    """The status of a response; an underscore in the name of a header is a hyphen."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}

    async def request():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.request(method, path, headers=names)

    return asyncio.run(request()).status_code


@pytest.mark.parametrize(
    ("method", "headers", "expected"),
    [
        ("POST", {"sec_fetch_site": "cross-site", "origin": "http://evil.test"}, 403),
        ("POST", {"sec_fetch_site": "cross-site", "origin": "null"}, 403),
        ("POST", {"sec_fetch_site": "cross-site"}, 403),
        ("POST", {"sec_fetch_site": "same-site", "origin": "http://localhost:3000"}, 403),
        ("POST", {"sec_fetch_site": "cross-site", "origin": ORIGIN}, 204),
        ("POST", {"sec_fetch_site": "same-origin", "origin": "http://server"}, 204),
        ("POST", {"sec_fetch_site": "none"}, 204),
        ("POST", {}, 204),
        ("GET", {"sec_fetch_site": "cross-site"}, 204),  # a link to the chat page
        # Browsers leave Sec-Fetch-Site out of requests to http addresses of a LAN.
        ("POST", {"origin": "http://evil.test"}, 403),
        ("POST", {"origin": "null"}, 403),
        ("POST", {"origin": ""}, 403),
        ("POST", {"origin": "http://server"}, 204),
        ("POST", {"origin": "https://SERVER"}, 204),  # a proxy may end TLS
        ("POST", {"origin": "http://server:8001"}, 403),
        ("POST", {"origin": "http://server.evil.test"}, 403),
        ("POST", {"origin": "http://server@evil.test"}, 403),
        ("POST", {"origin": ORIGIN}, 204),
        ("GET", {"origin": "http://evil.test"}, 403),
        ("DELETE", {"origin": "http://evil.test"}, 403),
        ("POST", {"origin": "http://server:8001", "host": "server:8001"}, 204),
        ("POST", {"origin": "http://[::1]:8001", "host": "[::1]:8001"}, 204),
        # A proxy that strips a prefix passes its own name or the address of this server as Host.
        ("POST", {"origin": "https://proxy.test", "host": "proxy.test"}, 204),
        ("POST", {"origin": "https://proxy.test", "host": "127.0.0.1:8000"}, 204),
        ("POST", {"origin": "https://proxy.test:9443", "host": "127.0.0.1:8000"}, 204),
        ("POST", {"origin": "https://proxy.test:7", "host": "127.0.0.1:8000"}, 403),
        ("POST", {"origin": "https://a.wild.test", "host": "127.0.0.1:8000"}, 204),
    ],
)
def test_pages_of_other_origins_send_no_requests(method, headers, expected):
    hosts = ["proxy.test", "proxy.test:9443", ".wild.test"]
    app = OriginMiddleware(application, [ORIGIN], hosts)
    assert status(app, method, "/v1/completions", **headers) == expected


def test_two_origins_are_refused():
    app = OriginMiddleware(application)
    headers = [("Origin", "http://server"), ("Origin", "http://evil.test")]

    async def request(headers):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.post("/v1/completions", headers=headers)

    assert asyncio.run(request(headers)).status_code == 403
    assert asyncio.run(request(headers[:1])).status_code == 204


def test_any_page_may_be_allowed():
    app = OriginMiddleware(application, ["*"])
    for origin in ("http://any.test", "null"):
        headers = {"sec_fetch_site": "cross-site", "origin": origin}
        assert status(app, "POST", "/v1/completions", **headers) == 204


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", 204),
        ("127.0.0.1:8000", 204),
        ("192.168.7.7:1", 204),  # no name, so no name server chose the address
        ("[::1]:8000", 204),
        ("[fe80::1%25eth0]:8000", 204),
        ("localhost", 204),
        ("LocalHost.:8000", 204),
        ("app.localhost:8000", 204),
        ("listened.test:8000", 204),
        ("sub.wild.test", 204),
        ("wild.test", 204),
        ("", 204),  # no browser sends it
        ("evil.test", 403),
        ("evil.test:8000", 403),
        ("127.0.0.1.evil.test", 403),
        ("localhost.evil.test", 403),
        ("evil-localhost.test", 403),
        ("gpu-box:8000", 204),
        ("x", 204),
        ("notwild.test", 403),
        ("listened.test.evil.test", 403),
        ("listened.test@evil.test", 403),
        ("evil.test#localhost", 403),
        ("evil.test\\.localhost", 403),
        ("evil.test,.localhost", 403),
        ("evil.test%2f.localhost", 403),
        ("..localhost", 403),
        (".", 403),
        ("localhost:8000:evil.test", 403),
        ("[::1", 403),
        ("::1", 403),
        ("1", 403),
        ("0x7f000001", 403),
    ],
)
def test_names_that_others_chose_are_refused(host, expected):
    """A name server that points a foreign name to this machine makes its page same-origin."""
    app = HostMiddleware(application, ["listened.test", ".wild.test"])
    for path in ("/", "/v1/models", "/metrics"):
        assert status(app, "GET", path, host=host) == expected
    assert status(app, "POST", "/v1/completions", host=host) == expected
    assert status(app, "GET", "/health", host=host) == 204  # of load balancers


def test_any_host_may_be_allowed():
    app = HostMiddleware(application, ["*"])
    assert status(app, "POST", "/v1/completions", host="any.test") == 204


@pytest.mark.parametrize("root_path", ["", "/pre"])
def test_open_paths_with_and_without_the_root_path(root_path):
    """A proxy may strip the prefix or not. Nothing else becomes open."""
    stubs = SimpleNamespace(arrival=contextlib.nullcontext, count_http=lambda *_: None)
    keyed = KeyMiddleware(application, ["key"])
    app = RequestMiddleware(keyed, stubs, stubs, root_path=root_path)
    open_paths = {"/health", "/metrics", f"{root_path}/health", f"{root_path}/metrics"}
    closed = {"/v1/models", "/pre", "/prehealth", "/pre/v1/models", "/pre/pre/health", "/x/health"}
    closed |= {"/pre/health", "/pre/metrics"} - open_paths
    for path in open_paths:
        assert status(app, "GET", path) == 204, path
    for path in closed:
        assert status(app, "GET", path) == 401, path
        assert status(app, "GET", path, authorization="Bearer key") == 204, path
