"""`dispatch` and `combine` against numpy queues. Devices are the lanes of a vmap, which supports
all collectives but `ragged_all_to_all`: that one is emulated from its documentation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.kernels.all_to_all import (
    AllToAllSpec,
    combine,
    combine_gather_vjp,
    dispatch,
    dispatch_gather_vjp,
    plan_all_to_all,
)
from tests.support.all_to_all import emulated_ragged_all_to_all

DEVICES, LOCAL_ROWS, GROUPS, ROW_DIM = 4, 10, 8, 3
OWN_GROUPS = GROUPS // DEVICES


@pytest.fixture(params=["padded", "ragged"])
def ragged(request, monkeypatch):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated_ragged_all_to_all)
    return request.param == "ragged"


def random_groups(seed=0):
    """[P, N], sorted; some rows have no group."""
    groups = np.random.default_rng(seed).integers(0, GROUPS + 1, (DEVICES, LOCAL_ROWS))
    return np.sort(groups, axis=1)


EVEN = np.arange(LOCAL_ROWS) * GROUPS // LOCAL_ROWS
CASES = {
    "even": np.broadcast_to(EVEN, (DEVICES, LOCAL_ROWS)),
    "random": random_groups(),
    "all to one": np.full((DEVICES, LOCAL_ROWS), 5),
    "nobody": np.full((DEVICES, LOCAL_ROWS), GROUPS),
    "one device sends": np.where(np.arange(DEVICES)[:, None] == 2, random_groups(1), GROUPS),
}
BUFFER_ROWS = {
    "all rows fit": DEVICES * LOCAL_ROWS,
    "more than local rows": 13,
    "fewer than local rows": 7,
    "one": 1,
}


def owner_queues(groups, buffer_rows):
    """For each owner the (group, device, row) of the rows that it accepts, in order."""
    rows = [
        (group, device, row)
        for device in range(DEVICES)
        for row, group in enumerate(groups[device])
    ]
    return [
        sorted(row for row in rows if row[0] // OWN_GROUPS == owner)[:buffer_rows]
        for owner in range(DEVICES)
    ]


def make_plan(groups, spec):
    sizes = jnp.sum(groups[:, None] == jnp.arange(GROUPS), axis=0, dtype=jnp.int32)
    return plan_all_to_all(sizes, spec)


@functools.cache
def round_trip(spec):
    """Compiled once: the routing is data."""

    def run(rows, groups):
        plan = make_plan(groups, spec)
        received = dispatch(rows, plan, spec)
        return received, combine(received * 2, plan, spec), plan.group_sizes, plan.group_ids

    return jax.jit(jax.vmap(run, axis_name="p"))


@pytest.mark.parametrize("buffer_rows", BUFFER_ROWS.values(), ids=list(BUFFER_ROWS))
@pytest.mark.parametrize("groups", CASES.values(), ids=list(CASES))
def test_dispatch_and_combine_match_queues(groups, buffer_rows, ragged):
    spec = AllToAllSpec(("p",), LOCAL_ROWS, buffer_rows, ragged=ragged, varying_axes=())
    draw = np.random.default_rng(2).normal
    rows = draw(size=(DEVICES, LOCAL_ROWS, ROW_DIM)).astype(np.float32)
    dispatched, combined, group_sizes, group_ids = round_trip(spec)(rows, groups)
    expected = np.zeros_like(rows)
    for owner, queue in enumerate(owner_queues(groups, buffer_rows)):
        received = np.zeros((buffer_rows, ROW_DIM), np.float32)
        for index, (_, device, row) in enumerate(queue):
            received[index] = rows[device, row]
            expected[device, row] = 2 * received[index]
        np.testing.assert_array_equal(dispatched[owner], received)
        local = [group - owner * OWN_GROUPS for group, _, _ in queue]
        padding = [OWN_GROUPS] * (buffer_rows - len(queue))
        np.testing.assert_array_equal(group_ids[owner], local + padding)
        np.testing.assert_array_equal(group_sizes[owner], np.bincount(local, minlength=OWN_GROUPS))
    np.testing.assert_array_equal(combined, expected)
    assert group_sizes.dtype == jnp.int32


@pytest.mark.parametrize("buffer_rows", [DEVICES * LOCAL_ROWS, 7])
def test_gradients_take_the_opposite_direction(buffer_rows, ragged):
    """Both are linear and one-to-one: the cotangent of a row returns to the row."""
    spec = AllToAllSpec(("p",), LOCAL_ROWS, buffer_rows, ragged=ragged, varying_axes=())
    groups = random_groups()
    draw = np.random.default_rng(3).normal
    local, remote = (
        draw(size=(DEVICES, count, ROW_DIM)).astype(np.float32)
        for count in (LOCAL_ROWS, buffer_rows)
    )

    def gradients(local, remote, groups):
        plan = make_plan(groups, spec)
        _, dispatch_vjp = jax.vjp(lambda rows: dispatch_gather_vjp(rows, plan, spec), local)
        _, combine_vjp = jax.vjp(lambda rows: combine_gather_vjp(rows, plan, spec), remote)
        return dispatch_vjp(remote)[0], combine_vjp(local)[0]

    dlocal, dremote = jax.jit(jax.vmap(gradients, axis_name="p"))(local, remote, groups)
    expected_dlocal, expected_dremote = np.zeros_like(local), np.zeros_like(remote)
    for owner, queue in enumerate(owner_queues(groups, buffer_rows)):
        for index, (_, device, row) in enumerate(queue):
            expected_dlocal[device, row] = remote[owner, index]
            expected_dremote[owner, index] = local[device, row]
    np.testing.assert_array_equal(dlocal, expected_dlocal)
    np.testing.assert_array_equal(dremote, expected_dremote)
