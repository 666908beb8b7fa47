"""A client of servers with OpenAI's API: names of models, and chats. It uses the standard library:
`maxtext chat --server` needs no extra, and httpx would add 0.15 s to its start.
"""

import contextlib
import http.client
import json
import socket
import ssl
from collections.abc import Generator, Iterator

from maxtext.common.errors import UserError
from maxtext.common.types import Json
from maxtext.diagnostics.load.client import Target

CONNECT_SECONDS = 10.0
READ_SECONDS = 600.0  # without a byte from the server
MAX_LINE = 2**24  # bytes of an event
MAX_ERROR = 2**16  # bytes of an error that are read
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


class ServerError(UserError):
    """A response that is an error, or none at all (status 0)."""

    def __init__(self, message: str, status: int = 0, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.code = code


class ApiClient:
    """Sends one request at a time to the server at `url`."""

    def __init__(self, url: str, target: Target):
        self.url = url
        self.target = target
        self.socket: socket.socket | None = None  # of the request that runs

    def model_names(self) -> list[str]:
        with self.open("GET", "/v1/models") as response:
            try:
                return [str(model["id"]) for model in json.load(response)["data"]]
            except (ValueError, LookupError, TypeError) as error:
                raise ServerError(f"{self.url} has no list of models at /v1/models") from error

    def stream_chat(self, body: Json) -> Generator[Json, None, None]:
        """The chunks of a chat completion. Closing the generator cancels the request. Raises
        ServerError, also for an error event and for a stream that ends too early.
        """
        content = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with self.open("POST", "/v1/chat/completions", content) as response:
            for data in read_events(response):
                try:
                    event = json.loads(data)
                except ValueError:
                    event = None
                if not isinstance(event, dict):
                    raise ServerError(f"{self.url} sent an event that is not a JSON object")
                if error := event.get("error"):
                    raise ServerError(error_message(error))
                yield event

    def abort(self) -> None:
        """End the request that runs; its thread, if it waits for data, raises ServerError."""
        if self.socket is not None:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def open(
        self, method: str, path: str, body: Json | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """A response with status 200."""
        target = self.target
        headers = {"Content-Type": "application/json"}
        if target.api_key is not None:
            headers["Authorization"] = f"Bearer {target.api_key}"
        kind = http.client.HTTPSConnection if target.tls else http.client.HTTPConnection
        connection = kind(target.host, target.port, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
            self.socket = connection.sock
            self.socket.settimeout(READ_SECONDS)
            data = None if body is None else json.dumps(body)
            connection.request(method, target.prefix + path, data, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise self.error_of(response)
            yield response
        except ssl.SSLCertVerificationError as error:
            raise ServerError(
                f"the certificate of {self.url} is not trusted ({error.verify_message}); "
                "SSL_CERT_FILE names a file of further authorities"
            ) from error
        except OSError as error:
            reason = error.strerror or str(error) or type(error).__name__
            raise ServerError(f"{self.url} cannot be reached: {lower_first(reason)}") from error
        except http.client.InvalidURL as error:
            raise ServerError(f"{self.url} is not a valid address") from error
        except http.client.HTTPException as error:
            raise ServerError(f"{self.url} does not speak HTTP ({type(error).__name__})") from error
        finally:
            self.socket = None
            connection.close()

    def error_of(self, response: http.client.HTTPResponse) -> ServerError:
        try:
            error = json.loads(response.read(MAX_ERROR))["error"]
        except (ValueError, LookupError, TypeError):
            error = None
        if response.status == 401:
            message = f"{self.url} needs another API key: --api-key KEY, or MAXTEXT_API_KEY"
        elif error is None:
            message = f"{self.url} answered with status {response.status}"
        else:
            message = error_message(error)
        if retry_after := response.headers.get("Retry-After"):
            message += f"; try again in {retry_after[:20]} s"
        code = error.get("code") if isinstance(error, dict) else None
        return ServerError(message, response.status, code)


def lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def error_message(error: object) -> str:
    """The message of an error object, on one line."""
    message = error.get("message") if isinstance(error, dict) else error
    return " ".join(str(message or "the server reported an error").split())[:500]


def read_events(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """The data of server-sent events, up to [DONE]."""
    while line := response.readline(MAX_LINE):
        if line.startswith(b"data:"):
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            yield data
    raise ServerError("the connection ended before the reply was complete")
