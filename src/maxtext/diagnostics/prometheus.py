"""prometheus_port: the last value of each number as a gauge maxtext_<name>, in Prometheus' text
format over HTTP.

The server listens on every interface of this host, since the scraper is usually another one, and it
only shows numbers. A gauge keeps its value until a record has a new one; None takes it away, since
a stale value would mislead.
"""

import math
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from maxtext.common.errors import ConfigError
from maxtext.diagnostics.record import Record

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Prometheus:
    def __init__(self, port: int):
        gauges: dict[str, float | int] = {}
        self.gauges = gauges
        lock = threading.Lock()
        self.lock = lock

        class Handler(BaseHTTPRequestHandler):
            timeout = 10  # seconds: a client that says nothing must not hold its thread for ever

            def do_GET(self) -> None:
                with lock:
                    body = exposition(gauges).encode()
                if self.path.split("?")[0] not in ("/", "/metrics"):
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """A line a scrape would drown the log."""

        try:
            self.server = ThreadingHTTPServer(("0.0.0.0", port), Handler)
        except OSError as error:
            raise ConfigError(
                f"prometheus_port={port} cannot be opened: {error.strerror}; choose another port, or 0 for none"
            ) from error
        self.server.daemon_threads = True
        threading.Thread(
            target=self.server.serve_forever, args=(0.1,), name="prometheus", daemon=True
        ).start()

    def write(self, record: Record) -> None:
        with self.lock:
            for name, value in record.items():
                if value is None:
                    self.gauges.pop(gauge_name(name), None)
                else:
                    self.gauges[gauge_name(name)] = value

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def gauge_name(name: str) -> str:
    return "maxtext_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)


def exposition(gauges: dict[str, float | int]) -> str:
    return "".join(
        f"# TYPE {name} gauge\n{name} {shown(value)}\n" for name, value in gauges.items()
    )


def shown(value: float | int) -> str:
    if math.isnan(value):
        return "NaN"
    return ("+Inf" if value > 0 else "-Inf") if math.isinf(value) else repr(value)
