"""ASGI middleware that keeps other people's pages from using a server through its users' browsers.

A browser sends a page's requests with the page's `Origin`, and with the `Host` of the address bar.
A page of another origin shows in `Origin`. A page whose name server points its name to this machine
(DNS rebinding) is of the same origin, and shows in `Host`.
"""

import ipaddress
import re
from collections.abc import Sequence
from functools import lru_cache

from starlette.datastructures import Headers
from starlette.types import Scope

from maxtext.inference.server.errors import ApiError
from maxtext.inference.server.events import Receive, Send, error_response
from maxtext.inference.server.middleware import ASGIApp, route_path

# A name, or an IPv6 address in brackets; and a port.
NETLOC = re.compile(
    r"(?P<name>\[[^\[\]@/?#\s]+\]|\.?[\w-]+(?:\.[\w-]+)*\.?)(?::(?P<port>\d{1,5}))?", re.ASCII
)
LABEL = re.compile(r"[a-z][a-z0-9_-]*", re.ASCII)  # a name without a dot
# Load balancers ask for them under any name, and a page learns nothing from them.
PROBE_PATHS = {"/health", "/ping"}
ANY = "*"
NUM_CACHED_HOSTS = 16  # which clients choose: few, since they may be long


class HostMiddleware:
    """Refuses requests whose Host is a name that somebody else may have registered: neither an IP
    address, nor a name without a dot such as localhost, nor one of `allowed_hosts`.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: Sequence[str] = ()):
        self.app = app
        self.allowed_hosts = tuple(allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or route_path(scope) in PROBE_PATHS
        host = "" if is_open else Headers(scope=scope).get("host", "")
        # HTTP/1.0 may have no Host; browsers send one.
        if not host or is_allowed_host(host, self.allowed_hosts):
            await self.app(scope, receive, send)
            return
        message = f"the host {host[:100]!r} is not allowed: --allowed-hosts names further ones"
        error = ApiError(403, message, "permission_error", code="host_not_allowed")
        await error_response(error)(scope, receive, send)


class OriginMiddleware:
    """Refuses requests of pages of other origins, except for `allowed_origins`. CORS keeps such a
    page from reading a response, but its browser sends a form or a plain text all the same.

    A page's own origin is the request's Host, or one of `allowed_hosts` behind a proxy that
    replaces Host. Requests without Origin are of other programs, or navigate to a page; where the
    browser says so in Sec-Fetch-Site, pages of other sites may only do the latter.
    """

    def __init__(
        self, app: ASGIApp, allowed_origins: Sequence[str] = (), allowed_hosts: Sequence[str] = ()
    ):
        self.app = app
        self.allowed_origins = allowed_origins
        self.allowed_hosts = [entry for entry in allowed_hosts if entry != ANY]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self.allows(scope["method"], Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        message = (
            "pages of other origins may not use this server: --cors names those that may, and "
            "--allowed-hosts the name of a proxy"
        )
        error = ApiError(403, message, "permission_error", code="origin_not_allowed")
        await error_response(error)(scope, receive, send)

    def allows(self, method: str, headers: Headers) -> bool:
        origin = headers.get("origin")
        if len(headers.getlist("origin")) > 1:  # no browser sends two
            return False
        if ANY in self.allowed_origins or origin in self.allowed_origins:
            return True
        if origin is None:
            is_foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site")
            return not is_foreign or method in ("GET", "HEAD", "OPTIONS")
        scheme, _, netloc = origin.lower().partition("://")
        # A proxy may end TLS, so schemes may differ.
        if scheme not in ("http", "https") or not NETLOC.fullmatch(netloc):
            return False
        if headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            return False
        is_own = netloc == headers.get("host", "").lower()
        return is_own or matches_entry(netloc, self.allowed_hosts, any_port=False)


@lru_cache(NUM_CACHED_HOSTS)
def is_allowed_host(host: str, allowed_hosts: tuple[str, ...]) -> bool:
    """Whether a Host is an IP address, a name without a dot, or one of `allowed_hosts`: `name`,
    `.name` with its subdomains, `*` for any.
    """
    if ANY in allowed_hosts:
        return True
    match = NETLOC.fullmatch(host.lower())
    if match is None:
        return False
    name = match["name"].removesuffix(".")
    # Nobody else can register a name without a dot; it is of this machine or of its network.
    if LABEL.fullmatch(name) or name.endswith(".localhost") or is_ip_address(name):
        return True
    return matches_entry(host.lower(), allowed_hosts, any_port=True)


def is_ip_address(name: str) -> bool:
    is_bracketed = name.startswith("[")
    try:
        address = ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return is_bracketed == (address.version == 6)


def matches_entry(netloc: str, entries: Sequence[str], any_port: bool) -> bool:
    """Whether `name` or `name:port` is one of the entries. With `any_port`, only names count;
    without, an entry without a port is the default port of a scheme.
    """
    name, port = split_netloc(netloc)
    for entry in entries:
        entry_name, entry_port = split_netloc(entry)
        if not any_port and entry_port != port:
            continue
        is_domain = entry_name.startswith(".")
        if name == entry_name or (is_domain and f".{name}".endswith(entry_name)):
            return True
    return False


def split_netloc(netloc: str) -> tuple[str, str]:
    """(name without a final dot, port or an empty text)."""
    match = NETLOC.fullmatch(netloc)
    return (match["name"].removesuffix("."), match["port"] or "") if match else ("", "")
