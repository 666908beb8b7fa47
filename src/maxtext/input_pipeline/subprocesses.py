"""A function of this package as a program of its own, at the other end of a socket.

It needs nothing from the script that started the run, which need not guard its `__main__`, and it
can end when that socket closes, however the caller ended. SIGINT and SIGHUP, which a terminal sends
to every process, are for the caller alone.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection


def start_program(
    module: str,
    function: str,
    environment: Mapping[str, str] | None = None,
    descriptors: tuple[int, ...] = (),
) -> tuple[subprocess.Popen, Connection]:
    """Run `function(descriptor of the socket)` of a module. `descriptors` stay open as long as it
    runs.
    """
    here, there = socket.socketpair()
    # It must find what this process can import, and must not take a share of the accelerator.
    own = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "JAX_PLATFORMS": "cpu"}
    # Inherited, so that it holds from the program's first moment: it takes seconds until code of
    # ours runs there.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        with there:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    f"from {module} import {function}; {function}({there.fileno()})",
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[there.fileno(), *descriptors],
                env={**os.environ, **own, **(environment or {})},
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process, Connection(here.detach())
