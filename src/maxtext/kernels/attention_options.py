"""The mask, the token order and the block sizes of attention: static, hashable, and without JAX, so
that layer specs can hold them.

`LoadBalancedOrder` reorders the tokens of a sequence so that its shards do equal work in causal
attention. With n shards, dual_chunk_swap splits the sequence into 2n chunks and gives shard r the
chunks r and 2n-1-r; striped gives token i to shard i mod n. The tokens of a shard keep their
relative order.
"""

from dataclasses import dataclass

import numpy as np

from maxtext.common.errors import ConfigError

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


LAYOUTS = ("HEAD_DIM_MINOR", "SEQ_MINOR")
TILE = 128  # the lanes of a TPU register: every block of the flash kernel is a multiple of it


@dataclass(frozen=True)
class AttentionMask:
    """Which keys a query sees, apart from segments and selections. Position i sees position j if

    causal: j <= i; window: also i - window < j; chunk: also i // chunk == j // chunk.
    order: the permutation of the tokens of a row, if they are permuted; positions that are not
    given are those before the permutation.
    """

    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    order: LoadBalancedOrder | None = None

    def __post_init__(self) -> None:
        if not self.causal and (self.window is not None or self.chunk is not None):
            raise ConfigError("A window or a chunk of attention needs causal attention.")
        if self.window is not None and self.chunk is not None:
            raise ConfigError("Attention can have a window or a chunk, not both.")
        for name, size in (("window", self.window), ("chunk", self.chunk)):
            if size is not None and size < 1:
                raise ConfigError(f"The {name} of attention must be at least 1, not {size}.")

    def simplify(self, length: int) -> "AttentionMask":
        """The same mask for positions 0..length-1, without a window or chunk that covers all."""
        if max(self.window or 0, self.chunk or 0) >= length:
            return AttentionMask(causal=True, order=self.order)
        return self

    def positions(self, length: int) -> np.ndarray:
        """[length]: the position of the token at each index."""
        return (
            np.arange(length, dtype=np.int32)
            if self.order is None
            else self.order.positions(length)
        )

    def describe(self) -> str:
        text = self.describe_pattern()
        if self.order is not None:
            text += f" in {self.order.strategy} order over {self.order.num_shards} shards"
        return text

    def describe_pattern(self) -> str:
        if self.window is not None:
            return f"window {self.window}"
        if self.chunk is not None:
            return f"chunks of {self.chunk}"
        return "causal" if self.causal else "all to all"


CAUSAL = AttentionMask()


@dataclass(frozen=True)
class BlockSizes:
    """Block sizes of the flash kernel, in tokens. Each is an upper bound: the kernel uses the
    largest multiple of 128 up to it that divides the length (for a `_compute` size: its memory
    block). They change speed, not results.

    The forward kernel uses q, kv, kv_compute; the backward kernel of keys and values q_dkv, kv_dkv,
    kv_dkv_compute; the backward kernel of queries q_dq, kv_dq, unless `use_fused_bwd` computes all
    three gradients in one kernel. A layout is the axis of that operand that is contiguous in memory
    inside the kernel.
    """

    q: int = 512
    kv: int = 512
    kv_compute: int = 512
    q_dkv: int = 512
    kv_dkv: int = 512
    kv_dkv_compute: int = 512
    q_dq: int = 512
    kv_dq: int = 512
    use_fused_bwd: bool = False
    q_layout: str = "HEAD_DIM_MINOR"
    k_layout: str = "HEAD_DIM_MINOR"
    v_layout: str = "HEAD_DIM_MINOR"

    def __post_init__(self) -> None:
        for name in ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq"):
            if getattr(self, name) < TILE:
                raise ConfigError(
                    f"Attention block size {name} must be at least {TILE}, "
                    f"not {getattr(self, name)}."
                )
        for name in ("q_layout", "k_layout", "v_layout"):
            if getattr(self, name) not in LAYOUTS:
                raise ConfigError(
                    f"Attention {name} must be {' or '.join(LAYOUTS)}, not {getattr(self, name)}."
                )
