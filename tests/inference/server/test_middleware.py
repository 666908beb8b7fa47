"""Middleware around an application that responds with status 204 to everything."""

import asyncio
import contextlib
from types import SimpleNamespace

import httpx
import pytest

from maxtext.inference.server.middleware import (
    CrossSiteMiddleware,
    KeyMiddleware,
    RequestMiddleware,
)

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
    ],
)
def test_pages_of_other_sites_send_no_requests(method, headers, expected):
    app = CrossSiteMiddleware(application, [ORIGIN])
    assert status(app, method, "/v1/completions", **headers) == expected


def test_any_page_may_be_allowed():
    app = CrossSiteMiddleware(application, ["*"])
    headers = {"sec_fetch_site": "cross-site", "origin": "http://any.test"}
    assert status(app, "POST", "/v1/completions", **headers) == 204


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
