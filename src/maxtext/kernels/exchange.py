"""Rows that travel between devices: each goes to the device that owns its group, and its result
comes back.

For use inside `jax.shard_map`. Shapes: P devices along some mesh axes, N rows of a device at home,
R rows of its buffer for those that it works on, X groups, of which device p owns the p-th X/P, C
rows a device sends to another at most, E row width.

At the owner, rows stand in the order of groups, within a group in that of the devices that they
come from, and then as they stood there. If more than R arrive, the last ones in this order do not
travel: they come back as zeros.

A ragged exchange moves just the rows that travel. Platforms without it move padded blocks of C =
min(N, R) rows from every device to every other; results are the same. Shapes never depend on where
rows go.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

RAGGED_PLATFORMS = ("tpu", "gpu")  # whose compilers know ragged_all_to_all


class Way(NamedTuple):
    """How rows travel. `varying`: all mesh axes over which rows differ, those of the exchange among
    them.
    """

    axes: tuple[str, ...]
    home: int  # N
    rows: int  # R
    ragged: bool
    varying: tuple[str, ...]


class Moves(NamedTuple):
    """A partial one-to-one map between places here and there, as indices both ways; out of bounds
    where there is none.

    `forth` [places there] of places here, `back` [places here] of places there.
    """

    forth: Array
    back: Array


class Slices(NamedTuple):
    """What `ragged_all_to_all` has to know, each [P] of int32."""

    input_offsets: Array
    send_sizes: Array
    output_offsets: Array
    recv_sizes: Array


class Plan(NamedTuple):
    """Where rows go. `sizes` [X/P] and `groups` [R] are of the owner's sorted rows; X/P is the
    group of none.
    """

    packed: Moves | None  # padded: home and the blocks that are sent
    forth: Slices | None  # ragged
    back: Slices | None
    sorted: Moves  # what has arrived and the owner's order
    sizes: Array
    groups: Array


def make_plan(sizes: Array, way: Way) -> Plan:
    """For rows that are sorted by group, `sizes` [X] of each; what is behind the last group stays
    at home.
    """
    counts = jax.lax.all_gather(sizes, way.axes)
    peers = counts.shape[0]
    counts = counts.reshape(peers, peers, -1)  # [from, to, group of the owner]
    kept = within(counts, way.rows)
    here = jax.lax.axis_index(way.axes)
    sent = jnp.sum(kept, axis=2)  # [from, to]
    at_home, arrived = (
        before(jnp.sum(counts, axis=2), 1),
        before(sent, 0),
    )  # [from, to]: the first place of each block
    mine = kept[:, here]  # [from, group]

    packed = forth = back = None
    if way.ragged:
        room, blocks = way.rows, arrived[:, here]
        forth = Slices(at_home[here], sent[here], arrived[here], sent[:, here])
        back = Slices(arrived[:, here], sent[:, here], at_home[:, here], sent[here])
    else:
        block = min(way.home, way.rows)
        room, blocks = peers * block, jnp.arange(peers) * block
        packed = Moves(
            follow(room, blocks, at_home[here], sent[here], nowhere=way.home),
            follow(way.home, at_home[here], blocks, sent[here], nowhere=room),
        )
    arrivals = blocks[:, None] + before(
        mine, 1
    )  # [from, group]: the first place of each, as they arrive
    ordered = before(mine.T.reshape(-1), 0).reshape(
        mine.T.shape
    )  # [group, from]: and as the owner sorts them
    moves = Moves(
        follow(
            way.rows, ordered.reshape(-1), arrivals.T.reshape(-1), mine.T.reshape(-1), nowhere=room
        ),
        follow(
            room, arrivals.reshape(-1), ordered.T.reshape(-1), mine.reshape(-1), nowhere=way.rows
        ),
    )
    own = jnp.sum(mine, axis=0)
    return Plan(packed, forth, back, moves, own, find(jnp.cumsum(own), way.rows))


def within(counts: Array, rows: int) -> Array:
    """counts [from, to, group] without what is too much for an owner's buffer, last in its order.

    What remains of a block is always its beginning, since the block is in the order of groups, too.
    """
    in_order = counts.transpose(1, 2, 0).reshape(len(counts), -1)  # [to, (group, from)]
    kept = jnp.clip(rows - before(in_order, 1), 0, in_order)
    return kept.reshape(len(counts), -1, len(counts)).transpose(2, 0, 1)


def before(sizes: Array, axis: int) -> Array:
    """The sum of all sizes before each."""
    return jnp.cumsum(sizes, axis) - sizes


def find(bounds: Array, length: int) -> Array:
    """For each place below `length`, how many of the sorted bounds are not above it."""
    # One comparison with each bound is fused into a sum; a search would gather again and again.
    return jnp.searchsorted(bounds, jnp.arange(length), side="right", method="compare_all").astype(
        jnp.int32
    )


def follow(length: int, here: Array, there: Array, sizes: Array, nowhere: int) -> Array:
    """[length]: where each place goes, for runs of `sizes` that begin `here` (ascending, from 0)
    and go `there`.
    """
    run = (
        find(here, length) - 1
    )  # of runs that begin at the same place, the last: the others are empty
    offset = jnp.arange(length, dtype=jnp.int32) - here[run]
    return jnp.where(offset < sizes[run], there[run] + offset, nowhere)


def pick(rows: Array, places: Array) -> Array:
    return jnp.take(rows, places, axis=0, mode="fill", fill_value=0)


def send(rows: Array, plan: Plan, way: Way) -> Array:
    """rows [N, E] -> [R, E] of the groups that this device owns, sorted; zeros behind the last."""
    if plan.packed is None:
        return pick(ragged(rows, plan.forth, way.rows, way), plan.sorted.forth)
    return pick(swap(pick(rows, plan.packed.forth), way), plan.sorted.forth)


def fetch(rows: Array, plan: Plan, way: Way) -> Array:
    """The way back: [R, E] -> [N, E], zeros for rows that did not travel."""
    arrived = pick(rows, plan.sorted.back)
    if plan.packed is None:
        return ragged(arrived, plan.back, way.home, way)
    return pick(swap(arrived, way), plan.packed.back)


def swap(rows: Array, way: Way) -> Array:
    """[P·C, E]: the p-th block goes to device p, and the one of device p comes to its place."""
    return jax.lax.all_to_all(rows, way.axes, 0, 0, tiled=True)


def ragged(rows: Array, slices: Slices | None, count: int, way: Way) -> Array:
    """Into zeros [count, E]."""
    assert slices is not None
    zeros = jax.lax.pcast(jnp.zeros((count, rows.shape[1]), rows.dtype), way.varying, to="varying")
    return jax.lax.ragged_all_to_all(rows, zeros, *slices, axis_name=way.axes)


# Each is the transpose of the other. Autodiff finds as much, with scatters where these gather.
send_fast = jax.custom_vjp(send, nondiff_argnums=(2,))
send_fast.defvjp(
    lambda rows, plan, way: (send(rows, plan, way), plan),
    lambda way, plan, cotangent: (fetch(cotangent, plan, way), None),
)
fetch_fast = jax.custom_vjp(fetch, nondiff_argnums=(2,))
fetch_fast.defvjp(
    lambda rows, plan, way: (fetch(rows, plan, way), plan),
    lambda way, plan, cotangent: (send(cotangent, plan, way), None),
)
