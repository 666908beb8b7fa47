"""Traces cover the configured steps, and an xplane trace is a profile of them."""

import socket
import time

import jax
import jax.numpy as jnp
import pytest

from maxtext.common.errors import ConfigError
from maxtext.configs.types import ProfilerType
from maxtext.diagnostics import profiler as module
from maxtext.diagnostics.profiler import Profiler, stack_traces
from maxtext.diagnostics.record import TIMING


class FakeTool:
    def __init__(self, events):
        self.events = events

    def start(self):
        self.events.append("start")

    def stop(self):
        self.events.append("stop")


@pytest.fixture
def events(monkeypatch):
    events: list = []
    monkeypatch.setattr(
        module, "make_tool", lambda config: FakeTool(events) if config.profiler else None
    )
    return events


def drive(config, events, first, last, until=None):
    """Run the steps; the events in order, with `wait` and the traced steps among them."""
    profiler = Profiler(config, first, last)
    for step in range(first, (until or last) + 1):
        profiler.before_step(step, lambda: events.append("wait"))
        if profiler.active:
            events.append(step)
        profiler.after_step(step, lambda: events.append("wait"))
    profiler.close()
    assert not profiler.active
    return events


def test_profiler_is_off_by_default(make_config, events):
    assert drive(make_config(profiler=ProfilerType.NONE), events, 0, 2) == []


def test_window_counts_from_the_first_step_of_the_process(make_config, events):
    config = make_config(
        profiler=ProfilerType.XPLANE, skip_first_n_steps_for_profiler=2, profiler_steps=3
    )
    assert drive(config, events, 50, 60) == ["wait", "start", 52, 53, 54, "wait", "stop"]


def test_window_can_cover_the_run(make_config, events):
    config = make_config(
        profiler=ProfilerType.XPLANE,
        skip_first_n_steps_for_profiler=0,
        profiler_steps=2,
        profile_cleanly=False,
    )
    assert drive(config, events, 0, 1) == ["start", 0, 1, "stop"]


def test_periodic_windows_repeat_while_they_fit(make_config, events):
    config = make_config(
        profiler=ProfilerType.XPLANE,
        skip_first_n_steps_for_profiler=1,
        profiler_steps=2,
        profile_periodically_period=4,
        profile_cleanly=False,
    )
    assert drive(config, events, 0, 9) == [
        "start",
        1,
        2,
        "stop",
        "start",
        5,
        6,
        "stop",
    ]  # 9 alone is no window
    events.clear()
    back_to_back = config.model_copy(update={"profile_periodically_period": 2})
    assert drive(back_to_back, events, 0, 4) == ["start", 1, 2, "stop", "start", 3, 4, "stop"]


def test_close_stops_a_running_trace(make_config, events):
    config = make_config(profiler=ProfilerType.XPLANE, profiler_steps=5)
    assert drive(config, events, 0, 20, until=2) == ["wait", "start", 1, 2, "stop"]


def test_window_that_does_not_fit_is_an_error_except_after_resume(make_config, events, log):
    config = make_config(
        profiler=ProfilerType.XPLANE, skip_first_n_steps_for_profiler=1, profiler_steps=5
    )
    with pytest.raises(ConfigError, match="need 6 steps, but the run has 5"):
        Profiler(config, 0, 4)
    assert drive(config, events, 0, 5)[1] == "start"
    events.clear()
    log.clear()
    assert drive(config, events, 97, 99) == []
    assert log == ["no trace: only 3 steps are left of the run"]


def test_failing_tool_is_logged(make_config, events, monkeypatch, log):
    monkeypatch.setattr(FakeTool, "start", lambda self: 1 / 0)
    assert drive(make_config(profiler=ProfilerType.XPLANE), events, 0, 9) == ["wait"]
    assert len(log) == 1


def test_hides_timing_of_traced_steps(make_config, events):
    config = make_config(
        profiler=ProfilerType.XPLANE, profiler_steps=2, hide_profiler_step_metric=True
    )
    profiler = Profiler(config, 0, 9)
    record = {"loss": 1.0, **dict.fromkeys(TIMING, 2.0)}
    shown = [profiler.visible({"step": step, **record})["mfu"] for step in range(4)]
    assert shown == [2.0, None, None, 2.0]
    assert profiler.visible({"step": 1, **record}) == {
        "step": 1,
        "loss": 1.0,
        **dict.fromkeys(TIMING),
    }
    plain = Profiler(config.model_copy(update={"hide_profiler_step_metric": False}), 0, 9)
    assert plain.visible({"step": 1, **record})["mfu"] == 2.0


@pytest.mark.slow
def test_xplane_trace_has_the_steps(make_config, tmp_path, log):
    config = make_config(
        profiler=ProfilerType.XPLANE, skip_first_n_steps_for_profiler=1, profiler_steps=2
    )
    step_function = jax.jit(lambda x: x @ x)
    x = step_function(jnp.ones((64, 64)))
    profiler = Profiler(config, 0, 4)
    for step in range(5):
        profiler.before_step(step, lambda: None)
        x = step_function(x)
        profiler.after_step(step, x.block_until_ready)
    profiler.close()
    (path,) = (tmp_path / "tensorboard").glob("plugins/profile/*/*.xplane.pb")
    steps = set()
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if event.name.startswith("train") and "step_num" in stats:
                    steps.add(int(stats["step_num"]))
    assert steps == {1, 2}
    assert log == [f"wrote a trace to {tmp_path / 'tensorboard'}"]


def test_nsys_marks_its_range_or_names_what_is_missing(make_config, monkeypatch, log):
    calls = []

    class Library:
        def cudaProfilerStart(self):
            calls.append("start")
            return 0

        def cudaProfilerStop(self):
            calls.append("stop")
            return 3

    config = make_config(profiler=ProfilerType.NSYS)
    monkeypatch.setattr(module.ctypes, "CDLL", lambda name: Library())
    drive(config, [], 0, 9)
    assert calls == ["start", "stop"]
    assert log == ["the profiler could not stop a trace: cudaProfilerStop returned CUDA error 3"]

    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(module.ctypes, "CDLL", missing)
    with pytest.raises(
        ConfigError, match="profiler=nsys needs the CUDA runtime.*use profiler=xplane"
    ):
        Profiler(config, 0, 9)


def test_live_server_listens_until_close(make_config):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        config = make_config(enable_jax_profiler=True, jax_profiler_port=port)
        with pytest.raises(ConfigError, match=f"jax_profiler_port={port} cannot be opened"):
            Profiler(config, 0, 9)
    profiler = Profiler(config, 0, 9)
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
    profiler.close()
    with pytest.raises(OSError):  # noqa: PT011 (refused, by whichever error)
        socket.create_connection(("127.0.0.1", port), timeout=1)


@pytest.mark.slow
def test_stack_traces_show_where_the_program_waits(make_config, tmp_path, log):
    path = tmp_path / "stacks" / "trace.txt"
    config = make_config(collect_stack_trace=True, stack_trace_interval_seconds=1)

    def waits_here():
        deadline = time.monotonic() + 10
        while path.read_text().count("Timeout") < 2 and time.monotonic() < deadline:
            time.sleep(0.05)

    with stack_traces(config, path):
        waits_here()
    text = path.read_text()
    assert text.count("Timeout") >= 2  # it repeats
    assert "in waits_here" in text
    time.sleep(1.2)
    assert path.read_text() == text  # and it ends

    off = tmp_path / "off.txt"
    with stack_traces(make_config(), off):
        pass
    assert not off.exists()
