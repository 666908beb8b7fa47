"""The loop: batch, step, hooks. It never asks which algorithm runs.

The host does not wait for the device: a step is dispatched as soon as its batch is there, and its
metrics are read `AHEAD` steps later, which also bounds how far the host can run ahead. A thread
watches the device, so that a step's time is from the end of the step before it to its own end,
whenever the host looks. Hooks see each step before and after it is dispatched, and its metrics once
they are read.

In a run of several processes no process may leave alone: a wish to stop goes out as a vote with the
next batch (see feed.py) and is heeded by all when the metrics of that step are read, which all do
after the same number of steps.
"""

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from maxtext.common.log import LOGGER
from maxtext.common.signals import asked_by_signals, interrupt_at_once
from maxtext.trainers.feed import TrainFeed
from maxtext.trainers.step import ENDED, GO_ON, STOP, TrainState

AHEAD = 2
ASKED_ELSEWHERE = "another process was asked to stop"
REPEAT_SECONDS = 2.0  # schedulers may send SIGTERM twice at once, which is one request


class Hook:
    """What a hook may do; each method does nothing unless overridden."""

    def before_step(self, loop: "Loop") -> None: ...

    def after_step(self, loop: "Loop") -> None: ...

    def on_metrics(
        self, loop: "Loop", step: int, metrics: dict[str, float], seconds: float
    ) -> None: ...

    def at_end(self, loop: "Loop") -> None: ...


class Loop:
    """`step` is the number of steps done; a hook ends the loop by setting `stop` to the reason, the
    same in all processes; what one process alone wants it asks for with `ask_to_stop`."""

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
        self.asked: str | None = None  # why this process wants to stop
        self.signal: int | None = None  # the first one that asked this process to stop
        self.signal_time = 0.0
        self.watcher = Watcher()
        self.ended: int | None = None  # the first step without data
        self.last_done = 0.0  # when the step before ended
        self.data_seconds = 0.0  # that the host waited for batches
        self.step_seconds = 0.0  # that all steps took

    def run(self) -> TrainState:
        with asked_by_signals(self.on_signal), contextlib.closing(self.watcher), self.ending():
            self.restart_clock()
            while self.step < self.steps and self.stop is None:
                asked = time.perf_counter()
                try:
                    batch = next(self.batches)
                except StopIteration:
                    self.stop = "the data ended"
                    break
                self.data_seconds += time.perf_counter() - asked
                self.tell("before_step")
                self.state, metrics = self.train_step(self.state, batch, self.key)
                self.watcher.watch(self.step, metrics)
                self.step += 1
                while self.watcher.waiting > AHEAD:
                    self.read_metrics()
                self.tell("after_step")
            self.wait()
        return self.state

    def on_signal(self, number: int) -> None:
        """The first SIGINT, SIGTERM or SIGHUP ends the loop after the current step; a second one
        ends the run at once, which is what a person means who presses Ctrl-C twice."""
        name, now = signal.Signals(number).name, time.monotonic()
        if self.signal is not None:
            if number == signal.SIGINT or now - self.signal_time > REPEAT_SECONDS:
                interrupt_at_once(number)
            return
        self.signal, self.signal_time = number, now
        LOGGER.warning(
            "%s: stopping after the current step; a second signal ends the run at once", name
        )
        self.ask_to_stop(name)

    def ask_to_stop(self, reason: str) -> None:
        self.asked = reason
        if isinstance(self.batches, TrainFeed) and jax.process_count() > 1:
            self.batches.stop = True
        else:
            self.stop = reason

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Hooks hear of the end also when one of them ends the run by an error."""
        try:
            yield
        finally:
            self.tell("at_end")

    def wait(self) -> None:
        """Until every dispatched step is done and its metrics are read."""
        while self.watcher.waiting:
            self.read_metrics()

    def read_metrics(self) -> None:
        step, values, done = self.watcher.next()
        seconds, self.last_done = done - self.last_done, done
        self.step_seconds += seconds
        vote = values.pop("vote", GO_ON)
        if vote == ENDED or self.ended is not None:  # this step and those behind it changed nothing
            self.ended = step if self.ended is None else self.ended
            self.stop, self.step = "the data ended", self.ended
            return
        if vote == STOP:
            self.stop = self.asked or ASKED_ELSEWHERE
        for hook in self.hooks:
            hook.on_metrics(self, step, values, seconds)

    def restart_clock(self) -> None:
        """Leave what a hook did (an evaluation, a save) out of the next step's time."""
        self.last_done = time.perf_counter()

    def tell(self, event: str) -> None:
        for hook in self.hooks:
            getattr(hook, event)(self)


class Watcher:
    """Reads metrics off the device in the order of their steps, and notes when each came."""

    def __init__(self) -> None:
        self.asked: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self.done: queue.SimpleQueue[tuple[int, dict[str, float], float] | BaseException] = (
            queue.SimpleQueue()
        )
        self.waiting = 0
        threading.Thread(target=self.work, name="maxtext-watcher", daemon=True).start()

    def watch(self, step: int, metrics: dict[str, jax.Array]) -> None:
        self.waiting += 1
        self.asked.put((step, metrics))

    def next(self) -> tuple[int, dict[str, float], float]:
        """(step, metrics, time of its end); waits for it. An error of the device is raised here."""
        result = self.done.get()
        self.waiting -= 1
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        self.asked.put(None)

    def work(self) -> None:
        while (asked := self.asked.get()) is not None:
            step, metrics = asked
            try:
                jax.block_until_ready(metrics)
                done = time.perf_counter()  # before the copies, which may wait for the next step
                self.done.put((step, {name: float(value) for name, value in metrics.items()}, done))
            except BaseException as error:
                self.done.put(error)
