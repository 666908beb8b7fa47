"""Whether mathematical answers are equal, by math-verify in processes that can be killed.

Comparing may take forever in sympy. It runs in other processes, each of which compares one pair at
a time; those that are late are killed, and replaced when they are needed again.
"""

import os
import subprocess
import time
from collections.abc import Sequence
from functools import cache
from multiprocessing.connection import Connection, wait

from maxtext.common.extras import require
from maxtext.input_pipeline.subprocesses import start_program
from maxtext.trainers.methods.rl.rewards.normalize import normalize

MAX_PROCS = 8
Pair = tuple[str, str]  # the right answer, and another


class Worker:
    def __init__(self) -> None:
        self.process: subprocess.Popen
        self.connection: Connection
        self.process, self.connection = start_program(
            "maxtext.trainers.methods.rl.rewards.math_worker", "work"
        )

    def kill(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()


class MathVerifier:
    """Up to `num_procs` processes; None: one for each core, at most 8."""

    def __init__(self, num_procs: int | None = None):
        self.num_procs = num_procs or min(MAX_PROCS, os.cpu_count() or 1)
        self.idle: list[Worker] = []

    def equal(self, pairs: Sequence[Pair], timeout: float) -> list[bool | None]:
        """Whether the answers of each pair are equal; None for those that are not compared within
        `timeout` seconds, or whose process died. Raises MissingExtra without math-verify."""
        if pairs:
            require("math_verify", "comparing mathematical answers")
        results: list[bool | None] = [None] * len(pairs)
        deadline = time.monotonic() + timeout
        waiting = list(enumerate(pairs))[::-1]
        busy: dict[Connection, tuple[Worker, int]] = {}
        while waiting or busy:
            while waiting and len(busy) < self.num_procs:
                worker = self.idle.pop() if self.idle else Worker()
                index, (right, other) = waiting.pop()
                busy[worker.connection] = worker, index
                worker.connection.send((normalize(right), normalize(other)))
            ready = wait(list(busy), max(deadline - time.monotonic(), 0))
            for connection in ready:
                assert isinstance(connection, Connection)
                worker, index = busy.pop(connection)
                try:
                    results[index] = connection.recv()
                    self.idle.append(worker)
                except EOFError:  # the process died
                    worker.kill()
            if not ready:
                break
        for worker, _ in busy.values():
            worker.kill()
        return results

    def close(self) -> None:
        while self.idle:
            self.idle.pop().kill()


@cache
def shared_verifier(num_procs: int | None) -> MathVerifier:
    """The processes end with this one."""
    return MathVerifier(num_procs)
