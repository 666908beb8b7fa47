"""A prefix cache with its store."""

from maxtext.inference.engine.prefix_cache import BlockPool, PrefixCache


class FakeStore:
    """The blocks of the device, as the prefixes that were written to them."""

    def __init__(self, count):
        self.contents = [None] * count
        self.reads = []
        self.writes = []
        self.num_offloaded_snapshots = 0

    def read_block(self, block):
        self.reads.append(block)
        return self.contents[block]

    def write_block(self, block, data):
        self.writes.append(block)
        self.contents[block] = data

    def to_host(self, snapshot):
        self.num_offloaded_snapshots += 1
        return snapshot

    def compute(self, tokens, blocks, size):
        for index, block in enumerate(blocks):
            self.contents[block] = tuple(tokens[: (index + 1) * size])


def new_cache(count, size=2, **settings):
    return PrefixCache(BlockPool(count), size, **settings)


def cache_with_store(count, size=2, **settings):
    store = FakeStore(count)
    return new_cache(count, size, store=store, **settings), store
