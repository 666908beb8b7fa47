"""The metrics recorded of a step."""

import pytest

from maxtext.trainers.hooks import Throughput


def test_throughput_of_short_steps_is_averaged_over_a_window():
    """Steps of 100 tokens that alternate between 1 and 19 ms run at 10,000 tokens/s, whatever one
    of them took.
    """
    throughput = Throughput()
    assert throughput.add(100, 4.0) == 25.0, "the first step warms up, and counts for itself"
    rates = [throughput.add(100, 0.001 if number % 2 else 0.019) for number in range(200)]
    assert all(rate == pytest.approx(10_000, rel=0.05) for rate in rates[20:])


def test_throughput_of_a_long_step_is_its_own():
    throughput = Throughput()
    rates = [throughput.add(100, seconds) for seconds in (1.0, 2.0, 4.0, 5.0)]
    assert rates == [100.0, 50.0, 25.0, 20.0]
