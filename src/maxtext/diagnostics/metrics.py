"""Where a run's numbers go: one record a step, given to every writer that the configuration asks
for.

`make_writers(config, …)` builds them; what cannot work fails there, before training. After that a
writer that raises is dropped with one log line: a full disk or a closed pipe must not end a month
of compute. Only one process of a run writes; on the others there are no writers and recording costs
nothing.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol, TextIO

from maxtext.common.log import LOGGER
from maxtext.configs.types import MaxTextConfig
from maxtext.diagnostics import weights_and_biases
from maxtext.diagnostics.console import Console
from maxtext.diagnostics.jsonl import JsonLines
from maxtext.diagnostics.prometheus import Prometheus
from maxtext.diagnostics.record import TIMING, Record, plain
from maxtext.diagnostics.tensorboard import EventFile

__all__ = ["TIMING", "Record", "Recorder", "Writer", "make_writers", "plain"]


class Writer(Protocol):
    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class Recorder:
    """Gives each record to all writers. As a context manager it closes them, so that a crash leaves
    whole files.
    """

    def __init__(self, writers: Sequence[Writer]):
        self.writers = list(writers)

    def write(self, values: Mapping[str, Any]) -> None:
        """`values` may hold device scalars; with a writer present, this waits for them."""
        if not self.writers:
            return
        record = plain(values)
        for writer in list(self.writers):
            try:
                writer.write(record)
            except Exception as error:  # whatever it is, training matters more
                self.drop(writer, error)

    def drop(self, writer: Writer, error: Exception) -> None:
        self.writers.remove(writer)
        LOGGER.error(
            "%s failed and writes no more: %s: %s",
            type(writer).__name__,
            type(error).__name__,
            error,
        )
        try:
            writer.close()
        except Exception as second:  # it is broken already, and that has been said
            LOGGER.debug("closing %s failed too: %s", type(writer).__name__, second)

    def close(self) -> None:
        while self.writers:
            writer = self.writers[-1]
            try:
                writer.close()
                self.writers.pop()
            except Exception as error:
                self.drop(writer, error)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def make_writers(
    config: MaxTextConfig,
    *,
    is_writer: bool = True,
    first_step: int = 0,
    peak_flops: float | None = None,
    peak_format: str = "bfloat16",
    stream: TextIO | None = None,
    environ: Mapping[str, str] = os.environ,
) -> list[Writer]:
    """The writers of a run that starts or resumes at `first_step`.

    `peak_flops` (FLOP/s of one device, None when unknown) is what `mfu` was divided by, and
    `peak_format` its number format: the console says both. `stream` is the console's, standard
    output unless given.
    """
    if not is_writer:
        return []
    writers: list[Writer] = []
    with ExitStack() as on_failure:

        def add(writer: Writer) -> None:
            writers.append(writer)
            on_failure.callback(writer.close)

        # What touches existing files comes late, so that a refused run leaves them as they were.
        if config.prometheus_port:
            add(Prometheus(config.prometheus_port))
        if weights_and_biases.wanted(environ):
            add(weights_and_biases.WeightsAndBiases(config))
        if config.enable_tensorboard:
            if not config.tensorboard_dir:
                raise ValueError(
                    "tensorboard_dir is computed by maxtext.config(); this configuration lacks it"
                )
            add(EventFile(config.tensorboard_dir, first_step, flush_every=config.log_period))
        if config.metrics_file:
            add(JsonLines(config.metrics_file, first_step))
        add(
            Console(
                config.steps, peak_flops, peak_format, line_every=config.log_period, stream=stream
            )
        )
        on_failure.pop_all()
    return writers
