"""Metrics for monitors: TensorBoard event files, written without a package, and Prometheus gauges.

`EventFile` writes scalars. tensorboardX imports torch if that is installed (two seconds of
start-up), and blocks its caller when its writer thread dies, for example on a full disk. A scalar
event is four protobuf fields in a checksummed frame: see tensorflow/core/util/event.proto,
framework/summary.proto and lib/io/record_writer.h. A failed write raises. Data is flushed every
`flush_every` steps and at the end.

`Prometheus` serves the latest value of each metric as a gauge maxtext_<name> over HTTP, on
prometheus_port. The server (prometheus_client, extra `prometheus`) listens on all interfaces,
because the scraper usually runs on another host. A gauge keeps its value until a record has a new
one. A value of None removes the gauge, since a stale value would mislead.
"""

import os
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from maxtext.common.crc32c import masked_crc32c
from maxtext.common.errors import ConfigError
from maxtext.common.extras import require
from maxtext.diagnostics.record import TIMING, Record

DOUBLE, BYTES, FLOAT = 1, 2, 5  # protobuf wire types; 0 is a varint
SESSION_START = b"\x08\x01"  # SessionLog.status = START


class EventFile:
    """A new event file in `folder`. With `first_step`, TensorBoard discards later steps of earlier
    files.
    """

    def __init__(self, folder: str | os.PathLike, first_step: int = 0, flush_every: int = 1):
        self.flush_every = flush_every
        # TensorBoard reads files in the order of their names, so the time comes first.
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.file = open(Path(folder) / name, "xb")  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise ConfigError(
                f"enable_tensorboard=true, but {folder} cannot be written: {error}"
            ) from error
        self.add(field(3, BYTES, b"brain.Event:2"))
        if first_step:
            self.add(varint(2 << 3) + varint(first_step) + field(7, BYTES, SESSION_START))
        self.file.flush()

    def write(self, record: Record) -> None:
        step = int(record["step"] or 0)
        values = b"".join(
            field(1, BYTES, field(1, BYTES, tag(name).encode()) + field(2, FLOAT, value))
            for name, value in record.items()
            if name != "step" and value is not None
        )
        if values:
            self.add(varint(2 << 3) + varint(step) + field(5, BYTES, values))
        if step % self.flush_every == 0:
            self.file.flush()

    def add(self, event: bytes) -> None:
        """Write a framed event: length, checksum of the length, event, checksum of the event."""
        event = field(1, DOUBLE, time.time()) + event
        length = struct.pack("<Q", len(event))
        self.file.write(length + checksum(length) + event + checksum(event))

    def close(self) -> None:
        self.file.close()


def tag(name: str) -> str:
    """The tag of a metric: in learning/, performance/ or eval/, unless its name has a group."""
    if "/" in name:
        return name
    if name in TIMING:
        return f"performance/{name}"
    return f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"learning/{name}"


def field(number: int, wire_type: int, value: bytes | float) -> bytes:
    """One protobuf field."""
    key = varint(number << 3 | wire_type)
    if isinstance(value, bytes):
        return key + varint(len(value)) + value
    if wire_type == FLOAT:
        if abs(value) != float("inf"):
            value = max(min(value, 3.4e38), -3.4e38)  # keeps NaN
        return key + struct.pack("<f", value)
    return key + struct.pack("<d", value)


def varint(number: int) -> bytes:
    """Seven bits per byte, lowest first; the high bit marks that more bytes follow."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def checksum(data: bytes) -> bytes:
    return struct.pack("<I", masked_crc32c(data))


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

    def collect(self) -> Iterator[object]:
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
