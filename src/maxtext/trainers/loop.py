"""The loop: batch, step, hooks. It never asks which algorithm runs.

The host does not wait for the device: a step is dispatched as soon as its batch is there, and its metrics are read
`AHEAD` steps later, which also bounds how far the host can run ahead. Hooks see each step before and after it is
dispatched, and its metrics once they are read.
"""

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jax

from maxtext.common.log import LOGGER
from maxtext.trainers.step import TrainState

AHEAD = 2


class Hook:
    """What a hook may do; each method does nothing unless overridden."""

    def before_step(self, loop: "Loop") -> None: ...

    def after_step(self, loop: "Loop") -> None: ...

    def on_metrics(self, loop: "Loop", step: int, metrics: dict[str, float], seconds: float) -> None: ...

    def at_end(self, loop: "Loop") -> None: ...


class Loop:
    """`step` is the number of steps done; a hook ends the loop by setting `stop` to the reason."""

    def __init__(
        self,
        state: TrainState,
        train_step: Callable[[TrainState, Any, jax.Array], tuple[TrainState, Any]],
        batches: Iterator[Any],
        key: jax.Array,
        steps: int,
        hooks: Sequence[Hook] = (),
        first_step: int = 0,
    ):
        self.state, self.train_step, self.batches, self.key = state, train_step, batches, key
        self.steps, self.hooks, self.step = steps, hooks, first_step
        self.stop: str | None = None
        self.pending: deque[tuple[int, Any]] = deque()
        self.last_seen = time.perf_counter()

    def run(self) -> TrainState:
        with stop_on_signals(self):
            self.last_seen = time.perf_counter()
            while self.step < self.steps and self.stop is None:
                try:
                    batch = next(self.batches)
                except StopIteration:
                    self.stop = "the data ended"
                    break
                self.tell("before_step")
                self.state, metrics = self.train_step(self.state, batch, self.key)
                self.pending.append((self.step, metrics))
                self.step += 1
                while len(self.pending) > AHEAD:
                    self.read_metrics()
                self.tell("after_step")
            self.wait()
        self.tell("at_end")
        return self.state

    def wait(self) -> None:
        """Until every dispatched step is done and its metrics are read."""
        while self.pending:
            self.read_metrics()

    def read_metrics(self) -> None:
        step, metrics = self.pending.popleft()
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        now = time.perf_counter()
        seconds, self.last_seen = now - self.last_seen, now
        for hook in self.hooks:
            hook.on_metrics(self, step, values, seconds)

    def restart_clock(self) -> None:
        """Leave what a hook did (an evaluation, a save) out of the next step's time."""
        self.last_seen = time.perf_counter()

    def tell(self, event: str) -> None:
        for hook in self.hooks:
            getattr(hook, event)(self)


@contextmanager
def stop_on_signals(loop: Loop) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the loop after the current step; a second Ctrl-C ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers; whoever runs a loop elsewhere sets `stop`
        return

    def ask(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if loop.stop == name and number == signal.SIGINT:
            raise KeyboardInterrupt
        LOGGER.warning("%s: stopping after the current step", name)
        loop.stop = name

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
