"""Writers of metrics: each record of a step goes to all writers of the configuration.

`make_writers(config, …)` creates them and raises errors before training starts. Later a writer that
raises is dropped and logged: a full disk or a closed pipe must not end a run. Only one process of a
run has writers.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol, TextIO

from maxtext.common.log import LOGGER
from maxtext.configs.types import MaxTextConfig
from maxtext.diagnostics import weights_and_biases
from maxtext.diagnostics.console import Console
from maxtext.diagnostics.jsonl import JsonLines, metrics_path
from maxtext.diagnostics.record import TIMING, Record, to_record
from maxtext.diagnostics.tensorboard import EventFile, Prometheus

__all__ = ["TIMING", "Record", "Recorder", "Writer", "make_writers", "to_record"]


class Writer(Protocol):
    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class Recorder:
    """Passes each record to all writers. As a context manager it closes them, also after an
    exception.
    """

    def __init__(self, writers: Sequence[Writer]):
        self.writers = list(writers)

    def write(self, metrics: Mapping[str, object]) -> None:
        """Write metrics, which may be device scalars. Waits for them if there is a writer."""
        if not self.writers:
            return
        record = to_record(metrics)
        for writer in list(self.writers):
            try:
                writer.write(record)
            except Exception as error:  # training continues in any case
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
        except Exception as second:  # its first error has been logged
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
    devices: int = 1,
    shows_flops: bool = False,
    stream: TextIO | None = None,
    environ: Mapping[str, str] = os.environ,
) -> list[Writer]:
    """The writers of a run that starts or resumes at `first_step`.

    `devices`, `shows_flops` and `stream` (default: standard output) are those of the console.
    """
    if not is_writer:
        return []
    writers: list[Writer] = []
    with ExitStack() as on_failure:

        def add(writer: Writer) -> None:
            writers.append(writer)
            on_failure.callback(writer.close)

        # Writers that change existing files come last, so that an error leaves the files unchanged.
        if config.prometheus_port:
            add(Prometheus(config.prometheus_port))
        if weights_and_biases.is_enabled(config, environ):
            add(weights_and_biases.WeightsAndBiases(config, environ))
        if config.enable_tensorboard:
            if not config.tensorboard_dir:
                raise ValueError(
                    "tensorboard_dir is computed by maxtext.config(); this configuration lacks it"
                )
            add(EventFile(config.tensorboard_dir, first_step, flush_every=config.log_period))
        add(JsonLines(metrics_path(config), first_step))
        add(
            Console(
                config.steps,
                devices,
                shows_flops=shows_flops,
                line_every=config.log_period,
                stream=stream,
            )
        )
        on_failure.pop_all()
    return writers
