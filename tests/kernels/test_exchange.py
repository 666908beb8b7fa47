"""The exchange of rows against numpy queues. Devices are the lanes of a vmap, which knows all
collectives but one: the ragged one stands here as its documentation describes it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.kernels.exchange import Way, fetch, fetch_fast, make_plan, send, send_fast

DEVICES, HOME, GROUPS, SIZE = 4, 10, 8, 3
OWN = GROUPS // DEVICES


def emulated(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """One slice for each device. NaN everywhere where the two sides do not agree on its size."""
    arrays = (operand, input_offsets, send_sizes, output_offsets)
    operands, starts, sizes, ends = (jax.lax.all_gather(array, axis_name) for array in arrays)
    here, places = jax.lax.axis_index(axis_name), jnp.arange(len(output))
    for source in range(len(operands)):
        size, start, goal = (array[source, here] for array in (sizes, starts, ends))
        mine = (places >= goal) & (places < goal + size)
        sent = jnp.take(
            operands[source], places - goal + start, axis=0, mode="fill", fill_value=jnp.nan
        )
        output = jnp.where(mine[:, None], sent, output)
        output = jnp.where(size == recv_sizes[source], output, jnp.nan)
    return output


@pytest.fixture(params=["padded", "ragged"])
def ragged(request, monkeypatch):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated)
    return request.param == "ragged"


def random_groups(seed=0):
    """[P, N], sorted; some rows have no group."""
    return np.sort(np.random.default_rng(seed).integers(0, GROUPS + 1, (DEVICES, HOME)), axis=1)


CASES = {
    "even": np.broadcast_to(np.arange(HOME) * GROUPS // HOME, (DEVICES, HOME)),
    "random": random_groups(),
    "all to one": np.full((DEVICES, HOME), 5),
    "nobody": np.full((DEVICES, HOME), GROUPS),
    "one device sends": np.where(np.arange(DEVICES)[:, None] == 2, random_groups(1), GROUPS),
}
BOUNDS = {"room for all": DEVICES * HOME, "more than home": 13, "less than home": 7, "one": 1}


def queues(groups, rows):
    """For each owner the (group, device, place) of the rows that it takes, in order."""
    everything = [
        (group, device, place)
        for device in range(DEVICES)
        for place, group in enumerate(groups[device])
    ]
    return [
        sorted(row for row in everything if row[0] // OWN == owner)[:rows]
        for owner in range(DEVICES)
    ]


def plan_of(groups, way):
    sizes = jnp.sum(groups[:, None] == jnp.arange(GROUPS), axis=0, dtype=jnp.int32)
    return make_plan(sizes, way)


@functools.cache
def round_trip(way):
    """Compiled once: where rows go is data."""

    def run(home, groups):
        plan = plan_of(groups, way)
        there = send(home, plan, way)
        return there, fetch(there * 2, plan, way), plan.sizes, plan.groups

    return jax.jit(jax.vmap(run, axis_name="p"))


@pytest.mark.parametrize("rows", BOUNDS.values(), ids=list(BOUNDS))
@pytest.mark.parametrize("groups", CASES.values(), ids=list(CASES))
def test_there_and_back(groups, rows, ragged):
    way = Way(("p",), HOME, rows, ragged, ())
    home = np.random.default_rng(2).normal(size=(DEVICES, HOME, SIZE)).astype(np.float32)
    there, back, sizes, own = round_trip(way)(home, groups)
    expected = np.zeros_like(home)
    for owner, queue in enumerate(queues(groups, rows)):
        arrived = np.zeros((rows, SIZE), np.float32)
        for row, (_, device, place) in enumerate(queue):
            arrived[row] = home[device, place]
            expected[device, place] = 2 * arrived[row]
        np.testing.assert_array_equal(there[owner], arrived)
        local = [group - owner * OWN for group, _, _ in queue]
        np.testing.assert_array_equal(own[owner], local + [OWN] * (rows - len(queue)))
        np.testing.assert_array_equal(sizes[owner], np.bincount(local, minlength=OWN))
    np.testing.assert_array_equal(back, expected)
    assert sizes.dtype == jnp.int32


@pytest.mark.parametrize("rows", [DEVICES * HOME, 7])
def test_gradients(rows, ragged):
    """Each way is linear, and a row has one place on either side: its cotangent goes the other
    way.
    """
    way, groups = Way(("p",), HOME, rows, ragged, ()), random_groups()
    draw = np.random.default_rng(3).normal
    home, there = (draw(size=(DEVICES, count, SIZE)).astype(np.float32) for count in (HOME, rows))

    def pulls(home, there, groups):
        plan = plan_of(groups, way)
        _, sent = jax.vjp(lambda rows: send_fast(rows, plan, way), home)
        _, fetched = jax.vjp(lambda rows: fetch_fast(rows, plan, way), there)
        return sent(there)[0], fetched(home)[0]

    by_home, by_there = jax.jit(jax.vmap(pulls, axis_name="p"))(home, there, groups)
    expected_home, expected_there = np.zeros_like(home), np.zeros_like(there)
    for owner, queue in enumerate(queues(groups, rows)):
        for row, (_, device, place) in enumerate(queue):
            expected_home[device, place], expected_there[owner, row] = (
                there[owner, row],
                home[device, place],
            )
    np.testing.assert_array_equal(by_home, expected_home)
    np.testing.assert_array_equal(by_there, expected_there)
