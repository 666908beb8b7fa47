"""The prefix cache, one property at a time.

The contents of a block depend on all tokens before its end, so the tests write that prefix into it,
and detect wrong reuse.
"""

import gc
import weakref

import numpy as np
import pytest

from maxtext.inference.engine.prefix_cache import PrefixMatch
from tests.inference.engine.prefix_cache_checks import check_consistent
from tests.support.prefix_cache import cache_with_store, new_cache


def run(cache, store, tokens, snapshot=None):
    """A request that computes full blocks of tokens and inserts them; still referenced."""
    match = cache.match(tokens)
    new_blocks = cache.allocate(len(tokens) // cache.block_size - len(match.blocks))
    table = match.blocks + new_blocks
    for index in range(len(match.blocks), len(table)):
        store.contents[table[index]] = tuple(tokens[: (index + 1) * cache.block_size])
    cache.insert(tokens, table, snapshot)
    check_consistent(cache)
    return table


def cached_length(cache, tokens):
    """How many of the tokens are cached; leaves no reference."""
    match = cache.match([*tokens, 0])
    cache.free(match.blocks)
    check_consistent(cache)
    return match.length


def test_allocate_and_free():
    cache = new_cache(4, 2)
    assert cache.allocate(0) == []
    first = cache.allocate(3)
    assert sorted(set(first)) == sorted(first)
    assert (cache.num_free_blocks, cache.pool.num_referenced) == (1, 3)
    assert cache.allocate(2) is None
    assert (cache.num_free_blocks, cache.pool.num_referenced) == (1, 3)  # all or nothing
    second = cache.allocate(1)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert cache.allocate(1) is None
    assert cache.allocate(0) == []
    cache.free(first)
    check_consistent(cache)
    assert (cache.num_free_blocks, cache.pool.num_referenced) == (3, 1)
    assert sorted(cache.allocate(3)) == sorted(first)


def test_only_referenced_blocks_can_be_freed_or_inserted():
    cache = new_cache(4, 2, max_idle_blocks=4)
    blocks = cache.allocate(2)
    cache.free(blocks[:1])
    with pytest.raises(AssertionError, match="not referenced"):
        cache.free(blocks[:1])
    with pytest.raises(AssertionError, match="not referenced"):
        cache.insert([1, 2], blocks[:1])
    with pytest.raises(AssertionError, match="not referenced"):
        new_cache(4, 2).free([0])
    cache.insert([1, 2], blocks[1:])
    with pytest.raises(AssertionError, match="other tokens"):
        cache.insert([3, 4], blocks[1:])
    with pytest.raises(AssertionError, match="exceed 1 blocks"):
        cache.insert([1, 2, 3, 4], blocks[1:])


def test_match_is_the_longest_prefix_in_full_blocks():
    cache, store = cache_with_store(8, max_idle_blocks=8)
    table = run(cache, store, [1, 2, 3, 4, 5, 6])
    cache.free(table)
    assert cache.match([1, 2, 3, 4, 5, 6, 7]) == PrefixMatch(table, 6, None)
    assert cache.match([1, 2, 3, 4, 5, 6]) == PrefixMatch(
        table[:2], 4, None
    )  # a token is left to compute
    assert cache.match([1, 2, 3, 4, 5]) == PrefixMatch(table[:2], 4, None)
    assert cache.match([1, 2, 3, 9, 5, 6, 7]) == PrefixMatch(table[:1], 2, None)
    assert cache.match([3, 4, 5, 6, 7]) == PrefixMatch([], 0, None)  # cached only after 1, 2
    assert cache.match([1]) == cache.match([]) == PrefixMatch([], 0, None)
    assert cache.match(np.array([1, 2, 3, 4, 0], np.int32)).blocks == table[:2]
    assert (cache.hits, cache.misses) == (6 + 4 + 4 + 2 + 4, 6 + 1 + 2 + 1 + 5 + 5 + 1 + 1)
    check_consistent(cache)


def test_partial_block_is_not_inserted():
    cache = new_cache(4, 2, max_idle_blocks=4)
    table = cache.allocate(2)
    cache.insert([1, 2, 3], table)
    assert cache.num_on_device == 1
    assert cached_length(cache, [1, 2, 3, 4]) == 2
    cache.insert([1], table[1:])
    assert cache.num_on_device == 1


def test_tokens_with_equal_hashes_are_distinguished():
    assert hash((-1, 0)) == hash((-2, 0))
    cache, store = cache_with_store(4, max_idle_blocks=4)
    run(cache, store, [-1, 0])
    assert cached_length(cache, [-2, 0]) == 0
    assert cached_length(cache, [-1, 0]) == 2


def test_shared_blocks_are_free_after_the_last_reference():
    cache, store = cache_with_store(4, max_idle_blocks=4)
    first = run(cache, store, [1, 2, 3, 4])
    second = cache.match([1, 2, 3, 4, 5]).blocks
    assert second == first
    assert cache.pool.num_referenced == 2
    cache.free(first)
    assert (cache.pool.num_referenced, cache.num_free_blocks) == (2, 2)
    assert not set(cache.allocate(2)) & set(second)
    assert cache.allocate(1) is None
    cache.free(second)
    assert (cache.pool.num_referenced, cache.num_free_blocks) == (2, 2)
    check_consistent(cache)


def test_without_capacity_only_blocks_in_use_are_shared():
    cache, store = cache_with_store(4)
    table = run(cache, store, [1, 2, 3, 4])
    assert cached_length(cache, [1, 2, 3, 4]) == 4
    cache.free(table)
    assert cached_length(cache, [1, 2, 3, 4]) == 0
    assert cache.num_on_device == cache.num_in_host == 0
    assert store.reads == []


def test_idle_blocks_are_limited_and_the_end_of_a_prefix_is_evicted_first():
    cache, store = cache_with_store(8, max_idle_blocks=2)
    table = run(cache, store, [1, 2, 3, 4, 5, 6])
    assert cache.num_on_device == 3  # referenced blocks do not count
    cache.free(table)
    check_consistent(cache)
    assert cache.num_on_device == 2
    assert cached_length(cache, [1, 2, 3, 4, 5, 6]) == 4


def test_evicts_least_recently_used_block_and_never_a_referenced_one():
    cache, store = cache_with_store(4, max_idle_blocks=4)
    tables = {token: run(cache, store, [token, token]) for token in (1, 2, 3, 4)}
    for token in (1, 2, 3):
        cache.free(tables[token])
    assert cached_length(cache, [1, 1]) == 2  # used again
    assert cache.allocate(1) == tables[2]
    assert cache.allocate(1) == tables[3]
    assert cache.allocate(1) == tables[1]
    assert cache.allocate(1) is None
    assert cached_length(cache, [4, 4]) == 2
    check_consistent(cache)


def test_shared_prefix_outlives_its_continuations():
    cache, store = cache_with_store(4, max_idle_blocks=4)
    first = run(cache, store, [1, 1, 2, 2])
    second = run(cache, store, [1, 1, 3, 3])
    assert first[0] == second[0]
    cache.free(second)
    cache.free(first)
    assert cached_length(cache, [1, 1]) == 2
    assert cached_length(cache, [1, 1, 3, 3]) == 4
    assert set(cache.allocate(2)) == {first[1]} | set(range(4)) - {*first, *second}
    assert cache.allocate(1) == second[1:]
    assert cache.allocate(1) == first[:1]


def test_referenced_block_of_a_prefix_stays_cached():
    cache = new_cache(4, 2, max_idle_blocks=4)
    first, second = cache.allocate(1), cache.allocate(2)
    cache.insert([1, 2], first)
    cache.insert([1, 2, 3, 4], second)
    assert cache.match([1, 2, 3, 4, 5]).blocks == [first[0], second[1]]
    assert cache.num_on_device == 2
    cache.free(second)
    check_consistent(cache)
    assert cache.num_free_blocks == 1 + 1  # one never allocated, and the second copy of 1, 2
    assert cache.num_on_device == 2


def test_idle_block_of_a_prefix_is_replaced_by_the_callers_block():
    cache, store = cache_with_store(4, max_idle_blocks=4, max_host_blocks=1)
    first, second = cache.allocate(1), cache.allocate(1)
    cache.insert([1, 2], first)
    cache.free(first)
    cache.insert([1, 2], second)
    check_consistent(cache)
    assert cache.match([1, 2, 3]).blocks == second
    assert cache.num_on_device == 1
    cache.free(second)
    cache.free(second)
    assert cache.allocate(4) is not None  # now 1, 2 is in host memory
    assert (cache.num_on_device, cache.num_in_host) == (0, 1)
    cache.insert([1, 2], [3])
    check_consistent(cache)
    assert (cache.num_on_device, cache.num_in_host) == (1, 0)
    assert cache.match([1, 2, 3]).blocks == [3]
    assert store.writes == []


def test_all_unreferenced_blocks_can_be_allocated_even_before_referenced_ones():
    """The second request has its own copy of 1, 2; the cached copy is idle, and the cached 3, 4
    after it is referenced.
    """
    cache, _ = cache_with_store(4, max_idle_blocks=4, max_host_blocks=4)
    first, second = cache.allocate(1), cache.allocate(2)
    cache.insert([1, 2], first)
    cache.insert([1, 2, 3, 4], second)
    cache.free(first)
    assert cache.num_free_blocks == 2
    assert set(cache.allocate(2)) == set(range(4)) - set(second)
    check_consistent(cache)
    assert cache.num_on_device == cache.num_in_host == 0
    cache.insert([1, 2, 3, 4], second)
    assert cache.match([1, 2, 3, 4, 5]).blocks == second


def test_blocks_are_offloaded_to_host_memory_and_loaded_again():
    cache, store = cache_with_store(3, max_idle_blocks=3, max_host_blocks=3)
    tokens = [1, 2, 3, 4, 5, 6]
    cache.free(run(cache, store, tokens))
    blocks = cache.allocate(3)
    check_consistent(cache)
    assert (cache.num_on_device, cache.num_in_host, len(store.reads)) == (0, 3, 3)
    store.compute([9] * 6, blocks, 2)
    assert cache.match([*tokens, 7]).length == 0  # no block is free
    cache.free(blocks[1:])
    match = cache.match([*tokens, 7])
    check_consistent(cache)
    assert (match.length, set(match.blocks)) == (4, set(blocks[1:]))
    assert [store.contents[block] for block in match.blocks] == [(1, 2), (1, 2, 3, 4)]
    assert (cache.num_on_device, cache.num_in_host) == (2, 1)
    cache.free(blocks[:1])
    assert cache.match([*tokens, 7]).blocks == [*match.blocks, blocks[0]]
    assert store.contents[blocks[0]] == tuple(tokens)
    assert cache.num_in_host == 0


def test_blocks_over_the_limit_are_offloaded_at_once():
    cache, store = cache_with_store(4, max_idle_blocks=1, max_host_blocks=1)
    cache.free(run(cache, store, [1, 1, 2, 2, 3, 3]))
    assert (cache.num_on_device, cache.num_in_host) == (1, 1)
    assert cached_length(cache, [1, 1, 2, 2, 3, 3]) == 4
    cache, store = cache_with_store(4, max_idle_blocks=0, max_host_blocks=2)
    cache.free(run(cache, store, [1, 1, 2, 2, 3, 3]))
    assert (cache.num_on_device, cache.num_in_host) == (0, 2)
    match = cache.match([1, 1, 2, 2, 3, 3, 4])
    assert [store.contents[block] for block in match.blocks] == [(1, 1), (1, 1, 2, 2)]


def test_host_memory_drops_the_least_recently_used():
    cache, store = cache_with_store(3, max_idle_blocks=3, max_host_blocks=2)
    for token in (1, 2, 3):
        cache.free(run(cache, store, [token, token]))
    blocks = cache.allocate(3)
    check_consistent(cache)
    cache.free(blocks)
    assert cache.num_in_host == 2
    assert [cached_length(cache, [token, token]) for token in (1, 2, 3)] == [0, 2, 2]


def test_loading_may_drop_the_end_of_the_same_prefix():
    """Host memory and the device are full: a block that is evicted from the device displaces the
    oldest block in host memory.
    """
    cache, store = cache_with_store(2, max_idle_blocks=2, max_host_blocks=2)
    tokens = [1, 1, 2, 2]
    cache.free(run(cache, store, tokens))
    for token in (8, 9):
        cache.free(run(cache, store, [token, token]))
    assert (cache.num_on_device, cache.num_in_host) == (2, 2)
    match = cache.match([*tokens, 3])
    check_consistent(cache)
    assert [store.contents[block] for block in match.blocks] == [(1, 1), (1, 1, 2, 2)]
    assert (
        cached_length(cache, [8, 8]) == cached_length(cache, [9, 9]) == 0
    )  # no block is free for them
    assert cache.num_in_host == 2
    cache, store = cache_with_store(2, max_idle_blocks=2, max_host_blocks=1)
    cache.free(run(cache, store, tokens))
    assert cache.allocate(1) is not None
    cache.free(run(cache, store, [8, 8]))  # 1, 1 displaces 2, 2 in host memory
    match = cache.match([*tokens, 3])
    check_consistent(cache)
    assert [store.contents[block] for block in match.blocks] == [(1, 1)]
    assert cache.num_in_host == 1


def test_prefix_matches_only_where_it_has_a_snapshot():
    cache = new_cache(8, 2, max_idle_blocks=8, snapshots=True)
    tokens = [1, 1, 2, 2, 3, 3, 4]
    table = cache.allocate(4)
    cache.insert(tokens[:2], table)
    assert cache.match(tokens) == PrefixMatch([], 0, None)
    cache.insert(tokens[:4], table, "after 4")
    cache.insert(tokens, table)
    match = cache.match(tokens)
    assert match == PrefixMatch(table[:2], 4, "after 4")
    cache.insert(tokens, table, "after 6")  # the full blocks of 7 tokens
    cache.insert(tokens, table, "after 6, again")
    assert cache.match(tokens) == PrefixMatch(table[:3], 6, "after 6")
    assert cache.match(tokens[:6]) == PrefixMatch(table[:2], 4, "after 4")
    assert (cache.hits, cache.misses) == (4 + 6 + 4, 7 + 3 + 1 + 2)
    check_consistent(cache)
    with pytest.raises(AssertionError, match="full block"):
        cache.insert([1], table, "after none")
    with pytest.raises(AssertionError, match="no snapshots"):
        new_cache(8, 2, max_idle_blocks=8).insert([1], [], "after none")


class State:
    """A snapshot that can be referenced weakly."""


@pytest.mark.slow
def test_snapshot_is_offloaded_and_dropped_with_its_prefix():
    state = State()
    gone = weakref.ref(state)
    cache, store = cache_with_store(3, max_idle_blocks=3, max_host_blocks=3, snapshots=True)
    tokens = [1, 1, 2, 2, 3, 3]
    cache.free(run(cache, store, tokens[:4], "early"))
    cache.free(run(cache, store, tokens, state))
    blocks = cache.allocate(3)
    cache.free(blocks[:1])
    assert cache.match([*tokens, 4]) == PrefixMatch(
        [], 0, None
    )  # one block is loaded, and it has no snapshot
    check_consistent(cache)
    cache.free(blocks[1:])
    match = cache.match([*tokens, 4])
    assert match.snapshot is state
    assert store.num_offloaded_snapshots == 2  # "early", too
    cache.free(match.blocks)
    del state, match
    for token in range(4, 12):
        cache.free(run(cache, store, [token, token], "other"))
    assert cached_length(cache, tokens) == 0
    gc.collect()
    assert gone() is None


def test_snapshot_is_dropped_when_an_earlier_block_is_removed():
    """5, 5 is in host memory and 3, 3 is referenced, both after an idle copy of 1, 1 that is
    evicted.
    """
    state = State()
    gone = weakref.ref(state)
    cache, _ = cache_with_store(4, max_idle_blocks=4, max_host_blocks=4, snapshots=True)
    [first, end], second = cache.allocate(2), cache.allocate(2)
    cache.insert([1, 1, 5, 5], [first, end], state)
    cache.insert([1, 1, 3, 3], second)
    cache.free([end])
    assert cache.allocate(1) == [end]
    assert cache.num_in_host == 1
    cache.free([first])
    assert cache.allocate(1) == [first]
    check_consistent(cache)
    assert cache.num_on_device == cache.num_in_host == 0
    del state
    gc.collect()
    assert gone() is None


def test_repeated_use_does_not_grow_the_eviction_queues():
    cache, store = cache_with_store(2, max_idle_blocks=2)
    cache.free(run(cache, store, [1, 1]))
    for _ in range(1000):
        cached_length(cache, [1, 1])
    assert max(len(queue.heap) for queue in (cache.device_leaves, cache.host_leaves)) < 200
