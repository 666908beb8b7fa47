"""LRU caches of open files and decoded blocks, shared by all files of a dataset and all threads.

A dataset may have more files than a process may open, and more blocks than memory. If several
threads need the same entry, one creates it and the others wait.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

OPEN_FILES = 128
DECODED_BLOCKS = 16
DECODED_BYTES = 2**30  # large blocks are evicted earlier, but MIN_BLOCKS stay
MIN_BLOCKS = 2  # at the end of a block, prefetching threads need the next one, too


@dataclass
class Entry:
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_ready: bool = False
    value: Any = None
    nbytes: int = 0


class Cache:
    """An LRU cache of at most `count` values and, if `weigh` returns their sizes, about `limit`
    bytes. It is pickled without its entries.
    """

    def __init__(
        self, count: int, limit: int | None = None, weigh: Callable[[Any], int] | None = None
    ):
        self.count = count
        self.limit = limit
        self.weigh = weigh
        self.lock = threading.Lock()
        self.entries: OrderedDict[Hashable, Entry] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        with self.lock:
            entry = self.entries.get(key)
            if entry is None:
                entry = self.entries[key] = Entry()
                self.evict()
            else:
                self.entries.move_to_end(key)
        if not entry.is_ready:
            # A failure is not cached: the next thread tries again.
            with entry.lock:
                if not entry.is_ready:
                    entry.value = make()
                    entry.nbytes = self.weigh(entry.value) if self.weigh else 0
                    entry.is_ready = True
            with self.lock:
                self.evict()
        return entry.value

    def evict(self) -> None:
        nbytes = sum(entry.nbytes for entry in self.entries.values()) if self.limit else 0
        while len(self.entries) > self.count or (
            len(self.entries) > MIN_BLOCKS and nbytes > (self.limit or 0)
        ):
            nbytes -= self.entries.popitem(last=False)[1].nbytes

    def __reduce__(self) -> tuple:
        return Cache, (self.count, self.limit, self.weigh)


def block_bytes(block: Any) -> int:
    return block.nbytes if hasattr(block, "nbytes") else len(block)


class Caches:
    """The caches of one dataset."""

    def __init__(self) -> None:
        self.files = Cache(OPEN_FILES)
        self.blocks = Cache(DECODED_BLOCKS, DECODED_BYTES, block_bytes)
