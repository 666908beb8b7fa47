"""`maxtext serve`: an OpenAI-compatible HTTP server for one model."""

import contextlib
import dataclasses
import logging
import socket
import threading
from typing import TYPE_CHECKING

from maxtext.cli import positionals
from maxtext.cli.arguments import Arguments
from maxtext.cli.generation import (
    GenerationSession,
    ResolvedModel,
    load_session,
    model_path,
    refuse_useless,
    resolve_model,
)
from maxtext.common import progress, signals
from maxtext.common.errors import ConfigError
from maxtext.common.extras import require
from maxtext.common.hub import model_name
from maxtext.common.log import LOGGER, print_status
from maxtext.common.processes import raise_descriptor_limit
from maxtext.common.types import Json

if TYPE_CHECKING:
    from maxtext.inference.server.app import ServerOptions
    from maxtext.inference.server.lifecycle import HttpServer, Tls
    from maxtext.inference.server.model import ServedModel

ENGINE_SECONDS = (
    5.0  # for a step of the engine when the server ends; one that compiles may take more
)
PACKAGES = ("starlette", "uvloop", "httptools", "prometheus_client")
USELESS = {
    "prompt": "requests have their own",
    "multi_sampling": "a request has n",
    "return_log_prob": "a request has logprobs",
    "autoregressive_decode_assert": "it is about the completion of `maxtext decode`",
}


@dataclasses.dataclass(frozen=True)
class ServeArguments:
    path: str  # of the model
    file: str | None  # of configuration
    overrides: list[str]
    host: str
    port: int
    uds: str | None
    names: list[str]
    max_queue: int
    drain_timeout: float
    template_defaults: Json
    uses_generation_config: bool
    tool_parser: str | None  # None: by the chat template
    reasoning_parser: str | None
    adapters: dict[str, str]  # folders by name
    tls: "Tls"
    options: "ServerOptions"


def run(arguments: Arguments) -> int:
    with contextlib.ExitStack() as stack:
        with signals.starting_service():
            for package in PACKAGES:
                require(package, "maxtext serve")
            parsed = read_arguments(arguments)
            parsed.tls.check()
            model = resolve_model(parsed.path, parsed.file, parsed.overrides)
            refuse_useless(model.config, "serve", USELESS)
            listener = stack.enter_context(open_listener(parsed))
        code, has_ended = serve(parsed, model, listener)
    if not has_ended:
        LOGGER.warning("the engine is still compiling: the process ends without it")
        signals.end_process(code)
    return code


def open_listener(
    parsed: ServeArguments,
) -> contextlib.AbstractContextManager[socket.socket]:
    from maxtext.inference.server.lifecycle import bind, unix_listener

    raise_descriptor_limit()
    return bind(parsed.host, parsed.port) if parsed.uds is None else unix_listener(parsed.uds)


def serve(
    parsed: ServeArguments, model: ResolvedModel, listener: socket.socket
) -> tuple[int, bool]:
    """Listen, load the model and serve it until a signal comes; returns the exit code, and whether
    the engine's thread has ended.
    """
    from maxtext.inference.server.app import build_app
    from maxtext.inference.server.lifecycle import HttpServer, LoadingApp, tune_interpreter

    app = LoadingApp()
    with signals.starting_service():
        server = HttpServer(app, listener, parsed.tls)
        server.start()  # probes see that the model is loading
    try:
        with signals.starting_service():
            session = load_session(model, adapters=parsed.adapters or None, log_level=logging.INFO)
            served = build_model(parsed, session)
            app.app = build_app(served, parsed.options)
            tune_interpreter()
        return serve_until_signal(parsed, served, server)
    finally:
        server.stop()


def serve_until_signal(
    parsed: ServeArguments, served: "ServedModel", server: "HttpServer"
) -> tuple[int, bool]:
    from maxtext.inference.server.lifecycle import wait_until_stopped

    stop = threading.Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            signals.interrupt_now(number)
        stop.set()

    with signals.call_on_signals(on_signal):
        progress.stop()
        print_ready(parsed, served, server.listener)
        is_clean = wait_until_stopped(stop, lambda: served.engine.status != "engine_failed", server)
        if is_clean:
            is_clean = served.engine.drain(parsed.drain_timeout)
        server.stop()
        has_ended = served.engine.close(ENGINE_SECONDS)
    return 0 if is_clean else 1, has_ended


def build_model(parsed: ServeArguments, session: GenerationSession) -> "ServedModel":
    from maxtext.inference.async_engine import AsyncEngine
    from maxtext.inference.sampling.params import SamplingParams
    from maxtext.inference.server.model import ServedModel, read_sampling_defaults
    from maxtext.inference.server.request_parser import DEFAULT_TEMPERATURE
    from maxtext.inference.text.parsers.reasoning import find_reasoning_parser
    from maxtext.inference.text.parsers.tool_calls import find_tool_parser
    from maxtext.tokenizers import chat_template

    template = chat_template(session.config, session.tokenizer)
    if template is not None:  # messages of errors name no path
        template = dataclasses.replace(template, origin="this model")
    source = "".join(template.sources) if template else ""
    defaults = read_sampling_defaults(session.llm) if parsed.uses_generation_config else {}
    if session.config.enable_model_warmup:  # loading warms up the sampling of the keys
        params = SamplingParams(temperature=DEFAULT_TEMPERATURE)
        session.llm.warm_up(dataclasses.replace(params, **defaults))
    return ServedModel(
        llm=session.llm,
        engine=AsyncEngine(session.llm, max_queue=parsed.max_queue),
        tokenizer=session.tokenizer,
        names=parsed.names,
        chat_template=template,
        template_defaults=parsed.template_defaults,
        sampling_defaults=defaults,
        tool_parser=parsed.tool_parser or find_tool_parser(source),
        reasoning_parser=parsed.reasoning_parser or find_reasoning_parser(source),
    )


def print_ready(parsed: ServeArguments, model: "ServedModel", listener: socket.socket) -> None:
    if parsed.uds is not None:
        address = f"unix:{parsed.uds}"
    else:
        scheme = "http" if parsed.tls.certificate is None else "https"
        address = f"{scheme}://{parsed.host}:{listener.getsockname()[1]}/v1"
    slots = model.engine.engine.cache_config.slots
    lines = [
        f"serving {parsed.names[0]} at {address} ({slots} at a time, {model.max_length} tokens "
        f"each, queue {parsed.max_queue})"
    ]
    if model.sampling_defaults:
        settings = ", ".join(f"{name}={value}" for name, value in model.sampling_defaults.items())
        lines.append(f"defaults of generation_config.json: {settings}")
    if parsed.options.has_page and parsed.uds is None:
        lines.append(f"chat page: {address.removesuffix('v1')}")
    is_local = parsed.uds is not None or is_loopback(parsed.host)
    if not is_local and not parsed.options.api_keys:
        lines.append(f"everybody who reaches {parsed.host} may use it: --api-key protects it")
    print_status("\n".join(lines))


def read_arguments(arguments: Arguments) -> ServeArguments:
    """Raises ConfigError for options that do not fit together."""
    from maxtext.inference.server.lifecycle import Tls

    tls = Tls(
        certificate=arguments["--ssl-certfile"],
        key=arguments["--ssl-keyfile"],
        authorities=arguments["--ssl-ca-certs"],
    )
    host, uds = arguments["--host"], arguments["--uds"]
    file, overrides = positionals.split(arguments.all_args, data=None, presets=False)
    path = model_path("maxtext serve MODEL [options]", file, overrides)
    names = arguments["--served-model-name"] or [model_name(path)]
    adapters = dict(arguments["--lora"])
    if len(adapters) < len(arguments["--lora"]):
        raise ConfigError("--lora takes NAME=DIR with names of their own: one is given twice")
    if taken := sorted(set(names) & set(adapters)):
        raise ConfigError(f"--lora {taken[0]}=… has the name of the model: give it its own")
    return ServeArguments(
        path=path,
        file=file,
        overrides=overrides,
        host=host,
        port=arguments["--port"],
        uds=uds,
        names=names,
        max_queue=arguments["--max-queue"],
        drain_timeout=arguments["--drain-timeout"],
        template_defaults=template_defaults(arguments),
        uses_generation_config=arguments["--generation-config"] not in ("none", "vllm"),
        tool_parser=parser_name(arguments["--tool-call-parser"]),
        reasoning_parser=parser_name(arguments["--reasoning-parser"]),
        adapters=adapters,
        tls=tls,
        options=server_options(arguments),
    )


def server_options(arguments: Arguments) -> "ServerOptions":
    from maxtext.inference.server.app import ServerOptions

    allowed_hosts = tuple(arguments["--allowed-hosts"])
    if arguments["--uds"] is None:
        own_hosts = listened_names(arguments["--host"])
    else:  # no browser reaches a unix socket, so names are the proxy's to check
        own_hosts = () if allowed_hosts else ("*",)
    root = arguments["--lora-root"] if arguments["--allow-lora-updates"] else None
    if root is not None and not root.is_dir():
        raise ConfigError(f"--lora-root {root} is no folder")
    return ServerOptions(
        api_keys=arguments["--api-key"],
        cors_origins=arguments["--cors"],
        allowed_hosts=allowed_hosts,
        own_hosts=own_hosts,
        request_timeout=arguments["--request-timeout"],
        max_body=arguments["--max-body"],
        max_logprobs=arguments["--max-logprobs"],
        metrics_prefix=arguments["--metrics-prefix"],
        protect_metrics=arguments["--protect-metrics"],
        strict_fields=arguments["--strict-fields"],
        log_requests=arguments["--log-requests"],
        log_prompts=arguments["--log-prompts"],
        allows_tools=not arguments["--no-tools"],
        adapter_root=root,
        root_path=arguments["--root-path"] or "",
        has_page=not arguments["--no-page"],
    )


def template_defaults(arguments: Arguments) -> Json:
    from maxtext.tokenizers.chat import RESERVED_VARIABLES

    variables = arguments["--default-chat-template-kwargs"] or {}
    if names := sorted(RESERVED_VARIABLES.intersection(variables)):
        raise ConfigError(f"--default-chat-template-kwargs may not set {names[0]}")
    return variables


def listened_names(host: str) -> tuple[str, ...]:
    """The names under which a server that listens on `host` is reached by default."""
    if is_loopback(host):
        return (host.lower(),)
    return host.lower(), socket.gethostname().lower()


def is_loopback(host: str) -> bool:
    return host in ("127.0.0.1", "::1", "localhost")


def parser_name(option: str | None) -> str | None:
    """The parser that an option names; harmony was called gpt_oss."""
    return "harmony" if option == "gpt_oss" else option
