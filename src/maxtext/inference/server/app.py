"""The endpoints of the server, and its chat page.

`Endpoints` answers requests. `ChatPage` is the files of `page/` as one document, with a policy that
allows nothing else.
"""

import asyncio
import html
import json
import secrets
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import ParamSpec, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope

from maxtext.common.errors import UserError
from maxtext.common.log import LOGGER
from maxtext.common.types import Json
from maxtext.inference.errors import EngineError
from maxtext.inference.server.adapters import AdapterUpdates
from maxtext.inference.server.allowed_hosts import HostMiddleware, OriginMiddleware
from maxtext.inference.server.completions_writer import CompletionsWriter
from maxtext.inference.server.errors import NOT_FOUND, SERVER_ERROR, ApiError
from maxtext.inference.server.events import (
    CLIENT_CLOSED_REQUEST,
    ActiveRequest,
    EventStreamResponse,
    error_response,
    json_response,
    run_while_connected,
)
from maxtext.inference.server.metrics import ServerMetrics
from maxtext.inference.server.middleware import (
    CorsMiddleware,
    KeyMiddleware,
    RequestMiddleware,
)
from maxtext.inference.server.model import ServedModel
from maxtext.inference.server.protocol import (
    DetokenizeRequest,
    JsonBody,
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from maxtext.inference.server.request_parser import ApiRequest, RequestParser
from maxtext.inference.server.responses_writer import ResponsesWriter
from maxtext.inference.text.session import PreparedRequest

FILE = "index.html"
# Placeholders in the file, and what is filled in for every response.
PARTS = {"__STYLE__": "style.css", "__MARKDOWN__": "markdown.js", "__APP__": "app.js"}
NONCE, SERVER_INFO = "__NONCE__", "__SERVER__"
HEADERS = {
    "Cache-Control": "no-store",  # a nonce is for one response
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class ChatPage:
    """The page of a server. `server_info` is what the page must know before its first request:
    whether a key is needed, and the defaults of sampling.
    """

    def __init__(self, server_info: Json):
        folder = resources.files(__package__).joinpath("page")
        source = folder.joinpath(FILE).read_text(encoding="utf-8")
        for placeholder, name in PARTS.items():
            text = folder.joinpath(name).read_text(encoding="utf-8")
            source = source.replace(placeholder, f"\n{text}")
        self.template = source.replace(SERVER_INFO, html.escape(json.dumps(server_info)))

    async def respond(self, request: Request) -> Response:
        nonce = secrets.token_urlsafe(16)
        headers = {**HEADERS, "Content-Security-Policy": content_security_policy(nonce)}
        return Response(self.template.replace(NONCE, nonce), 200, headers, media_type="text/html")


def content_security_policy(nonce: str) -> str:
    """Only the script and the style with this nonce, and requests to this server alone."""
    return "; ".join(
        [
            "default-src 'none'",
            "connect-src 'self'",
            "img-src 'self' data: blob:",
            f"style-src 'self' 'nonce-{nonce}'",
            f"script-src 'nonce-{nonce}'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )


BODY_SECONDS = 30.0  # to receive a body
MAX_IGNORED_SHOWN = 20  # names of fields in a header
MAX_IGNORED_LOGGED = 1000
MAX_SHORT_BODY = 64 * 1024  # bytes; a longer body is parsed and tokenized by the long pool
NUM_SHORT_THREADS = 4
NUM_LONG_THREADS = 2
MAX_LONG_QUEUE = 64  # long requests that wait
NUM_GRAMMAR_THREADS = 16  # requests that wait for their grammars
RETRY_SECONDS = 5.0
RESULT = TypeVar("RESULT")
ARGS = ParamSpec("ARGS")


@dataclass(frozen=True)
class ServerOptions:
    api_keys: Sequence[str] = ()  # none: no key is needed
    cors_origins: Sequence[str] = ()
    allowed_hosts: Sequence[str] = ()  # names besides localhost and IP addresses; `*`: any
    own_hosts: Sequence[str] = ()  # further names that Host may have, but no origin of a page
    request_timeout: float = 600.0  # seconds from arrival to the last token; 0: no limit
    max_body: int = 4 * 2**20  # bytes
    max_logprobs: int = 20
    metrics_prefix: str = "maxtext"
    protect_metrics: bool = False
    strict_fields: bool = False
    log_requests: bool = False
    log_prompts: bool = False
    allows_tools: bool = True
    adapter_root: Path | None = None  # below which adapters may be loaded; None: no updates
    root_path: str = ""
    has_page: bool = True  # the chat page at /


class NamedRoute(Route):
    """Stores itself in the scope of a request, so that metrics are labelled by route."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child_scope = super().matches(scope)
        return match, {**child_scope, "route": self}


def build_app(model: ServedModel, options: ServerOptions) -> Starlette:
    """The ASGI application that serves a model."""
    app = Starlette()
    # A redirect to a path without a slash would name the scheme and host behind the proxy.
    app.router.redirect_slashes = False
    metrics = ServerMetrics(model.engine, model.names[0], options.metrics_prefix)
    endpoints = Endpoints(model, options, metrics)
    routes = endpoints.routes()
    if options.has_page:
        server_info = {
            "needs_key": bool(options.api_keys),
            "defaults": dict(model.sampling_defaults),
        }
        routes.append(("GET", "/", ChatPage(server_info).respond))
    # A route for GET also serves HEAD; the protocol leaves out the body.
    app.router.routes.extend(
        NamedRoute(path, endpoint, methods=[method]) for method, path, endpoint in routes
    )
    app.add_exception_handler(HTTPException, on_http_error)
    for kind in (ApiError, UserError):
        app.add_exception_handler(kind, endpoints.on_error)
    # The last that is added is the outermost.
    if options.api_keys:
        app.add_middleware(
            KeyMiddleware, keys=options.api_keys, protect_metrics=options.protect_metrics
        )
    app.add_middleware(
        OriginMiddleware,
        allowed_origins=options.cors_origins,
        allowed_hosts=options.allowed_hosts,
    )
    if options.cors_origins:
        app.add_middleware(
            CorsMiddleware,
            allow_origins=list(options.cors_origins),
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After", "X-Ignored-Fields", "X-Request-Id"],
        )
    hosts = (*options.allowed_hosts, *options.own_hosts)
    app.add_middleware(HostMiddleware, allowed_hosts=hosts)
    app.add_middleware(
        RequestMiddleware,
        engine=model.engine,
        metrics=metrics,
        log_requests=options.log_requests,
        root_path=options.root_path,
    )
    return app


async def on_http_error(request: Request, error: Exception) -> Response:
    """Errors of the routing: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    message = f"{request.method} {path}: {str(error.detail).lower()}"
    kind = NOT_FOUND if error.status_code == 404 else "invalid_request_error"
    headers = dict(error.headers or {})
    return error_response(ApiError(error.status_code, message[:300], kind, headers=headers))


class BoundedPool:
    """Threads with a queue of limited length."""

    def __init__(self, name: str, num_threads: int, max_queue: int):
        self.executor = ThreadPoolExecutor(num_threads, f"maxtext-{name}")
        self.capacity = num_threads + max_queue
        self.lock = threading.Lock()
        self.num_pending = 0  # calls that wait or run

    async def run(
        self, function: Callable[ARGS, RESULT], *args: ARGS.args, **kwargs: ARGS.kwargs
    ) -> RESULT:
        """The result of a call in one of the threads. Raises EngineError if the queue is full. A
        call that has not begun is dropped if the task that waits for it is cancelled.
        """
        with self.lock:
            if self.num_pending >= self.capacity:
                message = f"the queue is full: {self.num_pending} requests are being prepared"
                raise EngineError(message, "preparation_queue_full", RETRY_SECONDS)
            self.num_pending += 1
        future = self.executor.submit(function, *args, **kwargs)
        future.add_done_callback(self.on_done)
        return await asyncio.wrap_future(future)

    def on_done(self, future: Future[RESULT]) -> None:
        with self.lock:
            self.num_pending -= 1


class PreparationPools:
    """Long requests have few threads of their own, so that short ones do not wait for them; so do
    requests that wait for their grammars.
    """

    def __init__(self, capacity: int):
        """`capacity` is how many sequences the engine runs and queues."""
        self.short = BoundedPool("prepare", NUM_SHORT_THREADS, capacity)
        self.long = BoundedPool("prepare-long", NUM_LONG_THREADS, MAX_LONG_QUEUE)
        self.grammar = BoundedPool("prepare-grammar", NUM_GRAMMAR_THREADS, capacity)

    def for_size(self, num_bytes: int) -> BoundedPool:
        """The pool of a request whose body has so many bytes."""
        return self.long if num_bytes > MAX_SHORT_BODY else self.short


Endpoint = Callable[[Request], Awaitable[Response]]


class Endpoints:
    """Handlers of requests. Errors are exceptions, which `on_error` turns into responses; it is a
    coroutine, since starlette runs functions in threads.
    """

    def __init__(self, model: ServedModel, options: ServerOptions, metrics: ServerMetrics):
        self.model = model
        self.options = options
        self.metrics = metrics
        self.parser = RequestParser(
            model, options.max_logprobs, options.strict_fields, options.allows_tools
        )
        self.adapters = AdapterUpdates(model, options.adapter_root)
        self.ignored_fields: set[str] = set()  # that were logged
        self.pools = PreparationPools(model.engine.capacity)

    def routes(self) -> list[tuple[str, str, Endpoint]]:
        return [
            # The router tries them in this order.
            ("POST", "/v1/completions", self.complete),
            ("POST", "/v1/chat/completions", self.chat),
            ("POST", "/v1/responses", self.respond),
            ("GET", "/health", self.health),
            ("GET", "/ping", self.health),
            ("GET", "/version", self.version),
            ("GET", "/metrics", self.scrape),
            ("GET", "/v1/models", self.list_models),
            ("GET", "/v1/models/{name:path}", self.find_model),
            ("POST", "/v1/embeddings", self.embed),
            ("POST", "/v1/load_lora_adapter", self.load_adapter),
            ("POST", "/v1/unload_lora_adapter", self.unload_adapter),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
            ("GET", "/tokenizer_info", self.tokenizer_info),
        ]

    async def on_error(self, request: Request, error: Exception) -> Response:
        converted = ApiError.from_exception(error, request.state.request_id)
        if converted.status in (429, 503) and converted.code:
            self.metrics.count_rejected(converted.code)
        return error_response(converted)

    # State of the server.

    async def health(self, request: Request) -> Response:
        status = self.model.engine.status
        if status == "ready":
            compiling = self.model.engine.compilation.state
            return json_response({} if compiling is None else {"compiling": compiling})
        message = f"the server is {status}" if status == "draining" else "the engine has failed"
        headers = {"Retry-After": "1"}
        raise ApiError(503, message, SERVER_ERROR, code=status, headers=headers)

    async def version(self, request: Request) -> Response:
        return json_response({"version": metadata.version("maxtext")})

    async def scrape(self, request: Request) -> Response:
        text, content_type = self.metrics.render()
        return Response(text, media_type=content_type)

    async def list_models(self, request: Request) -> Response:
        cards = [self.model.card(name) for name in self.model.all_names()]
        return json_response({"object": "list", "data": cards})

    async def find_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self.model.find(name)
        return json_response(self.model.card(name))

    async def embed(self, request: Request) -> Response:
        raise ApiError(404, "this model generates text: it has no embeddings", NOT_FOUND)

    async def load_adapter(self, request: Request) -> Response:
        self.adapters.check_allowed()
        body, _ = await self.read_body(request)
        return json_response(await self.adapters.load(body.parse(LoadAdapterRequest)))

    async def unload_adapter(self, request: Request) -> Response:
        self.adapters.check_allowed()
        body, _ = await self.read_body(request)
        return json_response(await self.adapters.unload(body.parse(UnloadAdapterRequest)))

    # Generation.

    async def complete(self, request: Request) -> Response:
        return await self.generate(request, self.parser.completion, CompletionsWriter)

    async def chat(self, request: Request) -> Response:
        return await self.generate(request, self.parser.chat, CompletionsWriter)

    async def respond(self, request: Request) -> Response:
        return await self.generate(request, self.parser.responses, ResponsesWriter)

    async def generate(
        self,
        request: Request,
        parse: Callable[[JsonBody], ApiRequest],
        writer_type: type[CompletionsWriter] | type[ResponsesWriter],
    ) -> Response:
        self.model.engine.check_accepts(0)  # a draining server does not read bodies
        body, pool = await self.read_body(request)
        self.model.find(body.model)
        request.state.request_id = body.request_id or request.state.request_id
        parsed, prepared = await self.prepare(request.receive, body, pool, parse)
        self.log_request(request.state.request_id, parsed)
        timeout = self.options.request_timeout or None
        active = ActiveRequest(self.model.engine, prepared, self.metrics, timeout)
        self.metrics.count_choices(parsed.num_choices)
        writer = writer_type(self.model, parsed, active)
        headers = ignored_header(parsed.ignored_fields)
        if not parsed.stream:
            response = await run_while_connected(request.receive, writer.whole())
            return Response(response, headers=headers, media_type="application/json")

        def on_error(error: BaseException) -> ApiError:
            return ApiError.from_exception(error, request.state.request_id)

        return await EventStreamResponse(writer.events(), on_error, headers).start()

    async def prepare(
        self,
        receive: Receive,
        body: JsonBody,
        pool: BoundedPool,
        parse: Callable[[JsonBody], ApiRequest],
    ) -> tuple[ApiRequest, list[PreparedRequest]]:
        """The request of a body, and what the engine takes. Work that may take a while is left to
        `pool`, and to threads of its own if it waits for a grammar; it ends if the client leaves.
        """

        def prepare(parsed: ApiRequest) -> list[PreparedRequest]:
            return [self.model.engine.prepare(each) for each in parsed.requests]

        def parse_and_prepare() -> tuple[ApiRequest, list[PreparedRequest]]:
            parsed = parse(body)
            return parsed, [] if has_grammar(parsed) else prepare(parsed)

        if pool is not self.pools.short or body.has_long_preparation:
            parsed, prepared = await run_while_connected(receive, pool.run(parse_and_prepare))
        else:
            parsed, prepared = parse_and_prepare()
        if not prepared:
            prepared = await run_while_connected(receive, self.pools.grammar.run(prepare, parsed))
        return parsed, prepared

    def log_request(self, request_id: str, parsed: ApiRequest) -> None:
        """Log the prompts, if that is wanted, and names of fields that are ignored for the first
        time.
        """
        if self.options.log_prompts:
            for each in parsed.requests:
                text = self.model.tokenizer.decode([int(token) for token in each.prompt])
                LOGGER.info("%s prompt %s", request_id, json.dumps(text, ensure_ascii=False))
        names = [
            name for name in shown_names(parsed.ignored_fields) if name not in self.ignored_fields
        ]
        if names and len(self.ignored_fields) < MAX_IGNORED_LOGGED:
            self.ignored_fields.update(names)
            LOGGER.warning("ignoring unknown fields of requests: %s", ", ".join(names))

    # Tokens.

    async def tokenize(self, request: Request) -> Response:
        body, pool = await self.read_body(request)
        self.model.find(body.model)
        return await run_while_connected(request.receive, pool.run(self.tokenize_body, body))

    def tokenize_body(self, body: JsonBody) -> Response:
        request = body.parse(TokenizeRequest, self.options.strict_fields)
        adds_specials = request.add_special_tokens
        if request.prompt is not None:
            text = request.prompt
            adds_specials = adds_specials is not False
        else:
            text = self.parser.chat_text(request)
            adds_specials = adds_specials is True  # templates write them
        tokens = self.parser.encode(text, adds_specials)
        result = {"tokens": tokens, "count": len(tokens), "max_model_len": self.model.max_length}
        if request.return_token_strs:
            result["token_strs"] = [self.model.tokenizer.id_to_token(token) for token in tokens]
        return json_response(result, headers=ignored_header(request.ignored_fields))

    async def detokenize(self, request: Request) -> Response:
        body, pool = await self.read_body(request)
        self.model.find(body.model)
        return await run_while_connected(request.receive, pool.run(self.detokenize_body, body))

    def detokenize_body(self, body: JsonBody) -> Response:
        request = body.parse(DetokenizeRequest, self.options.strict_fields)
        self.model.check_token_range("tokens", request.tokens)
        text = self.model.tokenizer.decode(list(request.tokens))
        return json_response({"prompt": text}, headers=ignored_header(request.ignored_fields))

    async def tokenizer_info(self, request: Request) -> Response:
        specials = self.model.tokenizer.special_tokens
        template = self.model.chat_template
        names = ("bos_token", "eos_token", "pad_token")
        info: Json = {name: specials.get(name) for name in names}
        return json_response({**info, "chat_template": template and template.source})

    async def read_body(self, request: Request) -> tuple[JsonBody, BoundedPool]:
        """The JSON object of a request, and the threads for work on it. Raises ApiError if it is
        too large or does not come in BODY_SECONDS.
        """
        encoding = request.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise ApiError(415, f"the body has the encoding {encoding[:30]!r}: send plain JSON")
        limit = self.options.max_body
        too_large = ApiError(413, f"the body is larger than {limit} bytes, the limit of --max-body")
        length = request.headers.get("content-length", "")
        if length.isascii() and length.isdigit() and int(length[:20]) > limit:
            raise too_large
        data = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    data += part
                    if len(data) > limit:
                        raise too_large
        except TimeoutError as error:
            raise ApiError(408, f"the body did not come in {BODY_SECONDS:.0f} seconds") from error
        except ClientDisconnect as error:
            raise ApiError(CLIENT_CLOSED_REQUEST, "the client closed the connection") from error
        pool = self.pools.for_size(len(data))
        if pool is self.pools.short:
            return JsonBody.from_bytes(bytes(data)), pool
        parse = pool.run(JsonBody.from_bytes, bytes(data))
        return await run_while_connected(request.receive, parse), pool


def has_grammar(parsed: ApiRequest) -> bool:
    """Whether a grammar may have to be compiled, for a format or for a required call."""
    return any(each.params.structured_outputs is not None for each in parsed.requests)


def ignored_header(ignored_fields: Sequence[str]) -> dict[str, str]:
    names = ", ".join(shown_names(ignored_fields))
    return {"x-ignored-fields": names} if names else {}


def shown_names(ignored_fields: Sequence[str]) -> list[str]:
    """Names of ignored fields that can be shown in headers and logs."""
    names = (name[:60] for name in ignored_fields)
    return [name for name in names if name.isidentifier() and name.isascii()][:MAX_IGNORED_SHOWN]
