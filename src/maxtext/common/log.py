"""The package's logger: one line per event, formatted by rich on a terminal, with the process index
in a run of several processes.
"""

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Iterator

LOGGER = logging.getLogger("maxtext")


@functools.cache
def log_once(message: str) -> None:
    """Log a message the first time that it occurs in this process."""
    LOGGER.info(message)


def print_status(text: str) -> None:
    """Print lines to standard error. Like the logger, it goes on if the disk is full or nobody
    reads: a service does not end because of its log.
    """
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


class ProcessFilter(logging.Filter):
    """Adds `process_mark` to records: `[3/8] ` in a run of several processes, else empty."""

    def __init__(self, index: int, count: int):
        super().__init__()
        self.mark = f"[{index}/{count}] " if count > 1 else ""

    def filter(self, record: logging.LogRecord) -> bool:
        record.process_mark = self.mark
        return True


def configure(process_index: int = 0, process_count: int = 1, level: int = logging.INFO) -> None:
    """Set up the package's logger on standard error, replacing its handlers."""
    LOGGER.handlers[:] = [build_handler(process_index, process_count)]
    LOGGER.setLevel(level)
    LOGGER.propagate = False


def build_handler(process_index: int = 0, process_count: int = 1) -> logging.Handler:
    handler: logging.Handler
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        from rich.console import Console
        from rich.logging import RichHandler

        handler = RichHandler(
            console=Console(stderr=True), show_path=False, rich_tracebacks=False, markup=False
        )
        handler.setFormatter(logging.Formatter("%(process_mark)s%(message)s", datefmt="%H:%M:%S"))
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(
            OneLine("%(asctime)s %(levelname)s %(process_mark)s%(message)s", datefmt="%H:%M:%S")
        )
    handler.addFilter(ProcessFilter(process_index, process_count))
    return handler


class EarlyHandler(logging.Handler):
    """Writes warnings in the format of the log before `configure`."""

    def emit(self, record: logging.LogRecord) -> None:
        build_handler().handle(record)  # rich is imported for a warning only


@contextlib.contextmanager
def early_warnings() -> Iterator[None]:
    """Warnings inside the block have the format of the log, if nothing is configured yet."""
    early = EarlyHandler(logging.WARNING)
    if not LOGGER.handlers:
        LOGGER.addHandler(early)
    try:
        yield
    finally:
        LOGGER.removeHandler(early)


class OneLine(logging.Formatter):
    """Joins the lines of a message, so that a log can be searched and sorted."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).replace("\n", " | ")


@contextlib.contextmanager
def silent_stderr() -> Iterator[None]:
    """Discard everything written to file descriptor 2, also by native libraries."""
    sys.stderr.flush()
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
