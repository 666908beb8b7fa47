"""The arguments of an attention call: the static request, the arrays with options, and their check.

`AttentionMask`, `BlockSizes` and `AttentionRequest` are static and hashable: a back end decides
from an `AttentionRequest` alone whether it supports the call. `AttentionInputs` holds the arrays
and options for the back end that runs it.

`validate_inputs` checks shapes and dtypes, before a kernel fails with an obscure message, and sets
defaults.

Shapes: B batch, S query length, T key length, H query heads, K key/value heads (H is a multiple of
K), D head dim of queries and keys, Dv head dim of values.
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax import Array

from maxtext.common.hardware import gpu_capability
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


def validate_inputs(inputs: AttentionInputs) -> AttentionInputs:
    """The inputs with defaults filled in and redundant options removed.

    Raises ValueError if shapes or dtypes do not match.
    """
    check_shapes(inputs)
    if inputs.k_segments is None:
        inputs = replace(inputs, k_segments=inputs.q_segments)
    if not inputs.mask.causal:
        inputs = replace(inputs, q_positions=None, k_positions=None)  # nothing compares positions
    if not inputs.custom_positions:
        max_length = max(inputs.q.shape[1], inputs.k.shape[1])
        inputs = replace(inputs, mask=inputs.mask.simplify(max_length))
    return inputs


def check_shapes(inputs: AttentionInputs) -> None:
    q, k, v = inputs.q, inputs.k, inputs.v
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q, k and v must have the same dtype, not {q.dtype}, {k.dtype} and {v.dtype}"
        )
    batch, q_length, q_heads, head_dim = q.shape
    _, k_length, k_heads, v_head_dim = v.shape
    if inputs.k_segments is not None and inputs.q_segments is None:
        raise ValueError("k_segments need q_segments")
    k_segments = inputs.q_segments if inputs.k_segments is None else inputs.k_segments
    expected: tuple[tuple[str, Array | None, tuple[int, ...]], ...] = (
        ("k", k, (batch, k_length, k_heads, head_dim)),
        ("v", v, (batch, k_length, k_heads, v_head_dim)),
        ("q_positions", inputs.q_positions, (batch, q_length)),
        ("k_positions", inputs.k_positions, (batch, k_length)),
        ("q_segments", inputs.q_segments, (batch, q_length)),
        ("k_segments", k_segments, (batch, k_length)),
        ("sinks", inputs.sinks, (q_heads,)),
    )
    for name, array, shape in expected:
        if array is not None and array.shape != shape:
            raise ValueError(
                f"{name} must be {list(shape)} for q {list(q.shape)}, not {list(array.shape)}"
            )
    if q_heads % k_heads:
        raise ValueError(f"{q_heads} query heads are not a multiple of {k_heads} key/value heads")
    selected = inputs.selected
    if selected is not None:
        shapes = [(batch, heads, q_length, k_length) for heads in (1, q_heads)]
        if selected.shape not in shapes or selected.dtype != jnp.bool_:
            raise ValueError(
                f"selected must be booleans {list(shapes[0])} or {list(shapes[1])} "
                f"for q {list(q.shape)}, not {selected.dtype} {list(selected.shape)}"
            )
