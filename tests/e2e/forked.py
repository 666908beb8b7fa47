"""Processes of `maxtext` that are forked from a server process, which has imported the package.

Starting an interpreter and importing JAX takes most of the time of a short run. Forked processes
have their own environment, devices, signals and exit code, like those of `python3 -m maxtext`.
"""

import atexit
import contextlib
import importlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import forkserver
from pathlib import Path

import jax

# What `maxtext train` imports when it runs. None of it asks JAX for devices.
for module in (
    "maxtext.cli.main", "maxtext.cli.train", "maxtext.trainers.train",
    "maxtext.trainers.sample", "maxtext.checkpoint.open", "grain", "matplotlib.figure",
):  # fmt: skip
    importlib.import_module(module)


class ForkedProcess:
    """`maxtext ARGS` with these additions to the environment. Both outputs are appended to files.

    It has the methods of subprocess.Popen that tests call.
    """

    def __init__(self, args: list[str], out: Path, err: Path, environment: Mapping[str, str]):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        with contextlib.chdir(Path(__file__).parents[2]):  # the server imports `tests` from there
            forkserver.ensure_running()
        arguments = (args, os.getcwd(), out, err, dict(os.environ) | dict(environment))
        self.process = context.Process(target=run_command, args=arguments)
        self.process.start()
        self.pid, self.outputs = self.process.pid, (out, err)

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, or -N if signal N ended it."""
        self.process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("maxtext", timeout or 0)
        return self.returncode

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def communicate(self, timeout: float | None = None) -> list[str]:
        """Both outputs, when it has ended."""
        self.wait(timeout)
        return [path.read_text(errors="replace") for path in self.outputs]

    def send_signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()


def run_command(
    args: list[str], folder: str, out: Path, err: Path, environment: dict[str, str]
) -> None:
    """In the new process: run the command and exit with its code."""
    for path, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    jax.config.update("jax_platforms", "cpu")
    sys.argv = ["maxtext", *args]
    from maxtext.cli.entry import entry  # its import sets what Ctrl-C does

    try:
        entry()
    finally:
        atexit._run_exitfuncs()  # multiprocessing would leave them out
