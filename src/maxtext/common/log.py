"""One line an event: rich on a terminal, plain in a pipe, with the process index when there is more
than one.
"""

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Iterator

LOGGER = logging.getLogger("maxtext")


@functools.cache
def say_once(what: str) -> None:
    LOGGER.info(what)


class ProcessFilter(logging.Filter):
    """Marks each record with `[3/8] ` in a run of several processes, and with nothing in a run of
    one.
    """

    def __init__(self, index: int, count: int):
        super().__init__()
        self.mark = f"[{index}/{count}] " if count > 1 else ""

    def filter(self, record: logging.LogRecord) -> bool:
        record.process_mark = self.mark
        return True


def configure(process_index: int = 0, process_count: int = 1, level: int = logging.INFO) -> None:
    """Set up the package's logger on standard error. Calling it again replaces the earlier
    set-up.
    """
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
    LOGGER.handlers[:] = [handler]
    LOGGER.setLevel(level)
    LOGGER.propagate = False


class OneLine(logging.Formatter):
    """Keeps an event on one line, so that a log can be searched and sorted."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).replace("\n", " | ")


@contextlib.contextmanager
def silent_stderr() -> Iterator[None]:
    """Discards what is written to file descriptor 2, also by libraries that are not Python."""
    sys.stderr.flush()
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
