"""Processes that are forked from a server process, which has imported the package.

Starting an interpreter and importing JAX takes most of the time of a short run. Forked processes
have their own environment, devices, signals and exit code, like those of `python3 -m maxtext`.
"""

import atexit
import contextlib
import gc
import importlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from pathlib import Path

import jax

from tests.compiling import reuse_mlir_contexts

ROOT = Path(__file__).parents[1]
# What `maxtext train` and models import when they run. None of it asks JAX for devices.
for module in (
    "maxtext.cli.main", "maxtext.cli.train", "maxtext.trainers.train", "maxtext.inference.llm",
    "maxtext.trainers.banner", "maxtext.checkpoint.open", "grain", "matplotlib.figure",
):  # fmt: skip
    importlib.import_module(module)


class ForkedProcess:
    """`maxtext ARGS` with these additions to the environment, or another program with ARGS. Both
    outputs are appended to files.

    It has the methods of subprocess.Popen that tests call.
    """

    def __init__(
        self,
        args: list[str],
        out: Path,
        err: Path,
        environment: Mapping[str, str],
        program: Callable[[list[str]], None] | None = None,
    ):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        with contextlib.chdir(ROOT):  # the server imports `tests` from there
            forkserver.ensure_running()
        environ = dict(os.environ) | dict(environment)
        arguments = (program or run_maxtext, args, os.getcwd(), out, err, environ)
        self.process = context.Process(target=run_program, args=arguments)
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


def run_python(
    *args: str, environment: Mapping[str, str], timeout: float = 1800
) -> subprocess.CompletedProcess[str]:
    """`python -m MODULE ARGS` or `python -c CODE ARGS`, with these additions to the environment.

    Many small programs are lowered in one MLIR context, as in tests.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = ForkedProcess(list(args), out, err, environment, program=run_code)
        try:
            outputs = process.communicate(timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(args, process.wait(), *outputs)


def run_program(
    program: Callable[[list[str]], None],
    args: list[str],
    folder: str,
    out: Path,
    err: Path,
    environment: dict[str, str],
) -> None:
    """In the new process: run the program and exit with its code."""
    for path, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    jax.config.update("jax_platforms", "cpu")
    try:
        program(args)
    finally:
        atexit._run_exitfuncs()  # multiprocessing would leave them out


def run_maxtext(args: list[str]) -> None:
    sys.argv = ["maxtext", *args]
    from maxtext.cli.entry import entry  # its import sets what Ctrl-C does

    entry()


def run_code(args: list[str]) -> None:
    reuse_mlir_contexts()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    option, source, *rest = args
    sys.argv = [source if option == "-m" else option, *rest]
    if option == "-m":
        runpy.run_module(source, run_name="__main__", alter_sys=True)
    else:
        exec(source, {"__name__": "__main__"})
