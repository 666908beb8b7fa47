"""ASGI middleware: the id of a request, API keys, CORS, and counts of responses.

It is plain ASGI, since starlette's `BaseHTTPMiddleware` would hide from a response that the client
has left.
"""

import asyncio
import hmac
from collections.abc import Sequence
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from maxtext.common.log import LOGGER
from maxtext.inference.async_engine import AsyncEngine
from maxtext.inference.server.errors import ApiError
from maxtext.inference.server.events import error_response
from maxtext.inference.server.metrics import ServerMetrics
from maxtext.inference.server.model import is_request_id, new_id

# Paths that need no key.
OPEN_PATHS = {"/", "/health", "/ping", "/version", "/metrics"}
MAX_PATH = 200  # characters of a path that the log shows
MAX_UNREAD = 64 * 1024  # bytes of a body, which are read even if the response is an error
MAX_STARTS = 8  # requests in one turn of the event loop


class RequestMiddleware:
    """Gives each request an id, in its state and in the header X-Request-Id of the response, and
    counts responses. An exception that reaches it becomes an error response, if none has begun; so
    does the end of the server. A response that comes before a large body has been read closes the
    connection.
    """

    def __init__(
        self,
        app: ASGIApp,
        engine: AsyncEngine,
        metrics: ServerMetrics,
        log_requests: bool = False,
        root_path: str = "",
    ):
        """`root_path` is a prefix that paths of requests may have."""
        self.app = app
        self.engine = engine
        self.metrics = metrics
        self.log_requests = log_requests
        self.root_path = root_path
        # Of a thousand requests that arrive together, few start in one turn of the event loop, so
        # that streams and /health go on meanwhile.
        self.start_slots = asyncio.Semaphore(MAX_STARTS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope["root_path"] = self.root_path
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if is_request_id(given) else new_id()
        state = scope.setdefault("state", {})
        state["request_id"] = request_id  # the field request_id of a body may replace it
        status = 0
        has_rest = has_large_body(headers)

        async def receive_body() -> Message:
            nonlocal has_rest
            message = await receive()
            has_rest = has_rest and message.get("more_body", False)
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                response_headers = MutableHeaders(scope=message)
                response_headers["X-Request-Id"] = state["request_id"]
                if has_rest:
                    response_headers["Connection"] = "close"
            await send(message)

        try:
            if scope["method"] == "POST":
                with self.engine.arrival():
                    async with self.start_slots:
                        await asyncio.sleep(0)
            await self.app(scope, receive_body, send_with_id)
        except Exception as error:
            response = error_response(ApiError.from_exception(error, state["request_id"]))
            if not status:
                await response(scope, receive, send_with_id)
        except asyncio.CancelledError:  # the server ends
            if not status:
                draining = AsyncEngine.draining_error()
                response = error_response(ApiError.from_exception(draining, state["request_id"]))
                await response(scope, receive, send_with_id)
            raise
        finally:
            path = getattr(scope.get("route"), "path", "other")
            self.metrics.count_http(path, status)
            if self.log_requests:
                shown = quote(scope["path"], safe="/:@.-_~")[:MAX_PATH]
                LOGGER.info("%s %s %s %d", state["request_id"], scope["method"], shown, status)


def has_large_body(headers: Headers) -> bool:
    """Whether the body of a request may have more than MAX_UNREAD bytes."""
    length = headers.get("content-length", "0")
    is_small = length.isascii() and length.isdigit() and int(length[:20]) <= MAX_UNREAD
    return not is_small or "transfer-encoding" in headers


class CorsMiddleware(CORSMiddleware):
    """Refuses preflight requests in the envelope of all errors."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        text = bytes(response.body).decode()
        error = error_response(ApiError(response.status_code, f"{text[:1].lower()}{text[1:]}"))
        for name, value in response.headers.items():
            if name not in ("content-length", "content-type"):
                error.headers[name] = value
        return error


class KeyMiddleware:
    """Refuses requests without one of the keys, except for OPEN_PATHS. A key is a bearer token or
    the header x-api-key.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], protect_metrics: bool = False):
        self.app = app
        self.keys = [key.encode() for key in keys]
        self.open_paths = OPEN_PATHS - ({"/metrics"} if protect_metrics else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or route_path(scope) in self.open_paths
        if not is_open and not self.has_key(Headers(scope=scope)):
            error = ApiError(
                401,
                "give one of the server's API keys: Authorization: Bearer KEY",
                "authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error_response(error)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def has_key(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else ""
        given = given or headers.get("x-api-key", "")
        data = given.encode("latin-1", "replace")
        # Every key is compared, so that the time does not tell which one is right.
        matches = [hmac.compare_digest(data, key) for key in self.keys]
        return bool(given) and any(matches)


def route_path(scope: Scope) -> str:
    """The path that is routed: without the root path, where it has this prefix."""
    root = scope.get("root_path", "")
    path = scope["path"]
    return path.removeprefix(root) if path.startswith(f"{root}/") else path
