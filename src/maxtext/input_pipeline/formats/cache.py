"""The last few open files and decoded blocks, shared by all the files of a dataset and all threads.

A dataset may have more files than a process may hold open, and more blocks than memory. When
several threads ask for the same thing, one makes it and the others wait for it.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

OPEN_FILES = 128
DECODED_BLOCKS = 16
DECODED_BYTES = 2**30  # fewer blocks are kept when they are large, but always KEPT of them
MIN_BLOCKS = 2  # threads read ahead: where one block ends, some are in it and some in the next


@dataclass
class Entry:
    lock: threading.Lock = field(default_factory=threading.Lock)
    made: bool = False
    value: Any = None
    nbytes: int = 0


class Cache:
    """At most `count` values and, if `weigh` tells the size of one, about `limit` bytes. It pickles
    empty.
    """

    def __init__(
        self, count: int, limit: int | None = None, weigh: Callable[[Any], int] | None = None
    ):
        self.count, self.limit, self.weigh = count, limit, weigh
        self.lock = threading.Lock()
        self.entries: OrderedDict[Hashable, Entry] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        with self.lock:
            entry = self.entries.get(key)
            if entry is None:
                entry = self.entries[key] = Entry()
                self.drop_oldest()
            else:
                self.entries.move_to_end(key)
        if not entry.made:
            # A failure is not kept: the next thread that asks tries again.
            with entry.lock:
                if not entry.made:
                    entry.value = make()
                    entry.nbytes = self.weigh(entry.value) if self.weigh else 0
                    entry.made = True
            with self.lock:
                self.drop_oldest()
        return entry.value

    def drop_oldest(self) -> None:
        held = sum(entry.nbytes for entry in self.entries.values()) if self.limit else 0
        while len(self.entries) > self.count or (
            len(self.entries) > MIN_BLOCKS and held > (self.limit or 0)
        ):
            held -= self.entries.popitem(last=False)[1].nbytes

    def __reduce__(self) -> tuple:
        return Cache, (self.count, self.limit, self.weigh)


def block_bytes(block: Any) -> int:
    return block.nbytes if hasattr(block, "nbytes") else len(block)


class Caches:
    """What the files of one dataset share."""

    def __init__(self) -> None:
        self.files = Cache(OPEN_FILES)
        self.blocks = Cache(DECODED_BLOCKS, DECODED_BYTES, block_bytes)
