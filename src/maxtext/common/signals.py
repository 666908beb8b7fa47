"""SIGINT, SIGTERM and SIGHUP: an end that nothing can swallow, or a request to something that runs.

`ending_signals` is for a whole command: a signal raises `Interrupted` in the main thread. Python
may lose such an exception (one that is raised inside a garbage-collection callback is only printed)
or raise it late (the main thread compiles a program in C++ for minutes). A watchdog thread
therefore hears of each signal at once, raises it again where it was lost, and ends the process if
the main thread does not come back from C++, or at a second signal. Inside an import, where an
exception can crash an extension module, the process ends at once.

`asked_by_signals` is for a loop inside such a command that wants to finish its work first.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NAMES = tuple(number.name for number in SIGNALS)
LOOK_SECONDS = 0.1
STUCK_SECONDS = 3.0  # the main thread did not run a line of Python for so long
LAST_SECONDS = 0.5  # from a second signal to the end


class Interrupted(KeyboardInterrupt):
    """A signal asked this process to end."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


def exit_code(number: int) -> int:
    """The exit code that shells report for a process that signal `number` ended."""
    return 128 + number


def exit_code_of(error: BaseException) -> int:
    return exit_code(error.number if isinstance(error, Interrupted) else signal.SIGINT)


def catchable() -> tuple[signal.Signals, ...]:
    """SIGNALS without a SIGHUP that `nohup` told this process to ignore."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in SIGNALS if number != signal.SIGHUP or not ignored)


@contextlib.contextmanager
def handlers(handler: Callable[[int, Any], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in catchable()}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextlib.contextmanager
def asked_by_signals(ask: Callable[[int], None]) -> Iterator[None]:
    """Calls `ask` with the number of a signal. Outside of the main thread, which alone may set
    handlers, never.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with handlers(lambda number, frame: ask(number)):
        yield


_WATCHDOG: "Watchdog | None" = None


@contextlib.contextmanager
def ending_signals() -> Iterator[None]:
    """The first signal raises Interrupted in the main thread; the second ends the process. The
    watchdog thread lives as long as the block."""
    global _WATCHDOG
    if threading.current_thread() is not threading.main_thread() or _WATCHDOG is not None:
        yield
        return
    watchdog = _WATCHDOG = Watchdog()
    try:
        with watchdog, handlers(watchdog.on_signal):
            yield
    finally:
        _WATCHDOG = None


def pending() -> "Interrupted | None":
    """The interrupt that was raised in this command and that nobody consumed, whatever became of
    it.
    """
    return None if _WATCHDOG is None else _WATCHDOG.raised


def consume() -> None:
    """For code that catches KeyboardInterrupt and goes on: the interrupt is dealt with."""
    if _WATCHDOG is not None:
        _WATCHDOG.forget()


def interrupt_at_once(number: int) -> NoReturn:
    """For a handler of `asked_by_signals` that was asked again: raises Interrupted, and a command
    ends soon, even if its cleanup would take longer."""
    if _WATCHDOG is not None:
        _WATCHDOG.raised, _WATCHDOG.count = Interrupted(number), 2
        threading.Thread(target=_WATCHDOG.end, args=(number, LAST_SECONDS), daemon=True).start()
    raise Interrupted(number)


class Watchdog:
    """Ends a process that a signal asked to end and that does not."""

    def __init__(self) -> None:
        self.raised: Interrupted | None = None
        self.count = 0  # signals that came and were not consumed
        self.main = threading.main_thread().ident
        self.closed = threading.Event()

    def on_signal(self, number: int, frame: Any) -> None:
        if importing(frame):
            leave(number)
        self.raised = Interrupted(number)
        raise self.raised

    def forget(self) -> None:
        self.raised, self.count = None, 0

    def __enter__(self) -> "Watchdog":
        self.source, self.sink = os.pipe()
        os.set_blocking(self.sink, False)
        self.wakeup = signal.set_wakeup_fd(self.sink, warn_on_full_buffer=False)
        self.hook, sys.unraisablehook = sys.unraisablehook, self.on_unraisable
        self.thread = threading.Thread(target=self.work, name="maxtext-watchdog", daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.closed.set()
        sys.unraisablehook = self.hook
        signal.set_wakeup_fd(self.wakeup)
        os.close(self.sink)  # the thread reads the end of the pipe
        self.thread.join()
        os.close(self.source)

    def on_unraisable(self, details: Any) -> None:
        """An interrupt inside a callback is raised again by the thread, so nothing is printed."""
        if not isinstance(details.exc_value, Interrupted):
            self.hook(details)

    def work(self) -> None:
        while numbers := os.read(self.source, 1):
            number = numbers[0]
            if number not in SIGNALS or signal.getsignal(number) != self.on_signal:
                continue  # whoever replaced the handler deals with it
            self.count += 1
            if self.count == 1:
                threading.Thread(target=self.follow, args=(number,), daemon=True).start()
            else:
                self.end(number, LAST_SECONDS)

    def follow(self, number: int) -> None:
        """Until the command has ended."""
        began = time.monotonic()
        while not self.closed.wait(LOOK_SECONDS) and self.count:
            if self.raised is None:
                if time.monotonic() - began > STUCK_SECONDS:
                    self.end(number)
            elif not self.unwinding():
                self.raised, began = None, time.monotonic()
                self.count = 0  # of what follows, this is the first
                assert self.main is not None
                signal.pthread_kill(self.main, number)
                return

    def unwinding(self) -> bool:
        """Whether the main thread runs the cleanup of the interrupt that was raised."""
        active: Any = sys._current_exceptions().get(self.main)  # type: ignore[arg-type]
        error = active[1] if isinstance(active, tuple) else active  # Python 3.11 gives a tuple
        for _ in range(100):  # a chain may be a circle
            if error is None or isinstance(error, KeyboardInterrupt):
                break
            error = error.__context__
        return isinstance(error, KeyboardInterrupt)

    def end(self, number: int, seconds: float = 0.0) -> None:
        """End the process after `seconds`, unless it has ended by then."""
        if self.closed.wait(seconds) or not self.count:
            return
        leave(number)


def importing(frame: Any) -> bool:
    """Whether a module is being imported: some extension modules crash if an exception interrupts
    that.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def leave(number: int) -> NoReturn:
    """End the process, without any cleanup."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        os.write(2, b"\r\x1b[Kinterrupted\n" if os.isatty(2) else b"interrupted\n")
    os._exit(exit_code(number))
