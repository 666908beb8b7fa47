"""Runs a function of this package in a new Python process, connected by a socket.

Unlike multiprocessing, it does not import the script that started the run, which need not guard its
`__main__`. The process can end when the socket closes, however the caller ended. It ignores SIGINT
and SIGHUP, which a terminal sends to every process.
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
    """Run `function(descriptor of the socket)` of a module. `descriptors` stay open in the
    process.
    """
    here, there = socket.socketpair()
    # It must import what this process can, and must not use the accelerator.
    own = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "JAX_PLATFORMS": "cpu"}
    # The mask is inherited, so that it applies from the start: our code runs there seconds later.
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
