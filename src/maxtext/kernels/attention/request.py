"""What an attention call asks for: which keys are visible, the tile sizes, the static facts, and
the arrays.

Shapes: B batch, S query length, T key length, H query heads, K key/value heads (H is a multiple of
K), D head size of queries and keys, Dv head size of values.

`AttentionMask`, `BlockSizes` and `AttentionRequest` are static and hashable: a back end says from a `AttentionRequest`
alone whether it can do the job. `AttentionInputs` holds the arrays with the same options, for the back end
that was chosen.
"""

from dataclasses import dataclass

import numpy as np
from jax import Array

from maxtext.common.errors import ConfigError
from maxtext.common.load_balance import LoadBalancedOrder

LAYOUTS = ("HEAD_DIM_MINOR", "SEQ_MINOR")
TILE = 128  # the lanes of a TPU register: every block of the flash kernel is a multiple of it


@dataclass(frozen=True)
class AttentionMask:
    """Which keys a query may see, before segments. Position i sees position j when

    causal: j <= i; window: also i - window < j; chunk: also floor(i / chunk) == floor(j / chunk).
    order: where tokens stand in an order of their own; their positions, unless given, are those
    before it.
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

    def within(self, length: int) -> "AttentionMask":
        """The same mask for positions 0..length-1: a window or chunk that covers them all
        says nothing.
        """
        if max(self.window or 0, self.chunk or 0) >= length:
            return AttentionMask(causal=True, order=self.order)
        return self

    def positions(self, length: int) -> np.ndarray:
        """[length], of the tokens as they stand."""
        return (
            np.arange(length, dtype=np.int32)
            if self.order is None
            else self.order.positions(length)
        )

    def describe(self) -> str:
        words = self.describe_mask()
        return (
            words
            if self.order is None
            else f"{words} in {self.order.strategy} order over {self.order.num_shards} shards"
        )

    def describe_mask(self) -> str:
        if self.window is not None:
            return f"window {self.window}"
        if self.chunk is not None:
            return f"chunks of {self.chunk}"
        return "causal" if self.causal else "all to all"


@dataclass(frozen=True)
class BlockSizes:
    """Tiles of the flash kernel, in tokens. Each is an upper bound: the kernel takes the largest
    multiple of 128 that divides the length (for a `_compute` size: its memory block) and is not
    above it. They change speed, not results.

    The forward kernel uses q, kv, kv_compute; the backward one for keys and values q_dkv, kv_dkv,
    kv_dkv_compute; the backward one for queries q_dq, kv_dq, unless `use_fused_bwd` computes all
    three gradients in one kernel. A layout says which axis of that operand is contiguous in memory
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
                    f"Attention block size {name} must be at least {TILE}, not {getattr(self, name)}."
                )
        for name in ("q_layout", "k_layout", "v_layout"):
            if getattr(self, name) not in LAYOUTS:
                raise ConfigError(
                    f"Attention {name} must be {' or '.join(LAYOUTS)}, not {getattr(self, name)}."
                )


@dataclass(frozen=True)
class AttentionRequest:
    """The static facts of one call. The batch size is left out: no answer depends on it."""

    platform: str  # cpu, gpu or tpu
    dtype: str  # of q, k and v
    q_length: int
    k_length: int
    q_heads: int
    k_heads: int
    head_dim: int
    v_head_dim: int
    mask: AttentionMask = AttentionMask()
    has_segments: bool = False
    soft_cap: float | None = None
    has_sinks: bool = False
    has_selection: bool = False
    custom_positions: bool = False
    capability: str = ""  # of a GPU: "9.0" is Hopper; empty when not known

    @property
    def shape(self) -> str:
        heads = (
            f"{self.q_heads}"
            if self.q_heads == self.k_heads
            else f"{self.q_heads} over {self.k_heads}"
        )
        size = (
            f"{self.head_dim}"
            if self.head_dim == self.v_head_dim
            else f"{self.head_dim}/{self.v_head_dim}"
        )
        return f"{self.q_length} x {self.k_length} tokens, {heads} heads of {size}"

    def describe(self) -> str:
        words = [self.dtype, self.shape, self.mask.describe()]
        words += ["segments"] * self.has_segments
        words += ["positions"] * self.custom_positions
        words += [f"soft cap {self.soft_cap:g}"] if self.soft_cap is not None else []
        words += ["sinks"] * self.has_sinks
        words += ["a selection of keys"] * self.has_selection
        return ", ".join(words)


@dataclass(frozen=True)
class AttentionInputs:
    """The arrays of one call and its options, as `attend` documents them."""

    q: Array  # [B, S, H, D]
    k: Array  # [B, T, K, D]
    v: Array  # [B, T, K, Dv]
    mask: AttentionMask
    scale: float
    q_positions: Array | None = None  # [B, S]
    k_positions: Array | None = None  # [B, T]
    q_segments: Array | None = None  # [B, S]
    k_segments: Array | None = (
        None  # [B, T]; the very object q_segments where queries and keys share them
    )
    max_segments: int = (
        0  # runs of equal segments in a row, padding among them, at most; 0: not known
    )
    soft_cap: float | None = None
    sinks: Array | None = None  # [H]
    selected: Array | None = None  # [B, 1 or H, S, T]
    float32_logits: bool = False
    float32_product: bool = False
    block_sizes: BlockSizes | None = None

    @property
    def custom_positions(self) -> bool:
        return self.q_positions is not None or self.k_positions is not None

    @property
    def is_self_attention(self) -> bool:
        """Query i and key i are the same token, as far as the arguments show."""
        same_length = self.q.shape[1] == self.k.shape[1]
        return same_length and not self.custom_positions and self.q_segments is self.k_segments
