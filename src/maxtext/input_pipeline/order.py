"""The order of documents in each epoch, and shuffling of data that can only be read in order.

`epoch_order` computes the order of the documents of each data stream as arithmetic on indices.
Nothing is read, and the state is a number, so any position in the order can be restored at once.
- Documents that can be read alone are shuffled globally, then assigned to the streams round-robin.
- Documents in blocks that are decoded together (row groups of Parquet, for example) stay close:
  blocks are assigned to the streams, and each epoch shuffles a stream's blocks, then the documents
  within WINDOW blocks at a time, or within as many as the cache holds. A block that is evicted too
  early would be decoded again for each of its documents.

`WindowShuffle` shuffles elements within windows of a fixed size, like Grain's
WindowShuffleIterDataset, but with one permutation for each window: Grain computes each index by a
cipher for large ranges, which takes a millisecond for each row of a window of a hundred. The state
is the parent's state at the start of the window and the position in it, so the window is read again
after a restart.
"""

import sys
import threading
from abc import abstractmethod
from functools import lru_cache
from itertools import islice
from weakref import WeakValueDictionary

import grain
import numpy as np

from maxtext.common.types import Json
from maxtext.input_pipeline.formats import interface
from maxtext.input_pipeline.interface import ShardSpec, check_position, saved_position

WINDOW = 8  # most blocks whose documents are shuffled together
# Most documents whose permutation is stored; Grain's shuffle computes it, slowly for small counts
MAX_PERMUTED = 2**20
BLOCKS_PER_STREAM = 8  # least number for each stream: larger blocks are divided

# The streams of a process share one permutation of all documents, which lives as long as some
# stream is in that epoch.
PERMUTATIONS: WeakValueDictionary[tuple[int, int, int], np.ndarray] = WeakValueDictionary()
PERMUTATIONS_LOCK = threading.Lock()


def epoch_order(
    count: int, blocks: np.ndarray | None, shard: ShardSpec, seed: int | None, block_bytes: int = 0
) -> grain.MapDataset:
    """The indices of this stream's documents; `repeat` continues with the orders of later epochs.
    Without a `seed` they are sorted. `block_bytes` is the decoded size of all blocks.
    """
    if seed is not None and blocks is not None:
        return BlockOrder(blocks, shard, seed, window_blocks(blocks, block_bytes))
    indices = grain.MapDataset.range(count)
    if seed is not None:
        indices = Shuffled(count, seed) if count <= MAX_PERMUTED else indices.shuffle(seed)
    # Sharded after the shuffle: in each epoch the streams together have every document once.
    return indices[shard.index :: shard.count]


class EpochOrder(grain.MapDataset):
    """`count` indices in a new order in each epoch. Indices past the end belong to later epochs."""

    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int | slice) -> "int | grain.MapDataset":
        return (
            self.slice(index)
            if isinstance(index, slice)
            else self.document(*divmod(int(index), self.count))
        )

    @abstractmethod
    def document(self, epoch: int, position: int) -> int: ...


class Shuffled(EpochOrder):
    """All indices, from a stored permutation."""

    def __init__(self, count: int, seed: int):
        super().__init__()
        self.count = count
        self.seed = seed
        self.permutations: dict[int, np.ndarray] = {}

    def document(self, epoch: int, position: int) -> int:
        order = self.permutations.get(epoch)
        if order is None:
            order = permutation(self.count, self.seed, epoch)
            # Threads that prefetch are in the next epoch before others have ended the last.
            self.permutations = {epoch: order, **dict(list(self.permutations.items())[:1])}
        return int(order[position])


def permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    with PERMUTATIONS_LOCK:
        order = PERMUTATIONS.get((count, seed, epoch))
        if order is None:
            order = np.random.default_rng([seed, epoch]).permutation(count)
            PERMUTATIONS[count, seed, epoch] = order
    return order


class BlockOrder(EpochOrder):
    """Shuffled blocks, with the documents shuffled within windows of blocks."""

    def __init__(self, blocks: np.ndarray, shard: ShardSpec, seed: int, window: int = WINDOW):
        super().__init__()
        self.seed = seed
        self.index = shard.index
        self.window = window
        starts, sizes = split_blocks(blocks, BLOCKS_PER_STREAM * shard.count)
        own_blocks = np.random.default_rng([seed, 0]).permutation(len(sizes))[
            shard.index :: shard.count
        ]
        self.starts, self.sizes = starts[own_blocks], sizes[own_blocks]
        self.count = int(self.sizes.sum())
        self.blocks = lru_cache(2)(self.blocks_of)
        self.documents = lru_cache(4)(self.documents_of)

    def document(self, epoch: int, position: int) -> int:
        _, ends = self.blocks(epoch)
        window = int(np.searchsorted(ends, position, side="right"))
        return int(
            self.documents(epoch, window)[position - (int(ends[window - 1]) if window else 0)]
        )

    def blocks_of(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The order of this epoch's blocks, and the end of each window of them."""
        order = np.random.default_rng([self.seed, 1, self.index, epoch]).permutation(
            len(self.sizes)
        )
        ends = np.cumsum(self.sizes[order])
        return order, ends[
            np.minimum(np.arange(self.window, len(ends) + self.window, self.window), len(ends)) - 1
        ]

    def documents_of(self, epoch: int, window: int) -> np.ndarray:
        order, _ = self.blocks(epoch)
        blocks = order[window * self.window : (window + 1) * self.window]
        indices = np.concatenate(
            [
                np.arange(self.starts[block], self.starts[block] + self.sizes[block])
                for block in blocks
            ]
        )
        return np.random.default_rng([self.seed, 2, self.index, epoch, window]).permutation(indices)


def window_blocks(blocks: np.ndarray, block_bytes: int) -> int:
    """How many blocks are shuffled together. Those of a window and of the next, in which threads
    prefetch, fit in the cache.
    """
    mean_block_bytes = block_bytes // max(int(np.count_nonzero(blocks)), 1)
    return min(max(interface.DECODED_BYTES // 2 // max(mean_block_bytes, 1), 1), WINDOW)


def max_streams_in_memory(blocks: np.ndarray | None, block_bytes: int) -> int:
    """How many streams can cache a window of blocks and the next one in the memory of one
    stream.
    """
    if blocks is None:
        return sys.maxsize
    mean_block_bytes = block_bytes // max(int(np.count_nonzero(blocks)), 1)
    return interface.DECODED_BYTES // max(
        2 * window_blocks(blocks, block_bytes) * mean_block_bytes, 1
    )


def split_blocks(blocks: np.ndarray, min_blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """First document and number of documents of each block, after large ones are divided so that
    there are `min_blocks`.
    """
    max_documents = max(int(blocks.sum()) // min_blocks, 1)
    parts = -(-blocks // max_documents)
    block = np.repeat(np.arange(len(blocks)), parts)
    position = np.arange(len(block)) - np.repeat(np.cumsum(parts) - parts, parts)
    first = (np.cumsum(blocks) - blocks)[block]
    starts, ends = (first + at * blocks[block] // parts[block] for at in (position, position + 1))
    return starts, ends - starts


class WindowShuffle(grain.IterDataset):
    def __init__(self, parent: grain.IterDataset, window: int, seed: int):
        super().__init__(parent)
        self.parent = parent
        self.window = window
        self.seed = seed

    def __iter__(self) -> grain.DatasetIterator:
        return WindowShuffleIterator(iter(self.parent), self.window, self.seed)


class WindowShuffleIterator(grain.DatasetIterator):
    def __init__(self, parent: grain.DatasetIterator, window: int, seed: int):
        super().__init__(parent)
        self.parent = parent
        self.window = window
        self.seed = seed
        self.number = -1
        self.position = 0
        self.elements: list[object] = []
        self.start = parent.get_state()

    def __next__(self) -> object:
        if self.position == len(self.elements):
            self.fill(self.number + 1, self.parent.get_state())
            if not self.elements:
                raise StopIteration
        self.position += 1
        return self.elements[self.position - 1]

    def fill(self, number: int, start: object) -> None:
        self.number = number
        self.start = start
        self.position = 0
        elements = list(islice(self.parent, self.window))
        order = np.random.default_rng([self.seed, number]).permutation(len(elements))
        self.elements = [elements[position] for position in order]

    def get_state(self) -> Json:
        return {"window": self.number, "position": self.position, "parent": self.start}

    def set_state(self, state: Json) -> None:
        self.parent.set_state(state["parent"])
        if state["window"] < 0:
            self.number = -1
            self.position = 0
            self.elements = []
            self.start = state["parent"]
        else:
            self.fill(state["window"], state["parent"])
            position = saved_position(state)
            check_position(position, len(self.elements))
            self.position = position
