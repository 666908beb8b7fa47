"""The training loop: batch, step, hooks. It does not know which algorithm runs.

The host does not wait for the device: a step is dispatched as soon as its batch is there, and its
metrics are read `max_inflight` steps later, which also bounds how far the host runs ahead. A thread
waits for the device, so the time of a step is measured from the end of the previous step to its own
end, whenever the host looks. Hooks run before and after a step is dispatched, and when its metrics
are read.

In a run of several processes all leave the loop after the same step: a request to stop is sent with
the next batch (see data_loader.py) and obeyed by all when the metrics of that step are read.
"""

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax

from maxtext.common.log import LOGGER
from maxtext.common.signals import call_on_signals, interrupt_now
from maxtext.common.types import Tree
from maxtext.trainers.step import STOP_FLAG, StopFlag, TrainState

# (state, batch, key) -> the new state and metrics
TrainStep = Callable[[TrainState, Any, jax.Array], tuple[TrainState, Any]]
STOPPED_ELSEWHERE = "another process was asked to stop"
REPEAT_SECONDS = 2.0  # schedulers may send SIGTERM twice at once, which is one request


class DataLoader(Protocol):
    def __next__(self) -> Any:
        """The batch of the next step."""

    def request_stop(self) -> bool:
        """Tell all processes, with the next batch, to stop. False if there are no others: the loop
        then stops by itself."""


class Hook:
    """The interface of a hook; each method does nothing unless overridden."""

    def before_step(self, loop: "Loop") -> None: ...

    def after_step(self, loop: "Loop") -> None: ...

    def on_metrics(
        self, loop: "Loop", step: int, metrics: dict[str, float], seconds: float
    ) -> None: ...

    def at_end(self, loop: "Loop") -> None: ...


class Loop:
    """`step` is the number of steps done. A hook ends the loop by setting `stop_reason`, in all
    processes at the same step; a process that wants to stop by itself calls `request_stop`."""

    def __init__(
        self,
        state: TrainState,
        train_step: TrainStep,
        data_loader: DataLoader,
        key: jax.Array,
        steps: int,
        hooks: Sequence[Hook] = (),
        first_step: int = 0,
        max_inflight: int = 2,
    ):
        self.state = state
        self.train_step = train_step
        self.data_loader = data_loader
        self.key = key
        self.steps = steps
        self.hooks = hooks
        self.step = first_step
        self.max_inflight = max_inflight  # steps whose metrics are not read yet
        self.stop_reason: str | None = None
        self.requested_stop: str | None = None  # the reason why this process wants to stop
        self.signal: int | None = None  # the first that asked this process to stop
        self.signal_time = 0.0
        self.metrics_reader = MetricsReader()
        self.data_end: int | None = None  # the first step without data
        self.last_step_end = 0.0
        self.data_seconds = 0.0  # the time that the host waited for batches
        self.step_seconds = 0.0  # the time of all steps

    def run(self) -> TrainState:
        with (
            call_on_signals(self.on_signal),
            contextlib.closing(self.metrics_reader),
            self.calling_at_end(),
        ):
            self.restart_clock()
            while self.step < self.steps and self.stop_reason is None:
                started = time.perf_counter()
                try:
                    batch = next(self.data_loader)
                except StopIteration:
                    self.stop_reason = "the data ended"
                    break
                self.data_seconds += time.perf_counter() - started
                self.call_hooks("before_step")
                self.state, metrics = self.train_step(self.state, batch, self.key)
                self.metrics_reader.submit(self.step, metrics)
                self.step += 1
                while self.metrics_reader.pending > self.max_inflight:
                    self.read_metrics()
                self.call_hooks("after_step")
            self.wait()
        return self.state

    def on_signal(self, number: int) -> None:
        """The first SIGINT, SIGTERM or SIGHUP ends the loop after the current step; a second one
        ends the run at once, which is what pressing Ctrl-C twice means."""
        name, now = signal.Signals(number).name, time.monotonic()
        if self.signal is not None:
            if number == signal.SIGINT or now - self.signal_time > REPEAT_SECONDS:
                interrupt_now(number)
            return
        self.signal = number
        self.signal_time = now
        LOGGER.warning(
            "%s: stopping after the current step; a second signal ends the run at once", name
        )
        self.request_stop(name)

    def request_stop(self, reason: str) -> None:
        self.requested_stop = reason
        if not self.data_loader.request_stop():
            self.stop_reason = reason

    @contextlib.contextmanager
    def calling_at_end(self) -> Iterator[None]:
        """Hooks learn of the end also if one of them raised."""
        try:
            yield
        finally:
            self.call_hooks("at_end")

    def wait(self) -> None:
        """Wait until every dispatched step is done and its metrics are read."""
        while self.metrics_reader.pending:
            self.read_metrics()

    def read_metrics(self) -> None:
        step, metrics, end = self.metrics_reader.next()
        seconds = end - self.last_step_end
        self.last_step_end = end
        self.step_seconds += seconds
        stop_flag = metrics.pop(STOP_FLAG, StopFlag.CONTINUE)
        if self.data_end is None and stop_flag == StopFlag.DATA_ENDED:
            self.data_end = step
        if self.data_end is not None:  # this step and the later ones changed nothing
            self.stop_reason = "the data ended"
            self.step = self.data_end
            return
        if stop_flag == StopFlag.STOP:
            self.stop_reason = self.requested_stop or STOPPED_ELSEWHERE
        for hook in self.hooks:
            hook.on_metrics(self, step, metrics, seconds)

    def restart_clock(self) -> None:
        """Leave the time of a hook (an evaluation, a save) out of the next step's time."""
        self.last_step_end = time.perf_counter()

    def call_hooks(self, event: str) -> None:
        for hook in self.hooks:
            getattr(hook, event)(self)


class MetricsReader:
    """Reads metrics from the device in the order of their steps, and records when each step
    ended."""

    def __init__(self) -> None:
        self.submitted: queue.SimpleQueue[tuple[int, Tree] | None] = queue.SimpleQueue()
        self.results: queue.SimpleQueue[tuple[int, dict[str, float], float] | BaseException] = (
            queue.SimpleQueue()
        )
        self.pending = 0
        threading.Thread(target=self.work, name="maxtext-metrics", daemon=True).start()

    def submit(self, step: int, metrics: dict[str, jax.Array]) -> None:
        self.pending += 1
        self.submitted.put((step, metrics))

    def next(self) -> tuple[int, dict[str, float], float]:
        """(step, metrics, time of its end); blocks. Raises the error of a step that failed."""
        result = self.results.get()
        self.pending -= 1
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        self.submitted.put(None)

    def work(self) -> None:
        while (item := self.submitted.get()) is not None:
            step, metrics = item
            try:
                jax.block_until_ready(metrics)
                end = time.perf_counter()  # before the copies, which may wait for the next step
                values = {name: float(x) for name, x in jax.device_get(metrics).items()}
                self.results.put((step, values, end))
            except BaseException as error:
                self.results.put(error)
