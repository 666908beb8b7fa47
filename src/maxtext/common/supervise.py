"""Several processes of this machine that live and die together. Knows nothing of JAX or models.

`Supervisor.run` starts one process a command, each in a session of its own (so that what it starts
can be ended with it), copies their lines to our own output behind `[index] `, and waits. It fails
fast: when one ends with another code than 0, the rest get SIGTERM, and SIGKILL after a grace time.
SIGINT, SIGTERM and SIGHUP to us are passed on, so that the processes can end well by themselves,
with the code of that signal or 0; after the grace time, or at the second signal, they are killed.
If we are killed in a way that leaves no time for anything, each process notices by the end of a
pipe (`die_with_launcher`).

One thread does all of it. It looks for dead processes every LOOK_SECONDS.
"""

import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from maxtext.common.log import LOGGER
from maxtext.common.signals import asked_by_signals, exit_code

LOOK_SECONDS = 0.05
SETTLE_SECONDS = 1.0  # after the first death, before the question who died first
FAILURE_GRACE_SECONDS = 5.0  # after a peer died the rest cannot go on; they get this long to end
LIFELINE = "MAXTEXT_LIFELINE"  # the file descriptor of a pipe that ends when the launcher does
COLOURS = (36, 33, 32, 35, 34, 31)


@dataclass(frozen=True)
class Command:
    words: Sequence[str]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Ended:
    """How a group ended: the first failing process's exit code (128 + N after signal N), who was
    lost by itself, and the signal that asked us to stop, if any."""

    code: int
    lost: tuple[int, ...] = ()
    asked: int | None = None


@dataclass
class Stream:
    """One output of one process, cut into lines."""

    source: IO[bytes]
    sink: IO[str]
    mark: str
    noise: re.Pattern[str] | None = None  # lines to leave out
    rest: bytes = b""

    def copy(self) -> bool:
        """Pass on the whole lines that came; False at the end, after the last line, whole or
        not.
        """
        piece = os.read(self.source.fileno(), 65536)
        *lines, self.rest = (self.rest + piece).split(b"\n")
        if not piece and self.rest:
            lines, self.rest = [*lines, self.rest], b""
        for line in (line.decode(errors="replace") for line in lines):
            if self.noise is None or not self.noise.match(line):
                self.sink.write(f"{self.mark}{line}\n")
        if lines:
            self.sink.flush()
        return bool(piece)


@dataclass
class Supervisor:
    commands: Sequence[Command]
    stop_grace: float = 60.0  # for a stop that was asked for: the current step and a save must fit
    failure_grace: float = FAILURE_GRACE_SECONDS
    noise: re.Pattern[str] | None = None  # lines of the processes that are not passed on
    processes: list[subprocess.Popen] = field(default_factory=list)
    asked: int | None = None
    times_asked: int = 0
    gone: set[int] = field(
        default_factory=set
    )  # processes that are dead, and what they started, too

    def run(self) -> Ended:
        selector = selectors.DefaultSelector()
        lifeline, ours = os.pipe()
        try:
            with asked_by_signals(self.ask):
                for index, command in enumerate(self.commands):
                    self.start(index, command, lifeline, selector)
                return self.watch(selector)
        finally:
            self.kill(signal.SIGKILL)
            self.reap()
            for end in (lifeline, ours):
                os.close(end)
            for key in list(selector.get_map().values()):
                key.data.source.close()
            selector.close()

    def start(
        self, index: int, command: Command, lifeline: int, selector: selectors.BaseSelector
    ) -> None:
        process = subprocess.Popen(
            command.words,
            env={**command.environment, LIFELINE: str(lifeline), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=(lifeline,),
        )
        self.processes.append(process)
        for source, sink in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            assert source is not None
            selector.register(
                source, selectors.EVENT_READ, Stream(source, sink, mark(index, sink), self.noise)
            )

    def watch(self, selector: selectors.BaseSelector) -> Ended:
        failed: tuple[int, ...] = ()
        code, passed_on, deadline = 0, 0, float("inf")
        while True:
            self.copy(selector, LOOK_SECONDS)
            codes = self.settled([process.poll() for process in self.processes])
            self.sweep(codes)
            if not failed and (failed := first_to_fall([self.unexpected(code) for code in codes])):
                code = shell_code(codes[failed[0]])
                LOGGER.warning(
                    "process %d %s: stopping the others", failed[0], how_it_ended(codes[failed[0]])
                )
                self.kill(signal.SIGTERM)
                deadline = min(deadline, time.monotonic() + self.failure_grace)
            if self.asked is not None and self.times_asked > passed_on:
                self.kill(signal.SIGKILL if passed_on else self.asked)
                passed_on = self.times_asked
                deadline = min(deadline, time.monotonic() + self.stop_grace)
            if None not in codes:
                self.copy_rest(selector)
                expected = [code for code in codes if code and not self.unexpected(code)]
                return Ended(code or max(expected, default=0), failed, self.asked)
            if time.monotonic() > deadline:
                self.kill(signal.SIGKILL)

    def unexpected(self, code: int | None) -> int | None:
        """An exit code, or 0 for the one of a process that ended by the signal that was passed on
        to it.
        """
        return 0 if self.asked is not None and code == exit_code(self.asked) else code

    def settled(self, codes: list[int | None]) -> list[int | None]:
        """Where one was just found dead by itself: how all are a moment later. The end of a killed
        process can take longer than that of a peer that noticed it."""
        if (
            any(codes[index] for index in range(len(codes)) if index not in self.gone)
            and None in codes
        ):
            until = time.monotonic() + SETTLE_SECONDS
            while None in codes and not struck(codes) and time.monotonic() < until:
                time.sleep(LOOK_SECONDS)
                codes = [process.poll() for process in self.processes]
        return codes

    def sweep(self, codes: Sequence[int | None]) -> None:
        """What a dead process started does not outlive it. Once: later its number may be
        another's.
        """
        for index, (process, code) in enumerate(zip(self.processes, codes, strict=True)):
            if code is not None and index not in self.gone:
                self.gone.add(index)
                signal_group(process.pid, signal.SIGKILL)

    def copy(self, selector: selectors.BaseSelector, seconds: float) -> bool:
        """Pass on what comes within the time; False when nothing did."""
        if not selector.get_map():
            time.sleep(seconds)
            return False
        ready = selector.select(seconds)
        for key, _ in ready:
            if not key.data.copy():
                selector.unregister(key.fileobj)
                key.data.source.close()
        return bool(ready)

    def copy_rest(self, selector: selectors.BaseSelector) -> None:
        """What the dead left in their pipes."""
        while selector.get_map() and self.copy(selector, LOOK_SECONDS):
            pass

    def kill(self, number: int) -> None:
        """A signal to each living process. To end well is its own affair; SIGKILL also ends what it
        started.
        """
        for index, process in enumerate(self.processes):
            if index not in self.gone:
                signal_group(
                    process.pid, number
                ) if number == signal.SIGKILL else process.send_signal(number)

    def reap(self) -> None:
        for process in self.processes:
            process.wait()

    def ask(self, number: int) -> None:
        self.asked = self.asked or number
        self.times_asked += 1


def first_to_fall(codes: Sequence[int | None]) -> tuple[int, ...]:
    """Of the processes that were found dead together, those that did not just follow another: a
    peer's death ends a process by an error of its own or by SIGABRT, hardly ever by another
    signal."""
    return struck(codes) or tuple(index for index, code in enumerate(codes) if code)[:1]


def struck(codes: Sequence[int | None]) -> tuple[int, ...]:
    return tuple(
        index for index, code in enumerate(codes) if code and code < 0 and code != -signal.SIGABRT
    )


def signal_group(leader: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def how_it_ended(code: int | None) -> str:
    return (
        f"was ended by {signal.Signals(-code).name}"
        if code is not None and code < 0
        else f"ended with code {code}"
    )


def shell_code(code: int | None) -> int:
    """As a shell says it: 128 + the signal's number."""
    return 0 if code is None else code if code >= 0 else 128 - code


def mark(index: int, sink: IO[str]) -> str:
    if sink.isatty():
        return f"\x1b[{COLOURS[index % len(COLOURS)]}m[{index}]\x1b[0m "
    return f"[{index}] "


def die_with_launcher(environ: MutableMapping[str, str]) -> None:
    """In a process that a Supervisor started: when that is gone, end this process and all that it
    started.
    """
    if LIFELINE not in environ:
        return
    lifeline = int(
        environ.pop(LIFELINE)
    )  # not for our children: there the number may be another file's

    def wait() -> None:
        with contextlib.suppress(OSError):
            os.read(
                lifeline, 1
            )  # nothing is ever written: this returns when the other end is closed
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, name="maxtext-lifeline", daemon=True).start()
