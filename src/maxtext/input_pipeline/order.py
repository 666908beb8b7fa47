"""Which document comes when: an order for each epoch, shared out among streams, as arithmetic on
indices.

Nothing is read here and nothing but a number is remembered, so any place in the order can be
returned to at once.
- Documents that cost the same anywhere are shuffled as a whole, then dealt to the streams one by
  one.
- Documents in blocks (row groups of Parquet, say) that are decoded together keep near each other:
  blocks are dealt to the streams, and each epoch shuffles a stream's blocks, then the documents of
  WINDOW blocks at a time, or of as many as are kept in memory: a block that is dropped too early
  would be decoded again for each of its documents.
"""

import sys
import threading
from abc import abstractmethod
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

import grain
import numpy as np

from maxtext.input_pipeline.formats import cache
from maxtext.input_pipeline.interface import ShardSpec

WINDOW = 8  # blocks whose documents are mixed, at most
PERMUTED = (
    2**20
)  # documents whose order is kept as numbers; Grain's shuffle computes it, slowly for small counts
BLOCKS_PER_STREAM = 8  # at least so many for each stream: larger blocks are divided

# The streams of a process have one order of all documents, and each its part of it: it is kept
# once, as long as a stream is in that epoch.
PERMUTATIONS: WeakValueDictionary[tuple[int, int, int], np.ndarray] = WeakValueDictionary()
PERMUTATIONS_LOCK = threading.Lock()


def epoch_order(
    count: int, blocks: np.ndarray | None, shard: ShardSpec, seed: int | None, block_bytes: int = 0
) -> grain.MapDataset:
    """Indices of this stream's documents; `repeat` continues with the orders of further epochs.
    `seed` None: sorted. `block_bytes`: of all blocks in memory."""
    if seed is not None and blocks is not None:
        return BlockOrder(blocks, shard, seed, blocks_together(blocks, block_bytes))
    everything = grain.MapDataset.range(count)
    if seed is not None:
        everything = Shuffled(count, seed) if count <= PERMUTED else everything.shuffle(seed)
    # Shared out after the shuffle: in each epoch the streams together have every document once.
    return everything[shard.index :: shard.count]


class EpochOrder(grain.MapDataset):
    """`count` indices, in an order that is new in each epoch: those past the end belong to the next
    epochs.
    """

    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Any:
        return (
            self.slice(index)
            if isinstance(index, slice)
            else self.document(*divmod(int(index), self.count))
        )

    @abstractmethod
    def document(self, epoch: int, place: int) -> int: ...


class Shuffled(EpochOrder):
    """All indices, from a permutation."""

    def __init__(self, count: int, seed: int):
        super().__init__()
        self.count, self.seed = count, seed
        self.permutations: dict[int, np.ndarray] = {}

    def document(self, epoch: int, place: int) -> int:
        order = self.permutations.get(epoch)
        if order is None:
            order = permutation(self.count, self.seed, epoch)
            # Threads near the end of an epoch are already in the next.
            self.permutations = {epoch: order, **dict(list(self.permutations.items())[:1])}
        return int(order[place])


def permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    with PERMUTATIONS_LOCK:
        order = PERMUTATIONS.get((count, seed, epoch))
        if order is None:
            order = np.random.default_rng([seed, epoch]).permutation(count)
            PERMUTATIONS[count, seed, epoch] = order
    return order


class BlockOrder(EpochOrder):
    def __init__(self, blocks: np.ndarray, shard: ShardSpec, seed: int, window: int = WINDOW):
        super().__init__()
        self.seed, self.index, self.window = seed, shard.index, window
        starts, sizes = split_blocks(blocks, BLOCKS_PER_STREAM * shard.count)
        mine = np.random.default_rng([seed, 0]).permutation(len(sizes))[shard.index :: shard.count]
        self.starts, self.sizes = starts[mine], sizes[mine]
        self.count = int(self.sizes.sum())
        self.blocks = lru_cache(2)(self.blocks_of)
        self.documents = lru_cache(4)(self.documents_of)

    def document(self, epoch: int, place: int) -> int:
        _, ends = self.blocks(epoch)
        window = int(np.searchsorted(ends, place, side="right"))
        return int(self.documents(epoch, window)[place - (int(ends[window - 1]) if window else 0)])

    def blocks_of(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The order of this epoch's blocks, and where each window of them ends."""
        order = np.random.default_rng([self.seed, 1, self.index, epoch]).permutation(
            len(self.sizes)
        )
        ends = np.cumsum(self.sizes[order])
        return order, ends[
            np.minimum(np.arange(self.window, len(ends) + self.window, self.window), len(ends)) - 1
        ]

    def documents_of(self, epoch: int, window: int) -> np.ndarray:
        order, _ = self.blocks(epoch)
        these = order[window * self.window : (window + 1) * self.window]
        indices = np.concatenate(
            [np.arange(self.starts[one], self.starts[one] + self.sizes[one]) for one in these]
        )
        return np.random.default_rng([self.seed, 2, self.index, epoch, window]).permutation(indices)


def blocks_together(blocks: np.ndarray, block_bytes: int) -> int:
    """Those of this window and of the next, in which threads read ahead, fit into the cache."""
    each = block_bytes // max(int(np.count_nonzero(blocks)), 1)
    return min(max(cache.DECODED_BYTES // 2 // max(each, 1), 1), WINDOW)


def streams_within(blocks: np.ndarray | None, block_bytes: int) -> int:
    """How many streams keep this window of blocks and the next one in the memory that one stream
    may use.
    """
    if blocks is None:
        return sys.maxsize
    each = block_bytes // max(int(np.count_nonzero(blocks)), 1)
    return cache.DECODED_BYTES // max(2 * blocks_together(blocks, block_bytes) * each, 1)


def split_blocks(blocks: np.ndarray, min_pieces: int) -> tuple[np.ndarray, np.ndarray]:
    """First document and number of documents of each block, after large ones are divided so that
    there are `min_pieces`.
    """
    most = max(int(blocks.sum()) // min_pieces, 1)
    parts = -(-blocks // most)
    block = np.repeat(np.arange(len(blocks)), parts)
    place = np.arange(len(block)) - np.repeat(np.cumsum(parts) - parts, parts)
    first = (np.cumsum(blocks) - blocks)[block]
    starts, ends = (first + at * blocks[block] // parts[block] for at in (place, place + 1))
    return starts, ends - starts
