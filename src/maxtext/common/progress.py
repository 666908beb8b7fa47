"""A sign of life on a terminal while nothing else is written: `⠋ loading the model`, with the
seconds after a while.

It is on standard error, leaves no trace, and ends by itself with the first text that anyone writes
to standard output or standard error. Where standard error is no terminal, nothing is shown. Only
the standard library is imported, so that it can begin before the imports that take seconds.
"""

import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
PERIOD_SECONDS = 0.1
SECONDS_FROM = 3  # then the time is shown, too
CLEAR = "\r\x1b[K"

_ACTIVE: "Spinner | None" = None


@contextlib.contextmanager
def working(text: str) -> Iterator[None]:
    """Show `text` while the block runs, until something is written. In a block inside another the
    text changes.
    """
    start(text)
    try:
        yield
    finally:
        stop()


def start(text: str) -> None:
    """Show `text` from now on, in place of an earlier one."""
    global _ACTIVE
    stop()
    if sys.stderr is None or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        return
    _ACTIVE = Spinner(text)


def stop() -> None:
    global _ACTIVE
    if _ACTIVE is not None:
        _ACTIVE.stop()
        _ACTIVE = None


class Spinner:
    """A thread that draws one line, and streams in place of sys.stdout and sys.stderr that end it
    before they write.
    """

    def __init__(self, text: str):
        self.text, self.terminal, self.began = text, sys.stderr, time.monotonic()
        self.frames = (
            FRAMES if (self.terminal.encoding or "").lower().startswith("utf") else "|/-\\"
        )
        self.streams = {name: Announcing(getattr(sys, name), self) for name in ("stdout", "stderr")}
        for name, stream in self.streams.items():
            setattr(sys, name, stream)
        self.ended = threading.Event()
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=self.draw, name="maxtext-progress", daemon=True)
        self.thread.start()

    def draw(self) -> None:
        for frame in itertools.cycle(self.frames):
            seconds = int(time.monotonic() - self.began)
            with self.lock, contextlib.suppress(OSError, ValueError):  # the terminal may be gone
                if self.ended.is_set():
                    return
                after = f" ({seconds} s)" if seconds >= SECONDS_FROM else ""
                self.terminal.write(f"{CLEAR}{frame} {self.text}{after}")
                self.terminal.flush()
            if self.ended.wait(PERIOD_SECONDS):
                return

    def stop(self) -> None:
        with self.lock:
            if self.ended.is_set():
                return
            self.ended.set()
            for name, stream in self.streams.items():
                if getattr(sys, name) is stream:
                    setattr(sys, name, stream.stream)
            with contextlib.suppress(OSError, ValueError):
                self.terminal.write(CLEAR)
                self.terminal.flush()


class Announcing:
    """A stream that ends the spinner before its first text. Whoever kept it can go on using it."""

    def __init__(self, stream: Any, spinner: Spinner):
        self.stream, self.spinner = stream, spinner

    def write(self, text: str) -> int:
        if text:
            self.spinner.stop()
        return self.stream.write(text)

    def writelines(self, lines: Any) -> None:
        self.spinner.stop()
        self.stream.writelines(lines)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":  # bytes are written there
            self.spinner.stop()
        return getattr(self.stream, name)
