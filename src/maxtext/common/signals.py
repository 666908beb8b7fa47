"""SIGINT and SIGTERM as requests: what to do with them while something runs."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def asked_by_signals(ask: Callable[[int], None]) -> Iterator[None]:
    """`ask` is called with the number of a signal. Outside of the main thread, which alone may set handlers, never."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, frame: ask(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
