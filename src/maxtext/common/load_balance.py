"""Reorders the tokens of a sequence so that its shards do equal work in causal attention.

With n shards, dual_chunk_swap splits the sequence into 2n chunks and gives shard r the chunks r and
2n-1-r; striped gives token i to shard i mod n. The tokens of a shard keep their relative order.
"""

from dataclasses import dataclass

import numpy as np

STRATEGIES = ("dual_chunk_swap", "striped")


@dataclass(frozen=True)
class LoadBalancedOrder:
    strategy: str
    num_shards: int

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"the strategy is {' or '.join(STRATEGIES)}, not {self.strategy}")

    def positions(self, length: int) -> np.ndarray:
        """[length] int32: the position in the sequence of the token at each index."""
        positions = np.arange(length, dtype=np.int32)
        if self.strategy == "striped":
            return positions.reshape(-1, self.num_shards).T.reshape(-1)
        chunks = positions.reshape(2 * self.num_shards, -1)
        first, mirrored = chunks[: self.num_shards], chunks[: self.num_shards - 1 : -1]
        return np.stack([first, mirrored], axis=1).reshape(-1)
