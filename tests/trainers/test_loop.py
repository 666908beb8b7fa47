"""The loop with steps that only count: order of hooks, delay of metrics, and every way it ends."""

import os
import signal
import threading
import time

import pytest

from maxtext.trainers.loop import STOPPED_ELSEWHERE, Hook, Loop
from maxtext.trainers.step import STOP_FLAG, StopFlag

MAX_INFLIGHT = 2  # the default


class Journal(Hook):
    """Records the events, and how many steps were dispatched by then."""

    def __init__(self):
        self.events = []

    def before_step(self, loop):
        self.events.append(("before", loop.step, loop.step))

    def after_step(self, loop):
        self.events.append(("after", loop.step - 1, loop.step))

    def on_metrics(self, loop, step, metrics, seconds):
        assert metrics == {"loss": float(step)}
        assert isinstance(metrics["loss"], float)
        assert seconds >= 0
        self.events.append(("metrics", step, loop.step))

    def at_end(self, loop):
        self.events.append(("end", loop.step, loop.step))

    def steps(self, kind):
        return [step for event, step, _ in self.events if event == kind]


def count(state, batch, key):
    return state + batch, {"loss": state}


class Loader:
    """The given batches, or endless ones; of a single process, or of one of several."""

    def __init__(self, batches=None, processes=1):
        self.batches = iter(lambda: 1, None) if batches is None else iter(batches)
        self.processes = processes
        self.stop_requested = False

    def __next__(self):
        return next(self.batches)

    def request_stop(self):
        self.stop_requested = True
        return self.processes > 1


def make_loop(steps, *hooks, step=count, loader=None, first_step=0, **options):
    return Loop(first_step, step, loader or Loader(), None, steps, hooks, first_step, **options)


def test_every_hook_sees_every_step_in_order():
    first, second = Journal(), Journal()
    loop = make_loop(7, first, second)
    assert loop.run() == loop.state == loop.step == 7
    assert loop.stop_reason is None
    assert first.events == second.events
    for kind in ("before", "after", "metrics"):
        assert first.steps(kind) == list(range(7))
    assert first.events[-1] == ("end", 7, 7)
    assert first.steps("end") == [7]
    order = {event[:2]: index for index, event in enumerate(first.events)}
    for step in range(7):
        assert order["before", step] < min(order["after", step], order["metrics", step])


@pytest.mark.parametrize("inflight", [1, MAX_INFLIGHT, 4])
def test_metrics_are_read_max_inflight_steps_late(inflight):
    journal = Journal()
    make_loop(9, journal, max_inflight=inflight).run()
    dispatched = {step: count for kind, step, count in journal.events if kind == "metrics"}
    late = [dispatched[step] - 1 - step for step in range(9)]
    # While steps are dispatched the host stays ahead by exactly `inflight`; at the end it has to
    # wait for the rest.
    assert late == [inflight] * (9 - inflight) + list(range(inflight - 1, -1, -1))


class Value:
    """A number that blocks until `ready` is set, like one that a device still computes."""

    def __init__(self, value, ready):
        self.value, self.ready = value, ready

    def __float__(self):
        assert self.ready.wait(timeout=20), (
            "the loop waited for a step before it had dispatched the next ones"
        )
        return float(self.value)


def test_the_host_runs_ahead_of_the_device():
    """No value is ready before MAX_INFLIGHT more steps are dispatched: a loop that waited for one
    earlier would never end."""
    ready = [threading.Event() for _ in range(8 + MAX_INFLIGHT)]

    def step(state, batch, key):
        if state >= MAX_INFLIGHT:
            ready[state - MAX_INFLIGHT].set()
        if state == 7:
            for event in ready:
                event.set()
        return state + 1, {"loss": Value(state, ready[state])}

    journal = Journal()
    make_loop(8, journal, step=step).run()
    assert journal.steps("metrics") == list(range(8))


def test_an_error_on_the_device_is_raised_by_the_loop():
    class Broken:
        def __float__(self):
            raise ValueError("out of memory")

    def step(state, batch, key):
        return state + 1, {"loss": Broken() if state == 2 else state}

    journal = Journal()
    with pytest.raises(ValueError, match="out of memory"):
        make_loop(8, journal, step=step).run()
    assert journal.steps("metrics") == [0, 1]


def test_wait_reads_everything():
    class Waits(Hook):
        def after_step(self, loop):
            loop.wait()

    journal = Journal()
    make_loop(5, journal, Waits()).run()
    assert [count - 1 - step for kind, step, count in journal.events if kind == "metrics"] == [
        0
    ] * 5


def test_the_loop_ends_with_the_data():
    journal = Journal()
    loop = make_loop(100, journal, loader=Loader([1, 1, 1]))
    assert loop.run() == 3
    assert (loop.step, loop.stop_reason) == (3, "the data ended")
    assert journal.steps("before") == journal.steps("metrics") == [0, 1, 2]
    assert journal.events[-1] == ("end", 3, 3)


def test_no_steps_and_no_data():
    for loop in (make_loop(0), make_loop(5, loader=Loader([]))):
        assert loop.run() == 0
        assert loop.step == 0


def test_starts_at_a_later_step():
    journal = Journal()
    loop = make_loop(5, journal, first_step=3)
    loop.run()
    assert journal.steps("metrics") == [3, 4]
    assert loop.step == 5


def test_a_hook_ends_the_loop_after_the_current_step():
    class Enough(Hook):
        def after_step(self, loop):
            if loop.step == 4:
                loop.stop_reason = "enough"

    journal = Journal()
    loop = make_loop(100, Enough(), journal)
    assert loop.run() == 4
    assert loop.stop_reason == "enough"
    assert journal.steps("metrics") == [0, 1, 2, 3], "what was dispatched is also read"
    assert journal.steps("end") == [4]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_loop_after_the_current_step(number):
    def step(state, batch, key):
        if state == 3:
            os.kill(os.getpid(), number)
        return state + 1, {"loss": state}

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    journal = Journal()
    loop = make_loop(1000, journal, step=step)
    assert loop.run() == 4, "the step in which it came is finished, no other is begun"
    assert loop.stop_reason == number.name
    assert journal.steps("metrics") == journal.steps("after") == [0, 1, 2, 3]
    assert journal.steps("end") == [4]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_second_interrupt_ends_the_loop_at_once():
    def step(state, batch, key):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        pytest.fail("the second one raises inside the step")

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        make_loop(10, step=step).run()
    assert signal.getsignal(signal.SIGINT) is before


def test_repeated_sigterm_is_one_request():
    """Schedulers send SIGTERM more than once before they kill."""

    def step(state, batch, key):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        return state + 1, {"loss": state}

    loop = make_loop(10, step=step)
    assert loop.run() == 1
    assert loop.stop_reason == "SIGTERM"


def test_an_error_restores_the_signal_handlers():
    def step(state, batch, key):
        raise ValueError("broken")

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="broken"):
        make_loop(10, step=step).run()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_runs_outside_of_the_main_thread():
    loop = make_loop(5)
    thread = threading.Thread(target=loop.run)
    thread.start()
    thread.join(timeout=30)
    assert loop.state == 5


def test_step_times_exclude_hooks():
    """With metrics read at once, each step's time is its own; a pause before restart_clock does not
    count."""
    seconds = []

    class Clock(Hook):
        def after_step(self, loop):
            loop.wait()
            if loop.step == 2:
                time.sleep(0.6)
                loop.restart_clock()

        def on_metrics(self, loop, step, metrics, duration):
            seconds.append(duration)

    def step(state, batch, key):
        time.sleep(0.05)
        return state + 1, {"loss": state}

    make_loop(4, Clock(), step=step).run()
    assert all(0.05 <= duration < 0.6 for duration in seconds), seconds


def flagged_step(flags):
    """A step whose metrics carry the all-reduced stop flag; without data it changes nothing."""

    def step(state, batch, key):
        flag = flags.get(state, StopFlag.CONTINUE)
        new = state if flag == StopFlag.DATA_ENDED else state + batch
        return new, {"loss": state, STOP_FLAG: flag}

    return step


def test_a_request_to_stop_is_sent_to_other_processes_first():
    """The loop goes on until the flag comes back with the metrics of a step."""
    loader = Loader(processes=2)

    def step(state, batch, key):
        if state == 3:
            loop.request_stop("enough")
            assert loop.stop_reason is None
        flag = StopFlag.STOP if state == 4 else StopFlag.CONTINUE
        return state + 1, {"loss": state, STOP_FLAG: flag}

    loop = make_loop(100, step=step, loader=loader)
    loop.run()
    assert loader.stop_requested
    assert loop.stop_reason == "enough"
    assert loop.step == 4 + 1 + MAX_INFLIGHT


def test_all_processes_stop_when_the_stop_flag_is_read():
    """Another process was asked to stop in step 4; every process reads that MAX_INFLIGHT steps
    later, and none leaves before."""
    journal = Journal()
    loop = make_loop(100, journal, step=flagged_step({4: StopFlag.STOP}))
    loop.run()
    assert loop.stop_reason == STOPPED_ELSEWHERE
    assert loop.step == loop.state == 4 + 1 + MAX_INFLIGHT
    assert journal.steps("metrics") == list(range(loop.step))


def test_a_step_without_data_in_one_process_does_not_count():
    journal = Journal()
    loop = make_loop(100, journal, step=flagged_step({5: StopFlag.DATA_ENDED}))
    loop.run()
    assert loop.stop_reason == "the data ended"
    assert loop.step == loop.state == 5
    assert journal.steps("metrics") == list(range(5))  # metrics of later steps are dropped
