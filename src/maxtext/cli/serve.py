"""`maxtext serve`: an OpenAI-compatible HTTP server for one model."""

import dataclasses
import json
import logging
import os
import re
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext.cli import arguments, positionals
from maxtext.cli.generation import (
    GenerationSession,
    ResolvedModel,
    load_session,
    model_path,
    refuse_useless,
    resolve_model,
)
from maxtext.cli.vllm_flags import take_vllm_flags
from maxtext.common import progress, signals
from maxtext.common.descriptors import raise_descriptor_limit
from maxtext.common.errors import ConfigError
from maxtext.common.extras import require
from maxtext.common.hub import model_name
from maxtext.common.log import LOGGER, print_status
from maxtext.configs.types import MaxTextConfig

if TYPE_CHECKING:
    from maxtext.inference.server.app import ServerOptions
    from maxtext.inference.server.lifecycle import HttpServer, Tls
    from maxtext.inference.server.model import ServedModel

ENGINE_SECONDS = (
    5.0  # for a step of the engine when the server ends; one that compiles may take more
)
KEY_VARIABLE = "MAXTEXT_API_KEY"
ALLOWED_HOST = re.compile(r"\*|(\.?[\w-]+(\.[\w-]+)*|\[[0-9a-f:]+\])(:[0-9]+)?", re.ASCII)
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@A-Z]+")  # of a page; browsers send lower case
PACKAGES = ("starlette", "uvicorn", "uvloop", "httptools", "prometheus_client")
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
    template_defaults: dict[str, Any]
    uses_generation_config: bool
    tool_parser: str | None  # None: by the chat template
    reasoning_parser: str | None
    adapters: dict[str, str]  # folders by name
    tls: "Tls"
    options: "ServerOptions"


def run(args: list[str]) -> int:
    with signals.starting_service():
        for package in PACKAGES:
            require(package, "maxtext serve")
        parsed = parse_arguments(args)
        parsed.tls.check()
        model = resolve_model(parsed.path, parsed.file, parsed.overrides)
        refuse_useless(model.config, "serve", USELESS)
        listener = open_listener(parsed)
    try:
        code, has_ended = serve(parsed, model, listener)
    finally:
        listener.close()
        if parsed.uds is not None:
            Path(parsed.uds).unlink(missing_ok=True)
    if not has_ended:
        LOGGER.warning("the engine is still compiling: the process ends without it")
        signals.end_process(code)
    return code


def open_listener(parsed: ServeArguments) -> socket.socket:
    from maxtext.inference.server.lifecycle import bind, bind_unix

    raise_descriptor_limit()
    return bind(parsed.host, parsed.port) if parsed.uds is None else bind_unix(parsed.uds)


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
    from maxtext.inference.parsers.reasoning import find_reasoning_parser
    from maxtext.inference.parsers.tool_calls import find_tool_parser
    from maxtext.inference.sampling_params import SamplingParams
    from maxtext.inference.server.model import ServedModel, read_sampling_defaults
    from maxtext.inference.server.request_parser import DEFAULT_TEMPERATURE
    from maxtext.tokenizers import chat_template

    template = chat_template(session.config, session.tokenizer)
    if template is not None:  # messages of errors name no path
        template = dataclasses.replace(template, origin="this model")
    source = "".join(template.sources) if template else ""
    defaults = read_sampling_defaults(session.llm) if parsed.uses_generation_config else {}
    if session.config.enable_model_warmup:  # loading warms up the sampling of the keys
        session.llm.warm_up(SamplingParams(**{"temperature": DEFAULT_TEMPERATURE} | defaults))
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


def parse_arguments(args: list[str]) -> ServeArguments:
    """Raises ConfigError for the first flag that is wrong."""
    from maxtext.inference.parsers import reasoning, tool_calls
    from maxtext.inference.server.lifecycle import Tls

    args = list(args)
    overrides_of_flags = take_vllm_flags(args)
    adapter = arguments.take_adapter(args)
    host = arguments.take_value(args, "--host")
    port = arguments.take_number(args, "--port", 0, 65535)
    uds = arguments.take_value(args, "--uds")
    if uds is not None and (host is not None or port is not None):
        raise ConfigError("--uds is in place of --host and --port: leave them out")
    tls = Tls(
        certificate=arguments.take_value(args, "--ssl-certfile"),
        key=arguments.take_value(args, "--ssl-keyfile"),
        authorities=arguments.take_value(args, "--ssl-ca-certs"),
    )
    names = arguments.take_values(args, "--served-model-name")
    max_queue = arguments.take_number(args, "--max-queue", 0)
    drain_timeout = arguments.take_number(args, "--drain-timeout", 0)
    source = arguments.take_option(args, "--generation-config", ("auto", "none", "vllm"))
    template_defaults = parse_template_defaults(
        arguments.take_value(args, "--default-chat-template-kwargs")
    )
    adapters = take_adapters(args, bool(adapter))
    tool_parser = arguments.take_option(args, "--tool-call-parser", tool_calls.PARSERS)
    reasoning_parser = arguments.take_option(args, "--reasoning-parser", reasoning.PARSERS)
    options = parse_options(args)
    allowed_hosts = tuple(take_allowed_hosts(args))
    file, overrides = positionals.split([*args, *overrides_of_flags], data=None, presets=False)
    path = model_path("maxtext serve MODEL [flags]", file, overrides)
    host = host or "127.0.0.1"
    if uds is None:
        allowed_hosts += listened_names(host)
    names = names or [model_name(path)]
    if taken := sorted(set(names) & set(adapters)):
        raise ConfigError(f"--lora {taken[0]}=… has the name of the model: give it its own")
    return ServeArguments(
        path=path,
        file=file,
        overrides=overrides + adapter,
        host=host,
        port=8000 if port is None else port,
        uds=uds,
        names=names,
        max_queue=1024 if max_queue is None else max_queue,
        drain_timeout=30.0 if drain_timeout is None else drain_timeout,
        template_defaults=template_defaults,
        uses_generation_config=source not in ("none", "vllm"),
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        adapters=adapters,
        tls=tls,
        # No browser reaches a unix socket, so names are the proxy's to check.
        options=dataclasses.replace(options, allowed_hosts=allowed_hosts or ("*",)),
    )


def parse_options(args: list[str]) -> "ServerOptions":
    from maxtext.inference.logprobs import MAX_LOGPROBS
    from maxtext.inference.server.app import ServerOptions

    numbers: dict[str, Any] = {
        "request_timeout": arguments.take_number(args, "--request-timeout", 0),
        "max_body": arguments.take_number(args, "--max-body", 1),
        "max_logprobs": arguments.take_number(args, "--max-logprobs", 0, MAX_LOGPROBS),
    }
    keys = arguments.take_values(args, "--api-key")
    if not keys and os.environ.get(KEY_VARIABLE):
        keys = [os.environ[KEY_VARIABLE]]
    if not all(key.isascii() and key.isprintable() and key.strip() == key for key in keys):
        raise ConfigError("an API key has characters that a header may not have")
    prefix = arguments.take_option(args, "--metrics-prefix", ("maxtext", "vllm"))
    return ServerOptions(
        api_keys=keys,
        cors_origins=take_origins(args),
        metrics_prefix=prefix or "maxtext",
        protect_metrics=arguments.take_flag(args, "--protect-metrics"),
        strict_fields=arguments.take_flag(args, "--strict-fields"),
        log_requests=arguments.take_flag(args, "--log-requests"),
        log_prompts=arguments.take_flag(args, "--log-prompts"),
        allows_tools=not arguments.take_flag(args, "--no-tools"),
        adapter_root=take_adapter_root(args),
        root_path=take_root_path(args),
        has_page=not arguments.take_flag(args, "--no-page"),
        **{name: value for name, value in numbers.items() if value is not None},
    )


def take_origins(args: list[str]) -> list[str]:
    """The origins of `--cors ORIGIN ...`, as browsers send them. Others would never match."""
    origins = arguments.take_values(args, "--cors")
    for origin in origins:
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"--cors takes origins such as https://chat.example:8443, without a path, not "
                f"{origin!r}"
            )
    return origins


def take_allowed_hosts(args: list[str]) -> list[str]:
    """The names of `--allowed-hosts NAME ...`, in lower case as browsers send them."""
    hosts = [host.lower() for host in arguments.take_values(args, "--allowed-hosts")]
    for host in hosts:
        if not ALLOWED_HOST.fullmatch(host):
            raise ConfigError(
                "--allowed-hosts takes names such as chat.example, .example for its subdomains, "
                f"chat.example:8443 for the origin of a page, or *, not {host!r}"
            )
    return hosts


def listened_names(host: str) -> tuple[str, ...]:
    """The names under which a server that listens on `host` is reached by default."""
    if is_loopback(host):
        return (host.lower(),)
    return host.lower(), socket.gethostname().lower()


def is_loopback(host: str) -> bool:
    return host in ("127.0.0.1", "::1", "localhost")


def take_root_path(args: list[str]) -> str:
    path = arguments.take_value(args, "--root-path") or ""
    if path and (not path.startswith("/") or path.endswith("/")):
        raise ConfigError(
            f"--root-path takes a path such as /model, with a slash at its beginning alone, not "
            f"{path!r}"
        )
    return path


def take_adapters(args: list[str], has_others: bool) -> dict[str, str]:
    """The folders of `--lora NAME=DIR ...` by name."""
    adapters: dict[str, str] = {}
    keys = MaxTextConfig.model_fields
    for text in arguments.take_values(args, "--lora", keys):
        name, _, folder = text.partition("=")
        if not name or not folder or name in adapters:
            raise ConfigError(f"--lora takes NAME=DIR with names of their own, not {text!r}")
        adapters[name] = folder
    if adapters and has_others:
        raise ConfigError("--adapter and --lora name the adapters in two ways: give one of them")
    return adapters


def take_adapter_root(args: list[str]) -> Path | None:
    """The folder below which requests may load adapters, if they may."""
    is_allowed = arguments.take_flag(args, "--allow-lora-updates")
    root = arguments.take_value(args, "--lora-root")
    if is_allowed != (root is not None):
        raise ConfigError("--allow-lora-updates and --lora-root go together: give both or neither")
    if root is None:
        return None
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"--lora-root {root} is no folder")
    return folder


def parse_template_defaults(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ConfigError(
            "--default-chat-template-kwargs takes a JSON object such as "
            f'{{"enable_thinking": false}}, not {text[:60]!r}'
        )
    from maxtext.tokenizers.chat import RESERVED_VARIABLES

    if names := sorted(RESERVED_VARIABLES.intersection(value)):
        raise ConfigError(f"--default-chat-template-kwargs may not set {names[0]}")
    return value
