"""A group of local processes that start and end together. Knows nothing of JAX or models.

`Supervisor.run` starts one process per command, each in its own session (so that its children can
be killed with it), copies their output with the prefix `[index] `, and waits. It fails fast: when a
process exits with a code other than 0, the others get SIGTERM, and SIGKILL after a grace period.
SIGINT, SIGTERM and SIGHUP are forwarded, so that the processes can shut down on their own, with the
exit code of that signal or 0; after the grace period, or at a second signal, they are killed. If
the supervisor itself is killed, each process notices that a pipe closes (`die_with_launcher`).

A single thread does all of it; it polls the processes every POLL_SECONDS.
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
from maxtext.common.signals import call_on_signals, exit_code

POLL_SECONDS = 0.05
SETTLE_SECONDS = 1.0  # from the first exit to the decision which process failed first
FAILURE_GRACE_SECONDS = 5.0  # for the others to end after a process has failed
LIFELINE = "MAXTEXT_LIFELINE"  # the file descriptor of a pipe that closes when the launcher ends
COLORS = (36, 33, 32, 35, 34, 31)


@dataclass(frozen=True)
class Command:
    args: Sequence[str]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class GroupExit:
    """How a group ended.

    `code` is that of the first process that failed (128 + N after signal N), `failed` are the
    indices of the processes that failed on their own, `stop_signal` is the signal that requested
    the end, if any.
    """

    code: int
    failed: tuple[int, ...] = ()
    stop_signal: int | None = None


@dataclass
class OutputCopier:
    """Copies one output of one process by lines."""

    source: IO[bytes]
    sink: IO[str]
    prefix: str
    ignored: re.Pattern[str] | None = None  # lines that are not copied
    incomplete: bytes = b""  # the start of a line

    def copy(self) -> bool:
        """Copy the lines that are available; False at the end of the output."""
        data = os.read(self.source.fileno(), 65536)
        *lines, self.incomplete = (self.incomplete + data).split(b"\n")
        if not data and self.incomplete:
            lines.append(self.incomplete)
            self.incomplete = b""
        for line in (line.decode(errors="replace") for line in lines):
            if self.ignored is None or not self.ignored.match(line):
                self.sink.write(f"{self.prefix}{line}\n")
        if lines:
            self.sink.flush()
        return bool(data)


@dataclass
class Supervisor:
    commands: Sequence[Command]
    stop_grace: float = 60.0  # seconds after a stop signal: must allow for a step and a save
    failure_grace: float = FAILURE_GRACE_SECONDS
    ignored: re.Pattern[str] | None = None  # lines of the processes that are not copied
    processes: list[subprocess.Popen] = field(default_factory=list)
    stop_signal: int | None = None
    num_signals: int = 0
    reaped: set[int] = field(
        default_factory=set
    )  # processes that ended, and whose session is killed

    def run(self) -> GroupExit:
        selector = selectors.DefaultSelector()
        lifeline, launcher_end = os.pipe()
        try:
            with call_on_signals(self.on_signal):
                for index, command in enumerate(self.commands):
                    self.start(index, command, lifeline, selector)
                return self.watch(selector)
        finally:
            self.kill(signal.SIGKILL)
            for process in self.processes:
                process.wait()
            os.close(lifeline)
            os.close(launcher_end)
            for key in list(selector.get_map().values()):
                key.data.source.close()
            selector.close()

    def start(
        self, index: int, command: Command, lifeline: int, selector: selectors.BaseSelector
    ) -> None:
        process = subprocess.Popen(
            command.args,
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
            copier = OutputCopier(source, sink, prefix=prefix(index, sink), ignored=self.ignored)
            selector.register(source, selectors.EVENT_READ, copier)

    def watch(self, selector: selectors.BaseSelector) -> GroupExit:
        """Copy output and poll the processes until all have ended."""
        failed: tuple[int, ...] = ()
        code, num_forwarded, deadline = 0, 0, float("inf")
        while True:
            self.copy(selector, POLL_SECONDS)
            codes = self.settle([process.poll() for process in self.processes])
            self.kill_children(codes)
            if not failed and (failed := first_failures([self.unexpected(code) for code in codes])):
                code = shell_code(codes[failed[0]])
                LOGGER.warning(
                    "process %d %s: stopping the others", failed[0], describe_exit(codes[failed[0]])
                )
                self.kill(signal.SIGTERM)
                deadline = min(deadline, time.monotonic() + self.failure_grace)
            if self.stop_signal is not None and self.num_signals > num_forwarded:
                self.kill(signal.SIGKILL if num_forwarded else self.stop_signal)
                num_forwarded = self.num_signals
                deadline = min(deadline, time.monotonic() + self.stop_grace)
            if None not in codes:
                self.copy_remaining(selector)
                expected = [code for code in codes if code and not self.unexpected(code)]
                return GroupExit(code or max(expected, default=0), failed, self.stop_signal)
            if time.monotonic() > deadline:
                self.kill(signal.SIGKILL)

    def unexpected(self, code: int | None) -> int | None:
        """The exit code, or 0 if the process ended by the signal that was forwarded to it."""
        is_expected = self.stop_signal is not None and code == exit_code(self.stop_signal)
        return 0 if is_expected else code

    def settle(self, codes: list[int | None]) -> list[int | None]:
        """After a new failure, the exit codes a moment later.

        A killed process can take longer to end than a peer that noticed its death.
        """
        failed = any(code for index, code in enumerate(codes) if index not in self.reaped)
        if failed and None in codes:
            deadline = time.monotonic() + SETTLE_SECONDS
            while None in codes and not killed(codes) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                codes = [process.poll() for process in self.processes]
        return codes

    def kill_children(self, codes: Sequence[int | None]) -> None:
        """Kill the sessions of processes that have ended. Once: later the pid may be reused."""
        for index, (process, code) in enumerate(zip(self.processes, codes, strict=True)):
            if code is not None and index not in self.reaped:
                self.reaped.add(index)
                signal_group(process.pid, signal.SIGKILL)

    def copy(self, selector: selectors.BaseSelector, seconds: float) -> bool:
        """Copy the output that arrives within `seconds`; False if there was none."""
        if not selector.get_map():
            time.sleep(seconds)
            return False
        ready = selector.select(seconds)
        for key, _ in ready:
            if not key.data.copy():
                selector.unregister(key.fileobj)
                key.data.source.close()
        return bool(ready)

    def copy_remaining(self, selector: selectors.BaseSelector) -> None:
        """Copy what is left in the pipes of processes that have ended."""
        while selector.get_map() and self.copy(selector, POLL_SECONDS):
            pass

    def kill(self, number: int) -> None:
        """Send a signal to all running processes; SIGKILL also goes to their children."""
        for index, process in enumerate(self.processes):
            if index in self.reaped:
                continue
            if number == signal.SIGKILL:
                signal_group(process.pid, number)
            else:
                process.send_signal(number)

    def on_signal(self, number: int) -> None:
        self.stop_signal = self.stop_signal or number
        self.num_signals += 1


def first_failures(codes: Sequence[int | None]) -> tuple[int, ...]:
    """The processes that failed on their own, of those that ended at about the same time.

    A process whose peer has died ends by an error or by SIGABRT, hardly ever by another signal.
    """
    return killed(codes) or tuple(index for index, code in enumerate(codes) if code)[:1]


def killed(codes: Sequence[int | None]) -> tuple[int, ...]:
    """The processes that a signal other than SIGABRT ended."""
    return tuple(
        index for index, code in enumerate(codes) if code and code < 0 and code != -signal.SIGABRT
    )


def signal_group(leader: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def describe_exit(code: int | None) -> str:
    return (
        f"was ended by {signal.Signals(-code).name}"
        if code is not None and code < 0
        else f"ended with code {code}"
    )


def shell_code(code: int | None) -> int:
    """The exit code in a shell: 128 + N after signal N."""
    return 0 if code is None else code if code >= 0 else 128 - code


def prefix(index: int, sink: IO[str]) -> str:
    if sink.isatty():
        return f"\x1b[{COLORS[index % len(COLORS)]}m[{index}]\x1b[0m "
    return f"[{index}] "


def die_with_launcher(environ: MutableMapping[str, str]) -> None:
    """In a process that a Supervisor started: kill this process and its children when the
    supervisor ends.
    """
    if LIFELINE not in environ:
        return
    lifeline = int(environ.pop(LIFELINE))  # children do not inherit the descriptor

    def wait() -> None:
        with contextlib.suppress(OSError):
            os.read(lifeline, 1)  # nothing is ever written: returns when the other end closes
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, name="maxtext-lifeline", daemon=True).start()
