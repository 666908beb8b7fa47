"""All-to-all of rows for expert parallelism: `dispatch` sends each row to the device that owns its
group, `combine` returns the results.

For use inside `jax.shard_map`. Shapes: P devices along some mesh axes, N local rows of a device, R
rows of its receive buffer, X groups, of which device p owns the p-th X/P, C rows that a device
sends to another at most, E row width.

The owner's rows are sorted by group, within a group by source device, and then by their order
there. If more than R rows arrive, the last ones in this order are dropped: they come back as zeros.

`ragged_all_to_all` transfers only the rows that are sent. Platforms without it exchange padded
blocks of C = min(N, R) rows between all devices; the results are the same. No shape depends on the
routing.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

RAGGED_PLATFORMS = ("tpu", "gpu")  # whose compilers support ragged_all_to_all


class AllToAllSpec(NamedTuple):
    """`varying_axes`: all mesh axes over which rows differ, those of the exchange included."""

    axes: tuple[str, ...]
    local_rows: int  # N
    buffer_rows: int  # R
    ragged: bool
    varying_axes: tuple[str, ...]


class IndexMap(NamedTuple):
    """A partial one-to-one map between source and target rows, as gather indices in both
    directions; out of bounds where a row has no counterpart.

    forward [target rows] holds source rows, inverse [source rows] holds target rows.
    """

    forward: Array
    inverse: Array


class RaggedOffsets(NamedTuple):
    """The arguments of `ragged_all_to_all`, each [P] of int32."""

    input_offsets: Array
    send_sizes: Array
    output_offsets: Array
    recv_sizes: Array


class AllToAllPlan(NamedTuple):
    """Which row goes where. group_sizes [X/P] and group_ids [R] describe the owner's sorted rows;
    the id X/P means no group.
    """

    packing: IndexMap | None  # padded: from local rows to the blocks that are sent
    dispatch_offsets: RaggedOffsets | None  # ragged
    combine_offsets: RaggedOffsets | None
    sorting: IndexMap  # from received rows to the owner's order
    group_sizes: Array
    group_ids: Array


def plan_all_to_all(group_sizes: Array, spec: AllToAllSpec) -> AllToAllPlan:
    """For local rows sorted by group, with group_sizes [X]; rows after the last group are not
    sent.
    """
    counts = jax.lax.all_gather(group_sizes, spec.axes)
    peers = counts.shape[0]
    counts = counts.reshape(peers, peers, -1)  # [source, owner, group of the owner]
    accepted = truncate_counts(counts, spec.buffer_rows)
    rank = jax.lax.axis_index(spec.axes)
    sent = jnp.sum(accepted, axis=2)  # [source, owner]
    # The first row of each block, at its source and at its owner: [source, owner].
    local_starts = exclusive_cumsum(jnp.sum(counts, axis=2), 1)
    received_starts = exclusive_cumsum(sent, 0)
    own_counts = accepted[:, rank]  # [source, group]

    packing = dispatch_offsets = combine_offsets = None
    if spec.ragged:
        received_rows, block_starts = spec.buffer_rows, received_starts[:, rank]
        dispatch_offsets = RaggedOffsets(
            input_offsets=local_starts[rank],
            send_sizes=sent[rank],
            output_offsets=received_starts[rank],
            recv_sizes=sent[:, rank],
        )
        combine_offsets = RaggedOffsets(
            input_offsets=received_starts[:, rank],
            send_sizes=sent[:, rank],
            output_offsets=local_starts[:, rank],
            recv_sizes=sent[rank],
        )
    else:
        block = min(spec.local_rows, spec.buffer_rows)
        received_rows, block_starts = peers * block, jnp.arange(peers) * block
        packing = IndexMap(
            forward=map_runs(
                received_rows, block_starts, local_starts[rank], sent[rank], spec.local_rows
            ),
            inverse=map_runs(
                spec.local_rows, local_starts[rank], block_starts, sent[rank], received_rows
            ),
        )
    # The first row of each run, as received, [source, group], and as sorted, [group, source].
    run_starts = block_starts[:, None] + exclusive_cumsum(own_counts, 1)
    sorted_starts = exclusive_cumsum(own_counts.T.reshape(-1), 0).reshape(own_counts.T.shape)
    sorting = IndexMap(
        forward=map_runs(
            spec.buffer_rows,
            sorted_starts.reshape(-1),
            run_starts.T.reshape(-1),
            own_counts.T.reshape(-1),
            received_rows,
        ),
        inverse=map_runs(
            received_rows,
            run_starts.reshape(-1),
            sorted_starts.T.reshape(-1),
            own_counts.reshape(-1),
            spec.buffer_rows,
        ),
    )
    own_sizes = jnp.sum(own_counts, axis=0)
    return AllToAllPlan(
        packing=packing,
        dispatch_offsets=dispatch_offsets,
        combine_offsets=combine_offsets,
        sorting=sorting,
        group_sizes=own_sizes,
        group_ids=count_bounds(jnp.cumsum(own_sizes), spec.buffer_rows),
    )


def truncate_counts(counts: Array, buffer_rows: int) -> Array:
    """counts [source, owner, group] without the rows that overflow an owner's buffer, which are
    last in its order.

    The remaining rows of a block are always its first ones: a block is also sorted by group.
    """
    in_order = counts.transpose(1, 2, 0).reshape(len(counts), -1)  # [owner, (group, source)]
    accepted = jnp.clip(buffer_rows - exclusive_cumsum(in_order, 1), 0, in_order)
    return accepted.reshape(len(counts), -1, len(counts)).transpose(2, 0, 1)


def exclusive_cumsum(sizes: Array, axis: int) -> Array:
    return jnp.cumsum(sizes, axis) - sizes


def count_bounds(bounds: Array, length: int) -> Array:
    """[length]: for each index, the number of sorted bounds that are not above it."""
    # A comparison with each bound is fused into a sum; a binary search would gather repeatedly.
    counts = jnp.searchsorted(bounds, jnp.arange(length), side="right", method="compare_all")
    return counts.astype(jnp.int32)


def map_runs(
    length: int, source_starts: Array, target_starts: Array, sizes: Array, fill: int
) -> Array:
    """[length]: the target of each source index, for runs of `sizes` that start at `source_starts`
    (ascending, from 0) and map to `target_starts`; `fill` for an index in no run.
    """
    # Runs that start at the same index are empty, except for the last one, which is taken.
    run = count_bounds(source_starts, length) - 1
    offset = jnp.arange(length, dtype=jnp.int32) - source_starts[run]
    return jnp.where(offset < sizes[run], target_starts[run] + offset, fill)


def take_rows(rows: Array, indices: Array) -> Array:
    return jnp.take(rows, indices, axis=0, mode="fill", fill_value=0)


def dispatch(rows: Array, plan: AllToAllPlan, spec: AllToAllSpec) -> Array:
    """rows [N, E] -> [R, E] of the groups that this device owns, sorted; zeros after the last."""
    if plan.packing is None:
        received = ragged_exchange(rows, plan.dispatch_offsets, spec.buffer_rows, spec)
    else:
        received = block_exchange(take_rows(rows, plan.packing.forward), spec)
    return take_rows(received, plan.sorting.forward)


def combine(rows: Array, plan: AllToAllPlan, spec: AllToAllSpec) -> Array:
    """The inverse of `dispatch`: [R, E] -> [N, E], zeros for rows that were not sent."""
    received = take_rows(rows, plan.sorting.inverse)
    if plan.packing is None:
        return ragged_exchange(received, plan.combine_offsets, spec.local_rows, spec)
    return take_rows(block_exchange(received, spec), plan.packing.inverse)


def block_exchange(rows: Array, spec: AllToAllSpec) -> Array:
    """[P·C, E]: the p-th block goes to device p and is replaced by the block from device p."""
    return jax.lax.all_to_all(rows, spec.axes, 0, 0, tiled=True)


def ragged_exchange(
    rows: Array, offsets: RaggedOffsets | None, num_rows: int, spec: AllToAllSpec
) -> Array:
    """[num_rows, E], zeros where no row arrives."""
    assert offsets is not None
    zeros = jnp.zeros((num_rows, rows.shape[1]), rows.dtype)
    zeros = jax.lax.pcast(zeros, spec.varying_axes, to="varying")
    return jax.lax.ragged_all_to_all(rows, zeros, *offsets, axis_name=spec.axes)


# Each is the transpose of the other. Autodiff derives the same, with scatters instead of gathers.
dispatch_gather_vjp = jax.custom_vjp(dispatch, nondiff_argnums=(2,))
dispatch_gather_vjp.defvjp(
    lambda rows, plan, spec: (dispatch(rows, plan, spec), plan),
    lambda spec, plan, drows: (combine(drows, plan, spec), None),
)
combine_gather_vjp = jax.custom_vjp(combine, nondiff_argnums=(2,))
combine_gather_vjp.defvjp(
    lambda rows, plan, spec: (combine(rows, plan, spec), plan),
    lambda spec, plan, drows: (dispatch(drows, plan, spec), None),
)
