"""prometheus_port: the latest value of each metric as a gauge maxtext_<name> over HTTP.

The server (prometheus_client, extra `prometheus`) listens on all interfaces, because the scraper
usually runs on another host. A gauge keeps its value until a record has a new one. A value of None
removes the gauge, since a stale value would mislead.
"""

import re
import threading
from collections.abc import Iterator
from typing import Any

from maxtext.common.errors import ConfigError
from maxtext.common.extras import require
from maxtext.diagnostics.record import Record


class Prometheus:
    """Serves metrics until `close`. Raises MissingExtra without prometheus_client, ConfigError if
    the port is taken.
    """

    def __init__(self, port: int):
        feature = f"prometheus_port={port}"
        client = require("prometheus_client", feature)
        self.gauge_family = require("prometheus_client.core", feature).GaugeMetricFamily
        self.values: dict[str, float | int] = {}  # by gauge name
        self.lock = threading.Lock()
        registry = client.CollectorRegistry()  # not the global one, which has more metrics
        registry.register(self)
        try:
            self.server, self.thread = client.start_http_server(port, registry=registry)
        except OSError as error:
            raise ConfigError(
                f"prometheus_port={port} cannot be opened: {error.strerror}; "
                "choose another port, or 0 for none"
            ) from error

    def collect(self) -> Iterator[Any]:
        """The gauges, as prometheus_client asks for them at each scrape."""
        with self.lock:
            values = dict(self.values)
        for name, value in values.items():
            yield self.gauge_family(name, "Latest value recorded by the run.", value)

    def write(self, record: Record) -> None:
        with self.lock:
            for name, value in record.items():
                if value is None:
                    self.values.pop(gauge_name(name), None)
                else:
                    self.values[gauge_name(name)] = value

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def gauge_name(name: str) -> str:
    return "maxtext_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
