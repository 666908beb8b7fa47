"""prefetch: the same batches, an exact state, errors in order, and no leaked thread."""

import threading
import time

import numpy as np
import pytest

from maxtext.input_pipeline import BatchIterator, prefetch


class Counting(BatchIterator):
    """Batches 0, 1, 2, ...; raises at `fails_at`, ends at `ends_at`, and can be held up by
    `gate`.
    """

    def __init__(self, ends_at=1000, fails_at=None):
        self.number, self.ends_at, self.fails_at = 0, ends_at, fails_at
        self.gate = threading.Event()
        self.gate.set()
        self.is_closed = False

    def __next__(self):
        self.gate.wait(10)
        if self.number == self.fails_at:
            raise OSError(f"cannot read {self.number}")
        if self.number == self.ends_at:
            raise StopIteration
        self.number += 1
        return {"inputs": np.array(self.number - 1)}

    def get_state(self):
        return {"number": self.number}

    def set_state(self, state):
        self.number = state["number"]

    def reset(self):
        self.number = 0

    def close(self):
        self.is_closed = True


def take(iterator, count):
    return [int(next(iterator)["inputs"]) for _ in range(count)]


def wait_until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "did not happen within 10 s"
        time.sleep(0.002)


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_yields_the_same_batches_in_order(depth):
    assert [int(batch["inputs"]) for batch in prefetch(Counting(ends_at=20), depth)] == list(
        range(20)
    )


def test_prefetches_at_most_depth_batches():
    inner = Counting()
    iterator = prefetch(inner, 3)
    time.sleep(0.05)
    assert inner.number == 0  # nothing before the first request
    take(iterator, 1)
    wait_until(lambda: inner.number == 4)
    time.sleep(0.05)
    assert inner.number == 4
    iterator.close()


def test_consumer_does_not_wait_for_prefetched_batches():
    inner = Counting()
    iterator = prefetch(inner, 3)
    take(iterator, 1)
    wait_until(lambda: len(iterator.ready) == 3)
    inner.gate.clear()
    assert take(iterator, 3) == [1, 2, 3]
    inner.gate.set()
    iterator.close()


def test_state_is_that_of_the_delivered_batch():
    inner = Counting()
    iterator = prefetch(inner, 4)
    assert iterator.get_state() == {"number": 0}
    assert take(iterator, 3) == [0, 1, 2]
    wait_until(lambda: inner.number == 7)
    assert iterator.get_state() == {"number": 3}
    iterator.close()


def test_set_state_discards_prefetched_batches():
    iterator = prefetch(Counting(), 4)
    take(iterator, 3)
    iterator.set_state({"number": 100})
    assert iterator.get_state() == {"number": 100}
    assert take(iterator, 2) == [100, 101]
    iterator.reset()
    assert take(iterator, 2) == [0, 1]
    iterator.close()


def test_error_is_raised_after_earlier_batches_and_again():
    iterator = prefetch(Counting(fails_at=3), 8)
    assert take(iterator, 3) == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(OSError, match="cannot read 3"):
            next(iterator)
    assert iterator.get_state() == {"number": 3}


def test_stop_iteration_repeats_and_reset_restarts():
    iterator = prefetch(Counting(ends_at=2), 8)
    assert take(iterator, 2) == [0, 1]
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)
    iterator.reset()
    assert take(iterator, 2) == [0, 1]


def test_close_ends_a_thread_that_waits_for_the_consumer():
    inner = Counting()
    iterator = prefetch(inner, 2)
    take(iterator, 1)
    wait_until(lambda: inner.number == 3)
    thread = iterator.thread
    assert thread.daemon
    iterator.close()
    assert not thread.is_alive()
    assert inner.is_closed
    with pytest.raises(ValueError, match="closed"):
        next(iterator)
    iterator.close()  # twice is harmless
