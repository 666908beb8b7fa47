"""The prefix cache with random requests, against a slow model of it: a dict of prefixes, scanned
for every decision.
"""

import random
from dataclasses import dataclass, field

import pytest

from tests.inference.engine.prefix_cache_checks import check_consistent
from tests.support.prefix_cache import cache_with_store


@dataclass
class Entry:
    block: int | None  # None: in host memory
    last_used: int = 0
    snapshot: object = None


@dataclass
class SlowCache:
    """The rules of the prefix cache, without its data structures."""

    num_blocks: int
    block_size: int
    max_idle_blocks: int
    max_host_blocks: int
    snapshots: bool
    entries: dict = field(default_factory=dict)  # prefix -> Entry
    ref_counts: dict = field(default_factory=dict)  # block -> count
    time: int = 0

    def cached_blocks(self):
        return {entry.block for entry in self.entries.values() if entry.block is not None}

    def unused(self):
        return set(range(self.num_blocks)) - self.cached_blocks() - set(self.ref_counts)

    def idle(self):
        return [
            prefix
            for prefix, entry in self.entries.items()
            if entry.block is not None and entry.block not in self.ref_counts
        ]

    def in_host(self):
        return [prefix for prefix, entry in self.entries.items() if entry.block is None]

    def descendants(self, prefix, candidates):
        size = len(prefix)
        return [longer for longer in candidates if len(longer) > size and longer[:size] == prefix]

    def evict(self):
        on_device = [prefix for prefix in self.entries if self.entries[prefix].block is not None]
        idle = sorted(self.idle(), key=lambda prefix: self.entries[prefix].last_used)
        leaves = [prefix for prefix in idle if not self.descendants(prefix, on_device)]
        if not leaves or not self.max_host_blocks:
            self.remove((leaves or idle)[0])
            return
        if len(self.in_host()) == self.max_host_blocks:
            host_leaves = [
                prefix for prefix in self.in_host() if not self.descendants(prefix, self.in_host())
            ]
            self.remove(min(host_leaves, key=lambda prefix: self.entries[prefix].last_used))
        self.entries[leaves[0]].block = None

    def remove(self, prefix):
        for removed in [prefix, *self.descendants(prefix, self.entries)]:
            del self.entries[removed]

    def make_unused(self, count):
        while len(self.unused()) < count:
            self.evict()

    def acquire(self, block):
        self.ref_counts[block] = self.ref_counts.get(block, 0) + 1

    def allocate(self, count):
        """Whether it is possible; which unused blocks are allocated is up to the cache."""
        if count > self.num_blocks - len(self.ref_counts):
            return False
        self.make_unused(count)
        return True

    def free(self, blocks):
        for block in reversed(blocks):
            self.ref_counts[block] -= 1
            if not self.ref_counts[block]:
                del self.ref_counts[block]
                self.time += 1
                for entry in self.entries.values():
                    if entry.block == block:
                        entry.last_used = self.time
        while len(self.idle()) > self.max_idle_blocks:
            self.evict()

    def prefixes(self, tokens, end):
        return [tuple(tokens[:stop]) for stop in range(self.block_size, end + 1, self.block_size)]

    def match(self, tokens, loaded):
        """The prefixes that are acquired, whether or not they end in a snapshot; `loaded`: the
        blocks that were loaded from host memory.
        """
        prefixes = []
        for prefix in self.prefixes(tokens, len(tokens) - 1):
            if prefix not in self.entries:
                break
            prefixes.append(prefix)
        acquired, loaded = [], list(loaded)
        for prefix in self.resumable(prefixes):
            entry = self.entries.get(prefix)
            full = len(self.ref_counts) == self.num_blocks
            if entry is None or (entry.block is None and full):
                break
            if entry.block is None:
                del self.entries[prefix]  # while it is loaded, it is not in host memory
                self.make_unused(1)
                entry.block = loaded.pop(0)
                assert entry.block in self.unused()
                self.entries[prefix] = entry
            self.acquire(entry.block)
            acquired.append(prefix)
        assert not loaded
        return acquired

    def resumable(self, prefixes):
        while self.snapshots and prefixes and self.entries[prefixes[-1]].snapshot is None:
            prefixes = prefixes[:-1]
        return prefixes

    def insert(self, tokens, blocks, snapshot):
        prefixes = self.prefixes(tokens, len(tokens))
        for prefix, block in zip(prefixes, blocks, strict=False):
            entry = self.entries.setdefault(prefix, Entry(None))
            if entry.block not in self.ref_counts:
                entry.block = block
        if snapshot is not None and self.entries[prefixes[-1]].snapshot is None:
            self.entries[prefixes[-1]].snapshot = snapshot


@dataclass(eq=False)
class FakeSequence:
    tokens: list
    blocks: list


SETTINGS = [
    dict(max_idle_blocks=0),
    dict(max_idle_blocks=3),
    dict(max_idle_blocks=24),
    dict(max_idle_blocks=6, max_host_blocks=4),
    dict(max_idle_blocks=24, max_host_blocks=40),
    dict(max_idle_blocks=0, max_host_blocks=5),
    dict(max_idle_blocks=5, snapshots=True),
    dict(max_idle_blocks=8, max_host_blocks=8, snapshots=True),
]


@pytest.mark.parametrize(
    "settings", SETTINGS, ids=lambda settings: "-".join(map(str, settings.values()))
)
@pytest.mark.parametrize("seed", range(2))
def test_random_requests(settings, seed):
    generator, count, size = random.Random(seed), (24, 12)[seed % 2], 2
    cache, store = cache_with_store(count, size, **settings)
    slow = SlowCache(
        num_blocks=count,
        block_size=size,
        max_idle_blocks=settings["max_idle_blocks"],
        max_host_blocks=settings.get("max_host_blocks", 0),
        snapshots=settings.get("snapshots", False),
    )
    sequences: list[FakeSequence] = []
    num_reused = num_failed = 0

    def compute(sequence, start):
        for index in range(start, len(sequence.blocks)):
            store.contents[sequence.blocks[index]] = tuple(sequence.tokens[: (index + 1) * size])

    def allocate(needed):
        nonlocal num_failed
        possible = slow.allocate(needed)
        blocks = cache.allocate(needed)
        assert (blocks is not None) == possible
        if blocks is None:
            num_failed += 1
            return None
        assert len(blocks) == len(set(blocks)) == needed
        assert set(blocks) <= slow.unused()
        for block in blocks:
            slow.acquire(block)
            store.contents[block] = "old"
        return blocks

    def free(blocks):
        cache.free(blocks)
        slow.free(blocks)

    def start():
        nonlocal num_reused
        prefix = (
            generator.choice(sequences).tokens if sequences and generator.random() < 0.5 else []
        )
        cut = generator.randint(0, len(prefix))
        tokens = [
            *prefix[:cut],
            *(generator.randint(0, 1) for _ in range(generator.randint(0, 6))),
        ]
        hits, misses = cache.hits, cache.misses
        store.writes.clear()
        match = cache.match(tokens)
        acquired = slow.match(tokens, store.writes)
        matched = slow.resumable(acquired)
        assert match.length == len(matched) * size == len(match.blocks) * size
        assert (cache.hits - hits, cache.misses - misses) == (
            match.length,
            len(tokens) - match.length,
        )
        assert match.blocks == [slow.entries[prefix].block for prefix in matched]
        assert [store.contents[block] for block in match.blocks] == matched
        assert match.snapshot == (matched[-1] if matched and slow.snapshots else None)
        slow.free([slow.entries[prefix].block for prefix in acquired[len(matched) :]])
        num_reused += match.length
        new_blocks = allocate(-(-len(tokens) // size) - len(match.blocks))
        if new_blocks is None:
            free(match.blocks)
            return
        sequence = FakeSequence(tokens, match.blocks + new_blocks)
        compute(sequence, len(match.blocks))
        sequences.append(sequence)

    def grow():
        sequence = generator.choice(sequences)
        new_tokens = [generator.randint(0, 1) for _ in range(generator.randint(1, 3))]
        length = len(sequence.tokens) + len(new_tokens)
        new_blocks = allocate(-(-length // size) - len(sequence.blocks))
        if new_blocks is not None:
            num_full = len(sequence.tokens) // size
            sequence.tokens.extend(new_tokens)
            sequence.blocks.extend(new_blocks)
            compute(sequence, num_full)

    def insert():
        sequence = generator.choice(sequences)
        end = (
            generator.randint(0, len(sequence.tokens))
            if generator.random() < 0.3
            else len(sequence.tokens)
        )
        tokens = sequence.tokens[:end]
        full = tuple(tokens[: end // size * size])
        snapshot = full if full and slow.snapshots and generator.random() < 0.5 else None
        cache.insert(tokens, sequence.blocks, snapshot)
        slow.insert(tokens, sequence.blocks, snapshot)

    def finish():
        sequence = sequences.pop(generator.randrange(len(sequences)))
        if generator.random() < 0.8:
            free(sequence.blocks)
        else:  # in any order, and not all at once
            generator.shuffle(sequence.blocks)
            for block in sequence.blocks:
                free([block])

    for _ in range(3000):
        choices = [start, start] if len(sequences) < 8 else []
        if sequences:
            choices += [grow, grow, insert, insert, finish]
        generator.choice(choices)()
        check_consistent(cache)
        for sequence in sequences:
            for index in range(len(sequence.tokens) // size):
                assert store.contents[sequence.blocks[index]] == tuple(
                    sequence.tokens[: (index + 1) * size]
                )
        assert cache.pool.num_referenced == len(slow.ref_counts)
        assert cache.num_free_blocks == count - len(slow.ref_counts)
        assert cache.num_on_device == len(slow.cached_blocks())
        assert cache.num_in_host == len(slow.in_host())
    assert num_failed > 20
    assert num_reused > (500 if cache.enabled else 0)
    for sequence in sequences:
        cache.free(sequence.blocks)
    check_consistent(cache)
    assert cache.num_free_blocks == count
