"""The server as a thread, from a bound socket to the end of its last response."""

import asyncio
import contextlib
import os
import socket
import ssl
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from maxtext.common import progress
from maxtext.common.errors import ConfigError, UserError
from maxtext.common.extras import require
from maxtext.common.processes import freeze_objects
from maxtext.inference.server.errors import SERVER_ERROR, ApiError
from maxtext.inference.server.events import error_response

FEATURE = "maxtext serve"
POLL_SECONDS = 0.1
START_SECONDS = 30.0
BACKLOG = 2048  # connections that wait to be accepted
SWITCH_SECONDS = 0.0005
CLOSE_SECONDS = 5  # for connections that are open when the server ends


@dataclass(frozen=True)
class Tls:
    """Files of a certificate and its key; both or neither. With `authorities`, clients need a
    certificate of one of them.
    """

    certificate: str | None = None
    key: str | None = None
    authorities: str | None = None

    def check(self) -> None:
        """Raises ConfigError unless the files are there and fit each other."""
        self.context()

    def context(self) -> ssl.SSLContext | None:
        """None without a certificate; raises ConfigError as `check` does."""
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("--ssl-certfile and --ssl-keyfile go together: give both or neither")
        if self.certificate is None or self.key is None:
            if self.authorities is not None:
                raise ConfigError("--ssl-ca-certs needs --ssl-certfile and --ssl-keyfile")
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.key, self.refuse_password)
            if self.authorities is not None:
                context.load_verify_locations(self.authorities)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"the TLS files {self.certificate} and {self.key} cannot be used: {error}"
            ) from error
        return context

    def refuse_password(self) -> NoReturn:
        """A server that is started without a terminal could ask nobody."""
        raise ConfigError(
            f"the TLS key {self.key} is encrypted: decrypt it, for example with openssl pkey"
        )


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket that is bound, so that a port in use is an error before weights are loaded.
    Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{host}:{port} cannot be opened: {reason}") from error
    return listener


@contextlib.contextmanager
def unix_listener(path: str) -> Iterator[socket.socket]:
    """A unix socket that is bound. One at this path that nobody listens on is replaced; raises
    ConfigError for anything else at the path. In the end, the path is removed, unless it has become
    another file, such as the socket of the next server.
    """
    listener, file = bind_unix(path), Path(path)
    identity = file_identity(file)
    try:
        yield listener
    finally:
        with contextlib.suppress(OSError):
            if file_identity(file) == identity:
                file.unlink()
        listener.close()


def file_identity(file: Path) -> tuple[int, int, int]:
    """Differs between a file and a later one at its path, which may get the same inode."""
    status = file.lstat()
    return status.st_dev, status.st_ino, status.st_mtime_ns


def bind_unix(path: str) -> socket.socket:
    file = Path(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if file.exists():
            if not stat.S_ISSOCK(file.stat().st_mode):
                raise ConfigError(f"--uds {path}: there is a file that is no socket")
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                if client.connect_ex(path) == 0:
                    raise ConfigError(f"--uds {path}: another server listens there")
            file.unlink()
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--uds {path} cannot be opened: {error.strerror or str(error)}"
        ) from error
    except ConfigError:
        listener.close()
        raise
    return listener


class LoadingApp:
    """An ASGI application that can be served before its model is loaded: until `app` is set, every
    request gets status 503 with the code `loading` and what the process reports of its progress.
    """

    def __init__(self) -> None:
        self.app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            headers = {"Retry-After": "5"}
            status = progress.status()
            message = "the model is loading" + (f": {status}" if status else "")
            error = ApiError(503, message, SERVER_ERROR, code="loading", headers=headers)
            await error_response(error)(scope, receive, send)


class HttpServer:
    """Serves an ASGI application on a bound socket, in a thread with an event loop of its own."""

    def __init__(self, app: Any, listener: socket.socket, tls: Tls | None = None):
        self.uvloop = require("uvloop", FEATURE)
        require("httptools", FEATURE)
        self.app = app
        self.listener = listener
        self.tls_context = (tls or Tls()).context()
        self.has_started = threading.Event()
        self.should_end = threading.Event()
        self.thread = threading.Thread(target=self.run, name="maxtext-http", daemon=True)

    def run(self) -> None:
        with asyncio.Runner(loop_factory=self.uvloop.new_event_loop) as runner:
            runner.run(self.serve())

    async def serve(self) -> None:
        """Accept connections until the server should end, and give them CLOSE_SECONDS then. The
        runner cancels the tasks that remain.
        """
        from maxtext.inference.server.http11 import HEAD_SECONDS, HttpProtocol, ServerState

        state = ServerState(self.app)
        server = await asyncio.get_running_loop().create_server(
            lambda: HttpProtocol(state),
            sock=self.listener,
            ssl=self.tls_context,
            backlog=BACKLOG,
            ssl_handshake_timeout=None if self.tls_context is None else HEAD_SECONDS,
        )
        self.has_started.set()
        while not self.should_end.is_set():
            await asyncio.sleep(POLL_SECONDS)
        server.close()
        for connection in list(state.connections):
            connection.end()
        end = time.monotonic() + CLOSE_SECONDS
        while (state.connections or state.tasks) and time.monotonic() < end:
            await asyncio.sleep(POLL_SECONDS)

    def start(self) -> None:
        """Returns when connections are accepted."""
        self.thread.start()
        end = time.monotonic() + START_SECONDS
        while not self.has_started.wait(0.01):
            if not self.thread.is_alive() or time.monotonic() > end:
                raise UserError("the HTTP server did not start")

    def stop(self) -> None:
        """End the connections and the thread."""
        self.should_end.set()
        self.thread.join(2 * CLOSE_SECONDS)
        self.listener.close()


def wait_until_stopped(
    stop: threading.Event, is_healthy: Callable[[], bool], server: HttpServer
) -> bool:
    """Wait for `stop`; returns False if the engine or the HTTP server ended before."""
    while not stop.wait(POLL_SECONDS):
        if not is_healthy() or not server.thread.is_alive():
            return False
    return True


def tune_interpreter() -> None:
    """For a process that serves, once its model is loaded.

    The engine and HTTP share the interpreter: a thread that waits for it gets it after
    SWITCH_SECONDS instead of 5 ms, which each write to a socket might wait for. A text is
    tokenized in the thread of its request: in the library's own, a short one would wait for the
    long ones of others.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.setswitchinterval(SWITCH_SECONDS)
    freeze_objects()
