"""Traces of steps of a run, and dumps of the stacks of its threads.

`Profiler` traces profiler_steps steps, after skip_first_n_steps_for_profiler steps of the run.
profiler=xplane writes to tensorboard_dir, in the first process only. profiler=nsys marks the range
for Nsight in all processes: start the run as `nsys profile --capture-range=cudaProfilerApi maxtext
train …`. With profile_periodically_period the window repeats as long as it fits into the run. The
loop calls

    profiler = Profiler(config, first_step, last_step)   # both steps run
    profiler.before_step(step, wait)                     # `wait` blocks until the devices are idle
    …
    profiler.after_step(step, wait)
    record = profiler.visible(record)                    # hide_profiler_step_metric
    profiler.close()                                     # also stops a trace after a signal

A window that does not fit into the configured run is a ConfigError. A resumed run with too few
steps left only logs a warning: a job that restarts near its end must not fail for a trace.

`stack_traces` (collect_stack_trace) dumps the stacks of all threads every
stack_trace_interval_seconds. The dumps come from a C thread (faulthandler), so they appear even
while Python is blocked in a call into the devices. Each starts with `Timeout (…)!`, which is how
faulthandler reports the interval.
"""

import contextlib
import ctypes
import faulthandler
import importlib.util
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import jax

from maxtext.common.errors import ConfigError
from maxtext.common.log import LOGGER
from maxtext.configs.types import MaxTextConfig, ProfilerType
from maxtext.diagnostics.record import TIMING, Record

Wait = Callable[[], None]


class Profiler:
    """`active`: whether a trace is running."""

    def __init__(self, config: MaxTextConfig, first_step: int, last_step: int):
        self.active = False
        self.num_steps = config.profiler_steps
        self.period = config.profile_periodically_period
        self.clean = config.profile_cleanly
        self.hides_timing = config.hide_profiler_step_metric
        self.last_step = last_step
        self.tool = make_tool(config)
        self.first_window = first_step + config.skip_first_n_steps_for_profiler
        self.annotation: jax.profiler.StepTraceAnnotation | None = None
        self.server_started = False
        skipped = config.skip_first_n_steps_for_profiler
        if self.tool and skipped + self.num_steps > last_step + 1:
            raise ConfigError(
                f"skip_first_n_steps_for_profiler={skipped} and profiler_steps={self.num_steps} "
                f"need {skipped + self.num_steps} steps, but the run has {last_step + 1}: "
                "trace fewer steps, or raise steps"
            )
        if self.tool and not self.window(self.first_window):
            LOGGER.warning(
                "no trace: only %d steps are left of the run", last_step + 1 - first_step
            )
        if config.enable_jax_profiler:
            self.start_server(config.jax_profiler_port)

    def window(self, step: int) -> range:
        """The window of traced steps that `step` belongs to; empty outside of all windows."""
        offset = step - self.first_window
        start = step - offset % self.period if self.period > 0 else self.first_window
        steps = range(start, start + self.num_steps)
        is_traced = self.tool is not None and offset >= 0 and steps[-1] <= self.last_step
        return steps if is_traced and step in steps else range(0)

    def before_step(self, step: int, wait: Wait) -> None:
        window = self.window(step)
        if not self.active and window and step == window[0]:
            if self.clean:
                wait()
            self.active = self.attempt("start")
        if self.active:
            # TensorBoard and XProf divide a trace into steps by this annotation.
            self.annotation = jax.profiler.StepTraceAnnotation("train", step_num=step)
            self.annotation.__enter__()

    def after_step(self, step: int, wait: Wait) -> None:
        window = self.window(step)
        if self.active and (not window or step == window[-1]):
            if self.clean:
                wait()
            self.stop()
        self.end_annotation()

    def visible(self, record: Record) -> Record:
        """The record; without timing in traced steps if hide_profiler_step_metric is set."""
        if not (self.hides_timing and self.window(int(record["step"] or 0))):
            return record
        return {name: None if name in TIMING else value for name, value in record.items()}

    def stop(self) -> None:
        self.end_annotation()
        self.active = False
        self.attempt("stop")

    def end_annotation(self) -> None:
        if self.annotation is not None:
            self.annotation.__exit__(None, None, None)
            self.annotation = None

    def attempt(self, action: str) -> bool:
        """Start or stop the tool. A failure (a full disk, another capture) is only logged."""
        try:
            getattr(self.tool, action)()
            return True
        except Exception as error:
            LOGGER.error("the profiler could not %s a trace: %s", action, error)
            return False

    def start_server(self, port: int) -> None:
        """Start the live server. JAX only prints a warning if the port is taken, so check it first.

        Raises ConfigError.
        """
        try:
            with socket.create_server(("", port)):
                pass
            jax.profiler.start_server(port)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"jax_profiler_port={port} cannot be opened: {error}; choose another port"
            ) from error
        self.server_started = True

    def close(self) -> None:
        if self.active:
            self.stop()
        if self.server_started:
            jax.profiler.stop_server()
            self.server_started = False


def make_tool(config: MaxTextConfig) -> Any:
    """The object that starts and stops traces, or None."""
    if config.profiler == ProfilerType.NSYS:
        return Nsys()
    if config.profiler == ProfilerType.XPLANE and jax.process_index() == 0:
        return Xplane(config.tensorboard_dir or "")
    return None


class Xplane:
    def __init__(self, folder: str):
        if not folder:
            raise ValueError(
                "tensorboard_dir is computed by maxtext.config(); this configuration lacks it"
            )
        self.folder = folder

    def start(self) -> None:
        jax.profiler.start_trace(self.folder)

    def stop(self) -> None:
        jax.profiler.stop_trace()
        LOGGER.info("wrote a trace to %s", self.folder)


class Nsys:
    """Marks the range for an attached profiler through the CUDA runtime."""

    def __init__(self) -> None:
        self.runtime = load_cuda_runtime()

    def start(self) -> None:
        self.call("cudaProfilerStart")

    def stop(self) -> None:
        self.call("cudaProfilerStop")

    def call(self, name: str) -> None:
        status = getattr(self.runtime, name)()
        if status:
            raise RuntimeError(f"{name} returned CUDA error {status}")


def load_cuda_runtime() -> ctypes.CDLL:
    """libcudart of the system, or of the wheels of jax[cuda12] and jax[cuda13]."""
    names = ["libcudart.so.13", "libcudart.so.12", "libcudart.so"]
    wheels = importlib.util.find_spec("nvidia")
    for folder in (wheels.submodule_search_locations or []) if wheels else []:
        names += [str(path) for path in sorted(Path(folder).glob("*/lib/libcudart.so.*"))]
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise ConfigError(
        "profiler=nsys needs the CUDA runtime (libcudart), which was not found: use profiler=xplane"
    )


@contextlib.contextmanager
def stack_traces(config: MaxTextConfig, path: str | os.PathLike | None = None) -> Iterator[None]:
    """Dump stacks while the block runs, if collect_stack_trace is set: to standard error, or
    appended to `path`.
    """
    if not config.collect_stack_trace:
        yield
        return
    with contextlib.ExitStack() as stack:
        # faulthandler needs a file descriptor, which a replaced sys.stderr may not have.
        file: TextIO | None = sys.__stderr__
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(path, "a", encoding="utf-8"))
        seconds = config.stack_trace_interval_seconds
        LOGGER.info(
            "stack traces of all threads every %d s to %s", seconds, path or "standard error"
        )
        faulthandler.dump_traceback_later(seconds, repeat=True, file=file or 2)
        stack.callback(faulthandler.cancel_dump_traceback_later)  # before the file is closed
        yield
