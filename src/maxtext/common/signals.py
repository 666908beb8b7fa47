"""SIGINT, SIGTERM and SIGHUP: a reliable interrupt of a command, or a request to a loop to stop.

`interrupt_on_signals` is for a command: a signal raises `Interrupted` in the main thread. Python
may drop such an exception (one that is raised in a garbage-collection callback is only printed) or
raise it late (the main thread compiles a program in C++ for minutes). Therefore a watchdog thread
receives each signal at once, raises it again if it was dropped, and ends the process if the main
thread does not return from C++, or at a second signal. During an import, where an exception can
crash an extension module, the process ends at once.

`call_on_signals` is for a loop inside such a command that finishes its work first.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NAMES = tuple(number.name for number in SIGNALS)
POLL_SECONDS = 0.1
STUCK_SECONDS = 3.0  # without a line of Python in the main thread
EXIT_SECONDS = 0.5  # from a second signal to the end of the process


INTERRUPTED = "interrupted"
_CLEAN_EXITS: dict[int, str] = {}  # see `exit_cleanly_on`


class Interrupted(KeyboardInterrupt):
    """A signal requested the end of this process, with `exit_code` and `message`."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.exit_code = 0 if number in _CLEAN_EXITS else exit_code(number)
        self.message = _CLEAN_EXITS.get(number, INTERRUPTED)


def exit_code(number: int) -> int:
    """The exit code that shells report for a process ended by signal `number`."""
    return 128 + number


def exit_code_of(error: BaseException) -> int:
    return error.exit_code if isinstance(error, Interrupted) else exit_code(signal.SIGINT)


def message_of(error: BaseException) -> str:
    return error.message if isinstance(error, Interrupted) else INTERRUPTED


@contextlib.contextmanager
def exit_cleanly_on(number: int, message: str) -> Iterator[None]:
    """A signal `number` that interrupts the block ends the command with `message` and exit code 0:
    nothing is lost if it stops here.
    """
    _CLEAN_EXITS[number] = message
    try:
        yield
    finally:
        del _CLEAN_EXITS[number]


def starting_service() -> contextlib.AbstractContextManager[None]:
    """For a service that is not ready yet: supervisors also stop it with SIGTERM then, which is no
    failure.
    """
    return exit_cleanly_on(signal.SIGTERM, "stopped by SIGTERM while the model was loading")


def handled_signals() -> tuple[signal.Signals, ...]:
    """SIGNALS, without SIGHUP if `nohup` made this process ignore it."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in SIGNALS if number != signal.SIGHUP or not ignored)


@contextlib.contextmanager
def install_handler(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    previous_handlers = {number: signal.signal(number, handler) for number in handled_signals()}
    try:
        yield
    finally:
        for number, previous in previous_handlers.items():
            signal.signal(number, previous)


@contextlib.contextmanager
def call_on_signals(callback: Callable[[int], None]) -> Iterator[None]:
    """Call `callback` with the number of each signal.

    Has no effect outside of the main thread, because only that may set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with install_handler(lambda number, frame: callback(number)):
        yield


_WATCHDOG: "Watchdog | None" = None


@contextlib.contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """The first signal raises Interrupted in the main thread; the second ends the process.

    The watchdog thread lives as long as the block.
    """
    global _WATCHDOG
    if threading.current_thread() is not threading.main_thread() or _WATCHDOG is not None:
        yield
        return
    watchdog = _WATCHDOG = Watchdog()
    try:
        with watchdog, install_handler(watchdog.on_signal):
            yield
    finally:
        _WATCHDOG = None


def pending() -> "Interrupted | None":
    """The interrupt that was raised in this command and not consumed, even if it was dropped."""
    return None if _WATCHDOG is None else _WATCHDOG.raised


def consume() -> None:
    """Mark the interrupt as handled, in code that catches KeyboardInterrupt and continues."""
    if _WATCHDOG is not None:
        _WATCHDOG.reset()


def interrupt_now(number: int) -> NoReturn:
    """Raise Interrupted from a callback of `call_on_signals`, at the second signal.

    The command then ends within EXIT_SECONDS, even if its cleanup would take longer.
    """
    if _WATCHDOG is not None:
        _WATCHDOG.raised = Interrupted(number)
        _WATCHDOG.count = 2
        threading.Thread(target=_WATCHDOG.end, args=(number, EXIT_SECONDS), daemon=True).start()
    raise Interrupted(number)


class Watchdog:
    """Ends a process that does not end after a signal."""

    def __init__(self) -> None:
        self.raised: Interrupted | None = None
        self.count = 0  # signals that were received and not consumed
        self.main_thread = threading.main_thread().ident
        self.closed = threading.Event()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if is_importing(frame):
            exit_now(number)
        self.raised = Interrupted(number)
        raise self.raised

    def reset(self) -> None:
        self.raised = None
        self.count = 0

    def __enter__(self) -> "Watchdog":
        self.read_end, self.write_end = os.pipe()
        os.set_blocking(self.write_end, False)
        self.previous_fd = signal.set_wakeup_fd(self.write_end, warn_on_full_buffer=False)
        self.previous_hook = sys.unraisablehook
        sys.unraisablehook = self.on_unraisable
        self.thread = threading.Thread(target=self.watch, name="maxtext-watchdog", daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.closed.set()
        sys.unraisablehook = self.previous_hook
        signal.set_wakeup_fd(self.previous_fd)
        os.close(self.write_end)  # ends the thread's loop
        self.thread.join()
        os.close(self.read_end)

    def on_unraisable(self, details: Any) -> None:
        """Do not print an interrupt inside a callback: the watchdog raises it again."""
        if not isinstance(details.exc_value, Interrupted):
            self.previous_hook(details)

    def watch(self) -> None:
        """Read the numbers of signals until the block ends."""
        while data := os.read(self.read_end, 1):
            number = data[0]
            if number not in SIGNALS or signal.getsignal(number) != self.on_signal:
                continue  # another handler has replaced this one
            self.count += 1
            if self.count == 1:
                threading.Thread(target=self.follow, args=(number,), daemon=True).start()
            else:
                self.end(number, EXIT_SECONDS)

    def follow(self, number: int) -> None:
        """Watch the main thread after the first signal, until the command has ended."""
        start = time.monotonic()
        while not self.closed.wait(POLL_SECONDS) and self.count:
            if self.raised is None:
                if time.monotonic() - start > STUCK_SECONDS:
                    self.end(number)
            elif not self.unwinding():
                self.raised = None
                self.count = 0  # the signal below counts as the first
                assert self.main_thread is not None
                signal.pthread_kill(self.main_thread, number)
                return

    def unwinding(self) -> bool:
        """Whether the main thread handles the interrupt: it is in its exception context."""
        active: Any = sys._current_exceptions().get(self.main_thread)  # type: ignore[arg-type]
        error = active[1] if isinstance(active, tuple) else active  # Python 3.11 gives a tuple
        for _ in range(100):  # a chain of contexts may have a cycle
            if error is None or isinstance(error, KeyboardInterrupt):
                break
            error = error.__context__
        return isinstance(error, KeyboardInterrupt)

    def end(self, number: int, seconds: float = 0.0) -> None:
        """End the process after `seconds`, unless the block has ended by then."""
        if self.closed.wait(seconds) or not self.count:
            return
        exit_now(number)


def is_importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported: an exception would crash some extension modules."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def exit_now(number: int) -> NoReturn:
    """End the process without cleanup."""
    error = Interrupted(number)
    line = f"{error.message}\n".encode()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        os.write(2, b"\r\x1b[K" + line if os.isatty(2) else line)
    os._exit(error.exit_code)


def end_process(code: int) -> NoReturn:
    """End the process after its cleanup, without waiting for threads: one may be in C++ for
    minutes.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
