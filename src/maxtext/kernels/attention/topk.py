"""Top-k masks over scores, and PyTorch's choice among equal scores.

`topk_mask` chooses the first of equals. `torch_topk_mask` chooses, on CPUs, as `torch.topk` does.

An indexer's score is exactly 0 for every key that none of its heads matches, so with few heads the
k-th largest score is often one of many equals. The choice among them is arbitrary, but it changes
the output, and a comparison with transformers also compares it. PyTorch on CPUs chooses by C++'s
`nth_element`, as libstdc++ implements it: partitions around the median of three until the k-th
element is in position. Here each partition runs on all elements of a row at once.

That choice depends on the number of keys of the row, hidden keys after the query included: with
ties, the selection of a token changes when tokens are appended. So a cache cannot hold what a layer
behind such a selection computed, and on CPUs such models recompute all tokens
(`ties_depend_on_length`).

Shapes: N keys of a row.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

PARTIAL_SORT_RATIO = 64  # from N = 64 k on, PyTorch uses another algorithm

Row = tuple[Array, Array]  # scores and the keys they belong to, in their current order [N]


def topk_mask(scores: Array, k: int) -> Array:
    """True for exactly the k largest along the last dimension; the first of equals."""
    threshold = lax.top_k(scores, k)[0][..., -1:]
    above, equal = scores > threshold, scores == threshold
    # Comparisons and a running count instead of a scatter of indices, which is slow on TPUs.
    missing = k - above.sum(axis=-1, keepdims=True)
    return above | (equal & (jnp.cumsum(equal, axis=-1) <= missing))


def ties_depend_on_length() -> bool:
    """Whether `torch_topk_mask` chooses among equals as PyTorch does: on CPUs."""
    return jax.default_backend() == "cpu"


def torch_topk_mask(scores: Array, k: int, lengths: Array | None = None) -> Array:
    """`topk_mask` of scores [B, S, N]; on CPUs it chooses among equals as PyTorch does, at no cost
    if no choice is ambiguous.

    `lengths` [B]: the number of keys of each row, if it is padded; the choice is then that of the
    row without padding.
    """
    chosen = topk_mask(scores, k)
    if not ties_depend_on_length() or (
        lengths is None and scores.shape[-1] >= PARTIAL_SORT_RATIO * k
    ):
        return chosen
    num_keys = scores.shape[-1]
    lengths = jnp.full(scores.shape[0], num_keys) if lengths is None else lengths
    lengths = jnp.broadcast_to(
        lengths.reshape(-1, *[1] * (scores.ndim - 1)), (*scores.shape[:-1], 1)
    )
    threshold = jnp.min(jnp.where(chosen, scores, jnp.inf), axis=-1, keepdims=True)
    tied = ~chosen & (scores == threshold) & jnp.isfinite(threshold)
    ambiguous = jnp.any(tied, axis=-1, keepdims=True)
    ambiguous &= lengths < PARTIAL_SORT_RATIO * k

    def choose_like_torch() -> Array:
        choose = jax.vmap(lambda row, length: torch_topk_mask_of_row(row, k, length))
        torch_chosen = choose(scores.reshape(-1, num_keys), lengths.reshape(-1))
        return jnp.where(ambiguous, torch_chosen.reshape(scores.shape), chosen)

    return lax.cond(jnp.any(ambiguous), choose_like_torch, lambda: chosen)


def torch_topk_mask_of_row(scores: Array, k: int, length: Array | int | None = None) -> Array:
    """True for the k largest of a row [N]; of equals, those that `nth_element` moves to the front.
    `length`: the number of keys without padding; None: N."""
    num_keys = scores.shape[0]
    length = jnp.asarray(num_keys if length is None else length, jnp.int32)

    def unfinished(state: tuple) -> Array:
        _, first, last, depth = state
        return (last - first > 3) & (depth > 0)

    def partition(state: tuple) -> tuple:
        row, first, last, depth = state
        row, cut = partition_around_pivot(row, first, last)
        behind = cut <= k - 1
        return row, jnp.where(behind, cut, first), jnp.where(behind, last, cut), depth - 1

    depth = 2 * (31 - lax.clz(length))
    row, first, last, _ = lax.while_loop(
        unfinished, partition, ((scores, jnp.arange(num_keys)), jnp.int32(0), length, depth)
    )
    # The remaining three elements at most are sorted, stably; the rest is partitioned already.
    index = jnp.arange(num_keys)
    inside = (index >= first) & (index < last)
    rank = jnp.argsort(
        jnp.where(inside, -row[0], jnp.where(index < first, -jnp.inf, jnp.inf)), stable=True
    )
    order = jnp.where(inside, row[1][rank], row[1])
    return jnp.zeros(num_keys, bool).at[order[:k]].set(True)


def partition_around_pivot(row: Row, first: Array, last: Array) -> tuple[Row, Array]:
    """Move the median of three to `first`; then swap smaller and larger elements pair by pair from
    both ends. Returns the row and the index where the ends meet."""
    median = median_index(row[0], first + 1, first + (last - first) // 2, last - 1)
    row = swap_elements(row, first, median)
    values, pivot = row[0], row[0][first]
    num_keys = values.shape[0]
    index = jnp.arange(num_keys)
    inside = (index > first) & (index < last)
    stops_left, stops_right = inside & (values <= pivot), inside & (values >= pivot)
    # The indices at which a scan from either end stops, in order.
    left = jnp.sort(jnp.where(stops_left, index, num_keys))
    right = jnp.sort(jnp.where(stops_right, index, -1), descending=True)
    crossing = left < right
    swaps = jnp.sum(crossing)
    source = index.at[jnp.where(crossing, left, num_keys)].set(right, mode="drop")
    source = source.at[jnp.where(crossing, right, num_keys)].set(left, mode="drop")
    before = jnp.where(swaps > 0, right[swaps - 1], num_keys)
    cut = jnp.minimum(left[jnp.minimum(swaps, num_keys - 1)], before)
    return (row[0][source], row[1][source]), cut


def median_index(values: Array, a: Array, b: Array, c: Array) -> Array:
    """Which of three indices holds the median, by the comparisons of libstdc++."""
    x, y, z = values[a], values[b], values[c]
    descending = jnp.where(y > z, b, jnp.where(x > z, c, a))
    return jnp.where(x > y, descending, jnp.where(x > z, a, jnp.where(y > z, c, b)))


def swap_elements(row: Row, i: Array, j: Array) -> Row:
    def swap(values: Array) -> Array:
        return values.at[i].set(values[j]).at[j].set(values[i])

    return swap(row[0]), swap(row[1])
