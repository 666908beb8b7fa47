"""Batch-size ramp-up: the rows of each step, and that every row comes once, also across a
restart.
"""

import json

import numpy as np
import pytest

from maxtext.common.errors import ConfigError
from maxtext.configs.derive import Devices
from maxtext.input_pipeline import FIELDS, BatchIterator, DataStreams
from maxtext.models.configuration import load
from maxtext.trainers.batch_size import batch_size_at, batch_sizes


def ramp_up(config, source):
    return DataStreams(
        lambda *_: source, 1, lambda step: batch_size_at(config, step), batch_sizes(config)
    )


def config_of(start, increment, full, samples, devices=1, microbatches=1, overrides=()):
    ramp = [
        "enable_rampup_batch_size=true", f"per_device_batch_size_start={start}",
        f"per_device_batch_size_increment={increment}", f"per_device_batch_size={full}",
        f"global_rampup_samples={samples}", f"gradient_accumulation_steps={microbatches}",
    ]  # fmt: skip
    return load(None, [*ramp, *overrides], environ={}, devices=Devices(devices))


def closed_form(start, increment, full, samples, devices=1, microbatches=1):
    """The rows of each step until the full size: the k-th of n sizes until k/n of the samples are
    used.
    """
    increments = round((full - start) / increment)
    rows = []
    for stage in range(increments):
        while sum(rows) * increments < samples * (stage + 1):
            rows.append(round((start + stage * increment) * devices) * microbatches)
    return rows


class Numbered(BatchIterator):
    """Rows that carry their own number, from 0, in batches of the full size; `limit` batches at
    most.
    """

    def __init__(self, rows, limit=10**9):
        self.rows, self.limit, self.batch = rows, limit, 0

    def __next__(self):
        if self.batch == self.limit:
            raise StopIteration
        first, self.batch = self.batch * self.rows, self.batch + 1
        rows = np.arange(first, first + self.rows, dtype=np.int32)[:, None] * np.ones(3, np.int32)
        return {name: rows + 1000 * index for index, name in enumerate(FIELDS)}

    def get_state(self):
        return {"batch": self.batch}

    def set_state(self, state):
        self.batch = state["batch"]

    def reset(self):
        self.batch = 0


CASES = [
    {"start": 2, "increment": 2, "full": 8, "samples": 60},
    {"start": 1, "increment": 1, "full": 5, "samples": 37},  # shares that no size divides
    {"start": 4, "increment": 2, "full": 12, "samples": 500},
    {"start": 3, "increment": 5, "full": 8, "samples": 1},
    {"start": 1, "increment": 1, "full": 3, "samples": 40, "devices": 4},
    {"start": 1, "increment": 1, "full": 3, "samples": 40, "devices": 2, "microbatches": 2},
    {"start": 1.3, "increment": 0.9, "full": 4.0, "samples": 96, "devices": 8},
    {
        "start": 1.3,
        "increment": 0.9,
        "full": 4.0,
        "samples": 3,
        "devices": 8,
    },  # fewer than one batch
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_batch_sizes_follow_the_closed_form_without_losing_rows(case):
    expected, config = closed_form(**case), config_of(**case)
    full = round(case["full"]) * case.get("devices", 1) * case.get("microbatches", 1)
    assert config.rampup_end_step == len(expected)
    expected = [*expected, full, full, full]
    assert [batch_size_at(config, step) for step in range(len(expected))] == expected
    assert batch_size_at(config, 10**6) == full

    batches = ramp_up(config, Numbered(full))
    seen = []
    for rows in expected:
        batch = next(batches)
        assert set(batch) == set(FIELDS)
        for index, name in enumerate(FIELDS):
            assert batch[name].shape == (rows, 3)
            np.testing.assert_array_equal(batch[name][:, 0] - 1000 * index, batch["inputs"][:, 0])
        seen += batch["inputs"][:, 0].tolist()
    assert seen == list(range(sum(expected)))


def test_fractional_sizes_end_the_ramp_within_a_batch_of_its_samples():
    """10.4, 17.6 and 24.8 rows on 8 devices: rounded each, and 96 samples are reached by the last
    of them.
    """
    config = config_of(1.3, 0.9, 4.0, 96, devices=8)
    ramp = [batch_size_at(config, step) for step in range(config.rampup_end_step)]
    assert ramp == [10, 10, 10, 10, 18, 18, 25]
    assert 96 <= sum(ramp) < 96 + ramp[-1]
    assert batch_sizes(config) == [10, 18, 25, 32]


def test_without_ramp_up_every_step_has_the_full_batch():
    config = load(None, ["per_device_batch_size=6"], environ={}, devices=Devices(2))
    assert {batch_size_at(config, step) for step in range(5)} == {12}


def test_resuming_at_any_step_continues_with_the_same_rows():
    case = {"start": 2, "increment": 3, "full": 8, "samples": 30}
    config = config_of(**case)
    steps = len(closed_form(**case)) + 3
    straight = ramp_up(config, Numbered(8))
    states, rows = [straight.get_state()], []
    for _ in range(steps):
        rows.append(next(straight)["inputs"][:, 0].tolist())
        states.append(straight.get_state())
    for stopped in range(steps + 1):
        resumed = ramp_up(config, Numbered(8))
        resumed.set_state(json.loads(json.dumps(states[stopped])))  # as a checkpoint keeps it
        assert resumed.get_state() == states[stopped]
        assert [next(resumed)["inputs"][:, 0].tolist() for _ in range(steps - stopped)] == rows[
            stopped:
        ]


def test_a_state_can_be_restored_twice_and_reset_restarts():
    config = config_of(2, 2, 8, 60)
    batches = ramp_up(config, Numbered(8))
    first = [next(batches)["inputs"].tolist() for _ in range(5)]
    state = batches.get_state()
    after = [next(batches)["inputs"].tolist() for _ in range(5)]
    batches.set_state(state)
    assert [next(batches)["inputs"].tolist() for _ in range(5)] == after
    batches.reset()
    assert [next(batches)["inputs"].tolist() for _ in range(5)] == first


def test_ramp_up_ends_with_the_data():
    """Rows that do not fill a step are left over, as those that do not fill a batch are."""
    batches = ramp_up(config_of(2, 2, 8, 60), Numbered(8, limit=2))
    assert sum(len(batch["inputs"]) for batch in batches) == 16
    batches = ramp_up(config_of(3, 5, 8, 1), Numbered(8, limit=1))
    assert [len(batch["inputs"]) for batch in batches] == [3]


def test_a_ramp_that_does_not_reach_the_full_size_is_rejected():
    for start, increment in ((3, 2), (8, 1), (9, 1), (2, 0)):
        with pytest.raises(ConfigError, match="ramp-up"):
            config_of(start, increment, 8, 60)


def test_ramp_up_with_fewer_rows_than_devices_is_rejected():
    with pytest.raises(ConfigError, match="needs at least one sequence per device"):
        config_of(0.5, 0.5, 4, 8)
