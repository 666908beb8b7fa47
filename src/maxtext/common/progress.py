"""A spinner on the terminal: `⠋ loading the model`, with the elapsed seconds after a while.

It is drawn on standard error, and erases itself before the first text that is written to standard
output or standard error. Nothing is shown if standard error is not a terminal. This module imports
only the standard library, so that the spinner can start before slow imports.
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
SHOW_SECONDS_AFTER = 3
CLEAR = "\r\x1b[K"

_ACTIVE: "Spinner | None" = None
_STATUS = ""


@contextlib.contextmanager
def working(text: str) -> Iterator[None]:
    """Show `text` while the block runs, until something is written. A nested block replaces the
    text.
    """
    start(text)
    try:
        yield
    finally:
        stop()


def start(text: str) -> None:
    """Show `text` from now on, instead of an earlier one."""
    global _ACTIVE
    stop()
    if sys.stderr is None or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        return
    _ACTIVE = Spinner(text)


def report(text: str) -> None:
    """Say in `status` what the process is doing."""
    global _STATUS
    _STATUS = text


def status() -> str:
    """The last report of the process, such as "warm-up 3 of 12"; empty: none."""
    return _STATUS


def stop() -> None:
    global _ACTIVE
    if _ACTIVE is not None:
        _ACTIVE.stop()
        _ACTIVE = None


class Spinner:
    """A thread that draws a line, and replacements of sys.stdout and sys.stderr that stop it
    before they write.
    """

    def __init__(self, text: str):
        self.text = text
        self.terminal = sys.stderr
        self.start_time = time.monotonic()
        self.frames = (
            FRAMES if (self.terminal.encoding or "").lower().startswith("utf") else "|/-\\"
        )
        self.streams = {
            name: StoppingStream(getattr(sys, name), self) for name in ("stdout", "stderr")
        }
        for name, stream in self.streams.items():
            setattr(sys, name, stream)
        self.stopped = threading.Event()
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=self.draw, name="maxtext-progress", daemon=True)
        self.thread.start()

    def draw(self) -> None:
        for frame in itertools.cycle(self.frames):
            seconds = int(time.monotonic() - self.start_time)
            with self.lock, contextlib.suppress(OSError, ValueError):  # the terminal may be gone
                if self.stopped.is_set():
                    return
                elapsed = f" ({seconds} s)" if seconds >= SHOW_SECONDS_AFTER else ""
                self.terminal.write(f"{CLEAR}{frame} {self.text}{elapsed}")
                self.terminal.flush()
            if self.stopped.wait(PERIOD_SECONDS):
                return

    def stop(self) -> None:
        with self.lock:
            if self.stopped.is_set():
                return
            self.stopped.set()
            for name, stream in self.streams.items():
                if getattr(sys, name) is stream:
                    setattr(sys, name, stream.stream)
            with contextlib.suppress(OSError, ValueError):
                self.terminal.write(CLEAR)
                self.terminal.flush()


class StoppingStream:
    """A stream that stops the spinner before it writes. It stays usable afterwards."""

    def __init__(self, stream: Any, spinner: Spinner):
        self.stream = stream
        self.spinner = spinner

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
