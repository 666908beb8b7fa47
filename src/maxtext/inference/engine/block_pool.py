"""Reference counts of the blocks of a paged KV cache."""

from collections.abc import Sequence


class BlockPool:
    """`num_blocks` blocks, each referenced by any number of sequences.

    A block without references is unused, or belongs to the prefix cache, which evicts it when
    blocks run short. `num_free` counts both.
    """

    def __init__(self, num_blocks: int):
        assert num_blocks >= 0
        self.num_blocks = num_blocks
        self.unused = list(reversed(range(num_blocks)))  # the last is allocated next
        self.ref_counts = [0] * num_blocks
        self.num_referenced = 0

    @property
    def num_free(self) -> int:
        """How many blocks no sequence references."""
        return self.num_blocks - self.num_referenced

    def allocate(self, count: int) -> list[int]:
        """`count` unused blocks, with one reference each."""
        blocks = [self.unused.pop() for _ in range(count)]
        for block in blocks:
            self.ref_counts[block] = 1
        self.num_referenced += count
        return blocks

    def acquire(self, block: int) -> bool:
        """Add a reference; returns whether it is the first."""
        self.ref_counts[block] += 1
        first = self.ref_counts[block] == 1
        self.num_referenced += first
        return first

    def release(self, block: int) -> bool:
        """Drop a reference; returns whether it was the last. The block is not unused yet."""
        assert self.ref_counts[block] > 0, f"block {block} is freed but not referenced"
        self.ref_counts[block] -= 1
        last = self.ref_counts[block] == 0
        self.num_referenced -= last
        return last

    def is_referenced(self, block: int) -> bool:
        return self.ref_counts[block] > 0

    def only_referenced_once(self, blocks: Sequence[int]) -> list[int]:
        return [block for block in blocks if self.ref_counts[block] == 1]
