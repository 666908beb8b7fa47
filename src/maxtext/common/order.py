"""The order of a sequence's tokens when its shards are to have equal work: later tokens see more of
it.

With n shards, dual_chunk_swap cuts the sequence into 2n chunks and gives shard r the chunks r and
2n-1-r; striped deals tokens out in turn, token i to shard i mod n. A shard's tokens stay in their
own order.
"""

from dataclasses import dataclass

import numpy as np

KINDS = ("dual_chunk_swap", "striped")


@dataclass(frozen=True)
class Order:
    kind: str
    shards: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"an order is {' or '.join(KINDS)}, not {self.kind}")

    def tokens(self, length: int) -> np.ndarray:
        """[length]: which token stands at a place."""
        tokens = np.arange(length, dtype=np.int32)
        if self.kind == "striped":
            return tokens.reshape(-1, self.shards).T.reshape(-1)
        chunks = tokens.reshape(2 * self.shards, -1)
        return np.stack([chunks[: self.shards], chunks[: self.shards - 1 : -1]], axis=1).reshape(-1)
