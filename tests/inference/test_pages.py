"""The book of pages: each promise alone.

What a page holds depends on all tokens before its end, so the tests write that prefix into it:
wrong reuse shows.
"""

import gc
import weakref

import numpy as np
import pytest

from maxtext.inference.pages import Match, Pages


class Pool:
    """The device's pages and the copies, as prefixes."""

    def __init__(self, count):
        self.contents = [None] * count
        self.reads, self.writes, self.moved = [], [], 0

    def read(self, page):
        self.reads.append(page)
        return self.contents[page]

    def write(self, page, data):
        self.writes.append(page)
        self.contents[page] = data

    def host(self, snapshot):
        self.moved += 1
        return snapshot

    def compute(self, tokens, pages, size):
        for place, page in enumerate(pages):
            self.contents[page] = tuple(tokens[: (place + 1) * size])


def book(count, size=2, **settings):
    pool = Pool(count)
    return Pages(count, size, store=pool, **settings), pool


def run(pages, pool, tokens, snapshot=None):
    """A request that computes whole pages of tokens and learns them; still held."""
    match = pages.match(tokens)
    rest = pages.take(len(tokens) // pages.size - len(match.pages))
    table = match.pages + rest
    for place in range(len(match.pages), len(table)):
        pool.contents[table[place]] = tuple(tokens[: (place + 1) * pages.size])
    pages.learn(tokens, table, snapshot)
    pages.check()
    return table


def known(pages, tokens):
    """How many of the tokens are known, without a trace."""
    match = pages.match([*tokens, 0])
    pages.give(match.pages)
    pages.check()
    return match.length


def test_take_and_give():
    pages = Pages(4, 2)
    assert pages.take(0) == []
    first = pages.take(3)
    assert sorted(set(first)) == sorted(first)
    assert (pages.free, pages.held) == (1, 3)
    assert pages.take(2) is None
    assert (pages.free, pages.held) == (1, 3)  # all or nothing
    second = pages.take(1)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert pages.take(1) is None
    assert pages.take(0) == []
    pages.give(first)
    pages.check()
    assert (pages.free, pages.held) == (3, 1)
    assert sorted(pages.take(3)) == sorted(first)


def test_what_is_not_held_cannot_be_given_or_learned():
    pages = Pages(4, 2, known=4)
    taken = pages.take(2)
    pages.give(taken[:1])
    with pytest.raises(AssertionError, match="not held"):
        pages.give(taken[:1])
    with pytest.raises(AssertionError, match="not held"):
        pages.learn([1, 2], taken[:1])
    with pytest.raises(AssertionError, match="not held"):
        Pages(4, 2).give([0])
    pages.learn([1, 2], taken[1:])
    with pytest.raises(AssertionError, match="other tokens"):
        pages.learn([3, 4], taken[1:])
    with pytest.raises(AssertionError, match="more than 1 pages"):
        pages.learn([1, 2, 3, 4], taken[1:])


def test_a_match_is_the_longest_prefix_in_whole_pages():
    pages, pool = book(8, known=8)
    table = run(pages, pool, [1, 2, 3, 4, 5, 6])
    pages.give(table)
    assert pages.match([1, 2, 3, 4, 5, 6, 7]) == Match(table, 6, None)
    assert pages.match([1, 2, 3, 4, 5, 6]) == Match(
        table[:2], 4, None
    )  # a token is left to compute
    assert pages.match([1, 2, 3, 4, 5]) == Match(table[:2], 4, None)
    assert pages.match([1, 2, 3, 9, 5, 6, 7]) == Match(table[:1], 2, None)
    assert pages.match([3, 4, 5, 6, 7]) == Match([], 0, None)  # known only after 1, 2
    assert pages.match([1]) == pages.match([]) == Match([], 0, None)
    assert pages.match(np.array([1, 2, 3, 4, 0], np.int32)).pages == table[:2]
    assert (pages.hits, pages.misses) == (6 + 4 + 4 + 2 + 4, 6 + 1 + 2 + 1 + 5 + 5 + 1 + 1)
    pages.check()


def test_a_part_of_a_page_is_not_learned():
    pages = Pages(4, 2, known=4)
    table = pages.take(2)
    pages.learn([1, 2, 3], table)
    assert pages.known_on_device == 1
    assert known(pages, [1, 2, 3, 4]) == 2
    pages.learn([1], table[1:])
    assert pages.known_on_device == 1


def test_tokens_with_equal_hashes_are_told_apart():
    assert hash((-1, 0)) == hash((-2, 0))
    pages, pool = book(4, known=4)
    run(pages, pool, [-1, 0])
    assert known(pages, [-2, 0]) == 0
    assert known(pages, [-1, 0]) == 2


def test_shared_pages_are_free_when_the_last_holder_lets_go():
    pages, pool = book(4, known=4)
    first = run(pages, pool, [1, 2, 3, 4])
    second = pages.match([1, 2, 3, 4, 5]).pages
    assert second == first
    assert pages.held == 2
    pages.give(first)
    assert (pages.held, pages.free) == (2, 2)
    assert not set(pages.take(2)) & set(second)
    assert pages.take(1) is None
    pages.give(second)
    assert (pages.held, pages.free) == (2, 2)
    pages.check()


def test_without_known_pages_nothing_is_remembered():
    pages, pool = book(4)
    table = run(pages, pool, [1, 2, 3, 4])
    assert known(pages, [1, 2, 3, 4]) == 0
    pages.give(table)
    assert pages.known_on_device == pages.known_on_host == 0
    assert pool.reads == []


def test_known_pages_nobody_holds_are_at_most_known_the_end_of_a_prefix_going_first():
    pages, pool = book(8, known=2)
    table = run(pages, pool, [1, 2, 3, 4, 5, 6])
    assert pages.known_on_device == 3  # held pages do not count
    pages.give(table)
    pages.check()
    assert pages.known_on_device == 2
    assert known(pages, [1, 2, 3, 4, 5, 6]) == 4


def test_the_least_recently_used_goes_first_and_what_is_held_never():
    pages, pool = book(4, known=4)
    tables = {token: run(pages, pool, [token, token]) for token in (1, 2, 3, 4)}
    for token in (1, 2, 3):
        pages.give(tables[token])
    assert known(pages, [1, 1]) == 2  # used again
    assert pages.take(1) == tables[2]
    assert pages.take(1) == tables[3]
    assert pages.take(1) == tables[1]
    assert pages.take(1) is None
    assert known(pages, [4, 4]) == 2
    pages.check()


def test_a_shared_beginning_outlives_its_ends():
    pages, pool = book(4, known=4)
    first = run(pages, pool, [1, 1, 2, 2])
    second = run(pages, pool, [1, 1, 3, 3])
    assert first[0] == second[0]
    pages.give(second)
    pages.give(first)
    assert known(pages, [1, 1]) == 2
    assert known(pages, [1, 1, 3, 3]) == 4
    assert set(pages.take(2)) == {first[1]} | set(range(4)) - {*first, *second}
    assert pages.take(1) == second[1:]
    assert pages.take(1) == first[:1]


def test_a_prefix_known_by_a_held_page_keeps_it():
    pages = Pages(4, 2, known=4)
    first, second = pages.take(1), pages.take(2)
    pages.learn([1, 2], first)
    pages.learn([1, 2, 3, 4], second)
    assert pages.match([1, 2, 3, 4, 5]).pages == [first[0], second[1]]
    assert pages.known_on_device == 2
    pages.give(second)
    pages.check()
    assert pages.free == 1 + 1  # one never taken, and the second copy of 1, 2
    assert pages.known_on_device == 2


def test_a_prefix_known_by_a_page_nobody_holds_passes_to_the_page_of_the_caller():
    pages, pool = book(4, known=4, host=1)
    first, second = pages.take(1), pages.take(1)
    pages.learn([1, 2], first)
    pages.give(first)
    pages.learn([1, 2], second)
    pages.check()
    assert pages.match([1, 2, 3]).pages == second
    assert pages.known_on_device == 1
    pages.give(second)
    pages.give(second)
    assert pages.take(4) is not None  # now 1, 2 is in host memory
    assert (pages.known_on_device, pages.known_on_host) == (0, 1)
    pages.learn([1, 2], [3])
    pages.check()
    assert (pages.known_on_device, pages.known_on_host) == (1, 0)
    assert pages.match([1, 2, 3]).pages == [3]
    assert pool.writes == []


def test_all_but_the_held_pages_can_be_taken_even_when_held_ones_go_on_from_them():
    """The second request has its own copy of 1, 2; the known copy is idle, and the known 3, 4 after
    it is held.
    """
    pages, _ = book(4, known=4, host=4)
    first, second = pages.take(1), pages.take(2)
    pages.learn([1, 2], first)
    pages.learn([1, 2, 3, 4], second)
    pages.give(first)
    assert pages.free == 2
    assert set(pages.take(2)) == set(range(4)) - set(second)
    pages.check()
    assert pages.known_on_device == pages.known_on_host == 0
    pages.learn([1, 2, 3, 4], second)
    assert pages.match([1, 2, 3, 4, 5]).pages == second


def test_pages_go_to_host_memory_and_come_back():
    pages, pool = book(3, known=3, host=3)
    tokens = [1, 2, 3, 4, 5, 6]
    pages.give(run(pages, pool, tokens))
    taken = pages.take(3)
    pages.check()
    assert (pages.known_on_device, pages.known_on_host, len(pool.reads)) == (0, 3, 3)
    pool.compute([9] * 6, taken, 2)
    assert pages.match([*tokens, 7]).length == 0  # no page is free
    pages.give(taken[1:])
    match = pages.match([*tokens, 7])
    pages.check()
    assert (match.length, set(match.pages)) == (4, set(taken[1:]))
    assert [pool.contents[page] for page in match.pages] == [(1, 2), (1, 2, 3, 4)]
    assert (pages.known_on_device, pages.known_on_host) == (2, 1)
    pages.give(taken[:1])
    assert pages.match([*tokens, 7]).pages == [*match.pages, taken[0]]
    assert pool.contents[taken[0]] == tuple(tokens)
    assert pages.known_on_host == 0


def test_pages_over_the_limit_go_to_host_memory_at_once():
    pages, pool = book(4, known=1, host=1)
    pages.give(run(pages, pool, [1, 1, 2, 2, 3, 3]))
    assert (pages.known_on_device, pages.known_on_host) == (1, 1)
    assert known(pages, [1, 1, 2, 2, 3, 3]) == 4
    pages, pool = book(4, known=0, host=2)
    pages.give(run(pages, pool, [1, 1, 2, 2, 3, 3]))
    assert (pages.known_on_device, pages.known_on_host) == (0, 2)
    match = pages.match([1, 1, 2, 2, 3, 3, 4])
    assert [pool.contents[page] for page in match.pages] == [(1, 1), (1, 1, 2, 2)]


def test_host_memory_forgets_the_least_recently_used():
    pages, pool = book(3, known=3, host=2)
    for token in (1, 2, 3):
        pages.give(run(pages, pool, [token, token]))
    taken = pages.take(3)
    pages.check()
    pages.give(taken)
    assert pages.known_on_host == 2
    assert [known(pages, [token, token]) for token in (1, 2, 3)] == [0, 2, 2]


def test_bringing_back_may_forget_the_end_of_the_same_prefix():
    """Host memory is full and the device, too: a page that makes room on the device pushes out the
    oldest there.
    """
    pages, pool = book(2, known=2, host=2)
    tokens = [1, 1, 2, 2]
    pages.give(run(pages, pool, tokens))
    for token in (8, 9):
        pages.give(run(pages, pool, [token, token]))
    assert (pages.known_on_device, pages.known_on_host) == (2, 2)
    match = pages.match([*tokens, 3])
    pages.check()
    assert [pool.contents[page] for page in match.pages] == [(1, 1), (1, 1, 2, 2)]
    assert known(pages, [8, 8]) == known(pages, [9, 9]) == 0  # no page is free for them
    assert pages.known_on_host == 2
    pages, pool = book(2, known=2, host=1)
    pages.give(run(pages, pool, tokens))
    assert pages.take(1) is not None
    pages.give(run(pages, pool, [8, 8]))  # 1, 1 pushes 2, 2 out of host memory
    match = pages.match([*tokens, 3])
    pages.check()
    assert [pool.contents[page] for page in match.pages] == [(1, 1)]
    assert pages.known_on_host == 1


def test_a_prefix_counts_where_it_has_a_snapshot():
    pages = Pages(8, 2, known=8, snapshots=True)
    tokens = [1, 1, 2, 2, 3, 3, 4]
    table = pages.take(4)
    pages.learn(tokens[:2], table)
    assert pages.match(tokens) == Match([], 0, None)
    pages.learn(tokens[:4], table, "after 4")
    pages.learn(tokens, table)
    match = pages.match(tokens)
    assert match == Match(table[:2], 4, "after 4")
    pages.learn(tokens, table, "after 6")  # the whole pages of 7 tokens
    pages.learn(tokens, table, "after 6, again")
    assert pages.match(tokens) == Match(table[:3], 6, "after 6")
    assert pages.match(tokens[:6]) == Match(table[:2], 4, "after 4")
    assert (pages.hits, pages.misses) == (4 + 6 + 4, 7 + 3 + 1 + 2)
    pages.check()
    with pytest.raises(AssertionError, match="whole page"):
        pages.learn([1], table, "after none")
    with pytest.raises(AssertionError, match="not asked for"):
        Pages(8, 2, known=8).learn([1], [], "after none")


class State:
    """A snapshot that can be missed."""


def test_a_snapshot_stays_with_its_prefix_in_host_memory_and_goes_with_it():
    state = State()
    gone = weakref.ref(state)
    pages, pool = book(3, known=3, host=3, snapshots=True)
    tokens = [1, 1, 2, 2, 3, 3]
    pages.give(run(pages, pool, tokens[:4], "early"))
    pages.give(run(pages, pool, tokens, state))
    taken = pages.take(3)
    pages.give(taken[:1])
    assert pages.match([*tokens, 4]) == Match(
        [], 0, None
    )  # one page comes back, and it has no snapshot
    pages.check()
    pages.give(taken[1:])
    match = pages.match([*tokens, 4])
    assert match.snapshot is state
    assert pool.moved == 2  # "early", too
    pages.give(match.pages)
    del state, match
    for token in range(4, 12):
        pages.give(run(pages, pool, [token, token], "other"))
    assert known(pages, tokens) == 0
    gc.collect()
    assert gone() is None


def test_a_snapshot_goes_when_a_prefix_before_it_is_forgotten():
    """5, 5 is in host memory and 3, 3 held, both after a copy of 1, 1 that nobody holds and that
    must go.
    """
    state = State()
    gone = weakref.ref(state)
    pages, _ = book(4, known=4, host=4, snapshots=True)
    [first, end], second = pages.take(2), pages.take(2)
    pages.learn([1, 1, 5, 5], [first, end], state)
    pages.learn([1, 1, 3, 3], second)
    pages.give([end])
    assert pages.take(1) == [end]
    assert pages.known_on_host == 1
    pages.give([first])
    assert pages.take(1) == [first]
    pages.check()
    assert pages.known_on_device == pages.known_on_host == 0
    del state
    gc.collect()
    assert gone() is None


def test_a_page_used_often_costs_no_more():
    pages, pool = book(2, known=2)
    pages.give(run(pages, pool, [1, 1]))
    for _ in range(1000):
        known(pages, [1, 1])
    assert max(len(queue.heap) for queue in (pages.edges, pages.leaves)) < 200
