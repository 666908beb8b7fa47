"""The arguments of an attention call: the mask, the block sizes, the static request, the arrays.

Shapes: B batch, S query length, T key length, H query heads, K key/value heads (H is a multiple of
K), D head dim of queries and keys, Dv head dim of values.

`AttentionMask`, `BlockSizes` and `AttentionRequest` are static and hashable: a back end decides
from an `AttentionRequest` alone whether it supports the call. `AttentionInputs` holds the arrays
and options for the back end that runs it.
"""

from dataclasses import dataclass

import numpy as np
from jax import Array

from maxtext.common.errors import ConfigError
from maxtext.common.gpu import gpu_capability
from maxtext.common.load_balance import LoadBalancedOrder

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


@dataclass(frozen=True)
class AttentionRequest:
    """The static properties of a call, but for the batch size: no back end depends on it."""

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
    capability: str = ""  # compute capability of a GPU: "9.0" is Hopper; empty if unknown

    @classmethod
    def from_inputs(cls, inputs: "AttentionInputs", platform: str) -> "AttentionRequest":
        return cls(
            platform=platform,
            dtype=inputs.q.dtype.name,
            q_length=inputs.q.shape[1],
            k_length=inputs.k.shape[1],
            q_heads=inputs.q.shape[2],
            k_heads=inputs.k.shape[2],
            head_dim=inputs.q.shape[3],
            v_head_dim=inputs.v.shape[3],
            mask=inputs.mask,
            has_segments=inputs.q_segments is not None,
            soft_cap=inputs.soft_cap,
            has_sinks=inputs.sinks is not None,
            has_selection=inputs.selected is not None,
            custom_positions=inputs.custom_positions,
            capability=gpu_capability() if platform == "gpu" else "",
        )

    @property
    def shape(self) -> str:
        heads, head_dim = f"{self.q_heads}", f"{self.head_dim}"
        if self.q_heads != self.k_heads:
            heads += f" over {self.k_heads}"
        if self.head_dim != self.v_head_dim:
            head_dim += f"/{self.v_head_dim}"
        return f"{self.q_length} x {self.k_length} tokens, {heads} heads of {head_dim}"

    def describe(self) -> str:
        parts = [self.dtype, self.shape, self.mask.describe()]
        parts += ["segments"] * self.has_segments
        parts += ["positions"] * self.custom_positions
        parts += [f"soft cap {self.soft_cap:g}"] if self.soft_cap is not None else []
        parts += ["sinks"] * self.has_sinks
        parts += ["a selection of keys"] * self.has_selection
        return ", ".join(parts)


@dataclass(frozen=True)
class AttentionInputs:
    """The arrays and options of a call, as `attend` documents them."""

    q: Array  # [B, S, H, D]
    k: Array  # [B, T, K, D]
    v: Array  # [B, T, K, Dv]
    mask: AttentionMask
    scale: float
    q_positions: Array | None = None  # [B, S]
    k_positions: Array | None = None  # [B, T]
    q_segments: Array | None = None  # [B, S]
    k_segments: Array | None = None  # [B, T]; the same object as q_segments if they are shared
    max_segments: int = 0  # upper bound on runs of equal segments in a row; 0: unknown
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
        """Whether query i and key i are the same token, as far as the arguments show."""
        same_length = self.q.shape[1] == self.k.shape[1]
        return same_length and not self.custom_positions and self.q_segments is self.k_segments
