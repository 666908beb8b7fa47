"""The loop with steps that only count: order of hooks, how late metrics are read, and every way it
ends.
"""

import os
import signal
import threading
import time

import pytest

from maxtext.trainers.loop import AHEAD, ASKED_ELSEWHERE, Hook, Loop
from maxtext.trainers.step import ENDED, GO_ON, STOP


class Journal(Hook):
    """Writes down what it is told, and how many steps were dispatched by then."""

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


def make_loop(steps, *hooks, step=count, batches=None, first_step=0):
    endless = iter(lambda: 1, None)
    return Loop(
        first_step, step, endless if batches is None else batches, None, steps, hooks, first_step
    )


def test_every_hook_sees_every_step_in_order():
    first, second = Journal(), Journal()
    loop = make_loop(7, first, second)
    assert loop.run() == loop.state == loop.step == 7
    assert loop.stop is None
    assert first.events == second.events
    for kind in ("before", "after", "metrics"):
        assert first.steps(kind) == list(range(7))
    assert first.events[-1] == ("end", 7, 7)
    assert first.steps("end") == [7]
    places = {event[:2]: place for place, event in enumerate(first.events)}
    for step in range(7):
        assert places["before", step] < min(places["after", step], places["metrics", step])


def test_metrics_are_read_late_but_at_most_so_many_steps():
    journal = Journal()
    make_loop(9, journal).run()
    dispatched = {step: count for kind, step, count in journal.events if kind == "metrics"}
    late = [dispatched[step] - 1 - step for step in range(9)]
    # While steps are dispatched the host stays ahead by exactly AHEAD; at the end it has to wait
    # for the rest.
    assert late == [AHEAD] * (9 - AHEAD) + list(range(AHEAD - 1, -1, -1))


class Value:
    """A number that is not there until `ready`, as one that a device still computes."""

    def __init__(self, value, ready):
        self.value, self.ready = value, ready

    def __float__(self):
        assert self.ready.wait(timeout=20), (
            "the loop waited for a step before it had dispatched the next ones"
        )
        return float(self.value)


def test_the_host_runs_ahead_of_the_device():
    """No value comes before AHEAD more steps were asked for: a loop that waited for one earlier
    would never end.
    """
    ready = [threading.Event() for _ in range(8 + AHEAD)]

    def step(state, batch, key):
        if state >= AHEAD:
            ready[state - AHEAD].set()
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


def test_the_data_may_end_first():
    journal = Journal()
    loop = make_loop(100, journal, batches=iter([1, 1, 1]))
    assert loop.run() == 3
    assert (loop.step, loop.stop) == (3, "the data ended")
    assert journal.steps("before") == journal.steps("metrics") == [0, 1, 2]
    assert journal.events[-1] == ("end", 3, 3)


def test_no_steps_and_no_data():
    for loop in (make_loop(0), make_loop(5, batches=iter([]))):
        assert loop.run() == 0
        assert loop.step == 0


def test_it_goes_on_from_a_later_step():
    journal = Journal()
    loop = make_loop(5, journal, first_step=3)
    loop.run()
    assert journal.steps("metrics") == [3, 4]
    assert loop.step == 5


def test_a_hook_ends_it_after_the_current_step():
    class Enough(Hook):
        def after_step(self, loop):
            if loop.step == 4:
                loop.stop = "enough"

    journal = Journal()
    loop = make_loop(100, Enough(), journal)
    assert loop.run() == 4
    assert loop.stop == "enough"
    assert journal.steps("metrics") == [0, 1, 2, 3], "what was dispatched is also read"
    assert journal.steps("end") == [4]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_it_after_the_current_step(number):
    def step(state, batch, key):
        if state == 3:
            os.kill(os.getpid(), number)
        return state + 1, {"loss": state}

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    journal = Journal()
    loop = make_loop(1000, journal, step=step)
    assert loop.run() == 4, "the step in which it came is finished, no other is begun"
    assert loop.stop == number.name
    assert journal.steps("metrics") == journal.steps("after") == [0, 1, 2, 3]
    assert journal.steps("end") == [4]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_second_interrupt_ends_it_at_once():
    def step(state, batch, key):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        pytest.fail("the second one raises inside the step")

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        make_loop(10, step=step).run()
    assert signal.getsignal(signal.SIGINT) is before


def test_repeated_terminations_do_not_tear_it():
    """Schedulers send SIGTERM more than once before they kill."""

    def step(state, batch, key):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        return state + 1, {"loss": state}

    loop = make_loop(10, step=step)
    assert loop.run() == 1
    assert loop.stop == "SIGTERM"


def test_an_error_passes_and_leaves_the_handlers_as_they_were():
    def step(state, batch, key):
        raise ValueError("broken")

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="broken"):
        make_loop(10, step=step).run()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_it_runs_outside_of_the_main_thread():
    loop = make_loop(5)
    thread = threading.Thread(target=loop.run)
    thread.start()
    thread.join(timeout=30)
    assert loop.state == 5


def test_times_add_up_and_leave_out_what_a_hook_took():
    """With metrics read at once, each step's time is its own; after restart_clock a pause does not
    count.
    """
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


def voting(votes):
    """Steps whose metrics carry the strongest vote of several processes; one without data changes
    nothing.
    """

    def step(state, batch, key):
        vote = votes.get(state, GO_ON)
        return (state if vote == ENDED else state + batch), {"loss": state, "vote": vote}

    return step


def test_all_processes_stop_when_the_vote_is_read():
    """One process was asked in step 4; every process reads that after AHEAD more steps, and none
    leaves before.
    """
    journal = Journal()
    loop = make_loop(100, journal, step=voting({4: STOP}))
    loop.run()
    assert loop.stop == ASKED_ELSEWHERE
    assert loop.step == loop.state == 4 + 1 + AHEAD
    assert journal.steps("metrics") == list(range(loop.step))


def test_a_step_without_data_in_one_process_is_no_step():
    journal = Journal()
    loop = make_loop(100, journal, step=voting({5: ENDED}))
    loop.run()
    assert loop.stop == "the data ended"
    assert loop.step == loop.state == 5
    assert journal.steps("metrics") == list(range(5))  # those that were on their way are not told
