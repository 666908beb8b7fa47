"""A command in a process of its own, with a terminal."""

import contextlib
import os
import pty
import select
import subprocess
import sys
from pathlib import Path

SECONDS = 60  # to wait for what a command prints


class TerminalChild:
    def __init__(self, process, terminal):
        self.process, self.terminal = process, terminal

    def write(self, data):
        os.write(self.terminal, data)

    def has_output(self, seconds):
        return bool(select.select([self.terminal], [], [], seconds)[0])

    def until(self, sign):
        """What is printed up to `sign`, or a little more."""
        seen = b""
        while sign not in seen:
            assert self.has_output(SECONDS), seen
            seen += os.read(self.terminal, 1024)
        return seen.decode()

    def wait(self):
        """The exit code."""
        return self.process.wait(SECONDS)


@contextlib.contextmanager
def run_in_terminal(code, *args):
    """Python's `code` with these arguments."""
    terminal, other_side = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code, *args],
        stdin=other_side,
        stdout=other_side,
        stderr=other_side,
        start_new_session=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TERM": "dumb"},
    )
    os.close(other_side)
    try:
        yield TerminalChild(process, terminal)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
