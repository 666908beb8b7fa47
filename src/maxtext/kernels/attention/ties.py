"""The k largest of a row when some are equal, chosen as PyTorch chooses on CPUs.

An indexer's score is exactly 0 for every key that none of its heads likes, so with few heads the
k-th largest score is often one of many equals. Which of them are kept is arbitrary, but it changes
the output, and whoever compares a model with transformers compares this too. There the choice is
that of C++'s `nth_element`, as libstdc++ has it: partitions around the median of three, until the
k-th place is found. Here each partition is done for a whole row at once.

That choice depends on how many keys the row has, hidden ones after the query included: with ties,
the selection of a token changes when tokens are appended. So no cache can hold what a layer behind
such a selection computed, and on CPUs such models compute all tokens again
(`ties_depend_on_length`). Elsewhere the first of equals are chosen, whatever follows.

Shapes: N keys of a row.
"""

import jax
import jax.numpy as jnp
from jax import Array

from maxtext.kernels.attention.masks import largest

PARTIAL_SORT = 64  # from this many times as many keys as are kept, PyTorch goes another way

Row = tuple[Array, Array]  # scores and the keys that they are of, in their current order [N]


def ties_depend_on_length() -> bool:
    """Whether `largest_keys` chooses among equals as PyTorch does: on CPUs."""
    return jax.default_backend() == "cpu"


def largest_keys(scores: Array, count: int, lengths: Array | None = None) -> Array:
    """As `largest` over the last dimension of scores [B, S, N]; on CPUs equals are chosen as
    PyTorch does, which costs nothing where the choice is clear. `lengths` [B]: the keys of each
    row, if the others are padding after them; the choice is then that of a row without padding."""
    chosen = largest(scores, count)
    if not ties_depend_on_length() or (
        lengths is None and scores.shape[-1] >= PARTIAL_SORT * count
    ):
        return chosen
    size = scores.shape[-1]
    lengths = jnp.full(scores.shape[0], size) if lengths is None else lengths
    lengths = jnp.broadcast_to(
        lengths.reshape(-1, *[1] * (scores.ndim - 1)), (*scores.shape[:-1], 1)
    )
    cut = jnp.min(jnp.where(chosen, scores, jnp.inf), axis=-1, keepdims=True)
    unclear = jnp.any(~chosen & (scores == cut) & jnp.isfinite(cut), axis=-1, keepdims=True)
    unclear &= lengths < PARTIAL_SORT * count

    def by_torch() -> Array:
        choose = jax.vmap(lambda row, length: largest_as_torch(row, count, length))
        return jnp.where(
            unclear,
            choose(scores.reshape(-1, size), lengths.reshape(-1)).reshape(scores.shape),
            chosen,
        )

    return jax.lax.cond(jnp.any(unclear), by_torch, lambda: chosen)


def largest_as_torch(scores: Array, count: int, length: Array | int | None = None) -> Array:
    """True for the `count` largest scores of a row [N], of equals those that `nth_element` leaves
    in front. With `length`, N is the length of the row with padding after it."""
    size = scores.shape[0]
    length = jnp.asarray(size if length is None else length, jnp.int32)

    def unfinished(state: tuple) -> Array:
        _, first, last, depth = state
        return (last - first > 3) & (depth > 0)

    def partition(state: tuple) -> tuple:
        row, first, last, depth = state
        row, cut = partition_around_pivot(row, first, last)
        behind = cut <= count - 1
        return row, jnp.where(behind, cut, first), jnp.where(behind, last, cut), depth - 1

    depth = 2 * (31 - jax.lax.clz(length))
    row, first, last, _ = jax.lax.while_loop(
        unfinished, partition, ((scores, jnp.arange(size)), jnp.int32(0), length, depth)
    )
    # What is left of at most three is sorted, equals in their order; the rest of the row is already
    # where it belongs.
    place = jnp.arange(size)
    inside = (place >= first) & (place < last)
    rank = jnp.argsort(
        jnp.where(inside, -row[0], jnp.where(place < first, -jnp.inf, jnp.inf)), stable=True
    )
    order = jnp.where(inside, row[1][rank], row[1])
    return jnp.zeros(size, bool).at[order[:count]].set(True)


def partition_around_pivot(row: Row, first: Array, last: Array) -> tuple[Row, Array]:
    """The median of three goes to `first`; then what is smaller and what is larger changes sides,
    pair by pair, from both ends. Returns where they meet."""
    row = swapped(
        row, first, median_place(row[0], first + 1, first + (last - first) // 2, last - 1)
    )
    values, pivot = row[0], row[0][first]
    size = values.shape[0]
    place = jnp.arange(size)
    inside = (place > first) & (place < last)
    stops_left, stops_right = inside & (values <= pivot), inside & (values >= pivot)
    left = jnp.sort(jnp.where(stops_left, place, size))  # where a walk from the left stops, in turn
    right = jnp.sort(jnp.where(stops_right, place, -1), descending=True)
    crossing = left < right
    swaps = jnp.sum(crossing)
    source = place.at[jnp.where(crossing, left, size)].set(right, mode="drop")
    source = source.at[jnp.where(crossing, right, size)].set(left, mode="drop")
    before = jnp.where(swaps > 0, right[swaps - 1], size)
    return (row[0][source], row[1][source]), jnp.minimum(left[jnp.minimum(swaps, size - 1)], before)


def median_place(values: Array, a: Array, b: Array, c: Array) -> Array:
    """Which of three places holds the median, by the comparisons that libstdc++ makes."""
    x, y, z = values[a], values[b], values[c]
    descending = jnp.where(y > z, b, jnp.where(x > z, c, a))
    return jnp.where(x > y, descending, jnp.where(x > z, a, jnp.where(y > z, c, b)))


def swapped(row: Row, one: Array, other: Array) -> Row:
    def swap(values: Array) -> Array:
        return values.at[one].set(values[other]).at[other].set(values[one])

    return swap(row[0]), swap(row[1])
