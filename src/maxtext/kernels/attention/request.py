"""The arguments of an attention call: the static request, and the arrays with their options.

Shapes: B batch, S query length, T key length, H query heads, K key/value heads (H is a multiple of
K), D head dim of queries and keys, Dv head dim of values.

`AttentionMask`, `BlockSizes` and `AttentionRequest` are static and hashable: a back end decides
from an `AttentionRequest` alone whether it supports the call. `AttentionInputs` holds the arrays
and options for the back end that runs it.
"""

from dataclasses import dataclass

from jax import Array

from maxtext.common.gpu import gpu_capability
from maxtext.kernels.attention_options import CAUSAL, AttentionMask, BlockSizes


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
    mask: AttentionMask = CAUSAL
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
