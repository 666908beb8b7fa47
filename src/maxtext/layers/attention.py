"""Attention over projected queries, keys and values: the weights and their tags; the kernels compute."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxtext.kernels.attention import BlockSizes, Visibility, attend
from maxtext.layers.inputs import LayerInputs
from maxtext.layers.linear import Linear
from maxtext.layers.norms import Norm, NormSpec
from maxtext.layers.parameters import Maker
from maxtext.layers.rope import RopeSpec, rotate
from maxtext.sharding import constrain


@dataclass(frozen=True)
class AttentionSpec:
    query_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    visibility: Visibility
    rope: RopeSpec | None = None
    bias: bool = False
    fused: bool = False  # one product for queries, keys and values
    qk_norm: NormSpec | None = None  # over each head, before RoPE
    soft_cap: float | None = None
    sinks: bool = False
    backend: str = "dot_product"
    float32_product: bool = False
    float32_logits: bool = False
    blocks: BlockSizes | None = None


class Attention(nnx.Module):
    def __init__(self, maker: Maker, spec: AttentionSpec, size: int, dtype: Any):
        self.spec = spec
        heads, groups, dim = spec.query_heads, spec.kv_heads, spec.head_dim
        if spec.fused:
            # Each key/value head's queries, key and value lie together, so that heads can be split over devices.
            shape = (groups, heads // groups + 2, dim)
            axes: tuple[str | None, ...] = ("embed", "kv_heads", "qkv", "kv_head_dim")
            self.qkv = Linear(maker.child(0), (size,), shape, axes, dtype, spec.bias)
        else:
            self.query = Linear(maker.child(0), (size,), (heads, dim), ("embed", "q_heads", "kv"), dtype, spec.bias)
            axes = ("embed", "kv_heads", "kv_head_dim")
            self.key = Linear(maker.child(1), (size,), (groups, dim), axes, dtype, spec.bias)
            self.value = Linear(maker.child(2), (size,), (groups, dim), axes, dtype, spec.bias)
        self.out = Linear(maker.child(3), (heads, dim), (size,), ("heads", "kv", "embed"), dtype, spec.bias)
        if spec.qk_norm:
            self.query_norm = Norm(maker, spec.qk_norm, dim, dtype)
            self.key_norm = Norm(maker, spec.qk_norm, dim, dtype)
        self.sinks = maker.normal(4, (heads,), 0.02, ("q_heads",)) if spec.sinks else None

    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q [B, S, H, D], k and v [B, S, K, D]."""
        if self.spec.fused:
            joined = checkpoint_name(self.qkv(x), "qkv_proj")
            query = joined[..., :-2, :].reshape(*joined.shape[:-3], self.spec.query_heads, self.spec.head_dim)
            return query, joined[..., -2, :], joined[..., -1, :]
        return (
            checkpoint_name(self.query(x), "query_proj"),
            checkpoint_name(self.key(x), "key_proj"),
            checkpoint_name(self.value(x), "value_proj"),
        )

    def __call__(self, x: jax.Array, inputs: LayerInputs) -> jax.Array:
        spec = self.spec
        q, k, v = self.project(x)
        if spec.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        if spec.rope:
            q, k = rotate(q, inputs.positions, spec.rope), rotate(k, inputs.positions, spec.rope)
        q = constrain(q, "activation_batch_attn", "activation_length_attn", "activation_heads", "activation_kv")
        k = constrain(k, "activation_batch_attn", "activation_kv_length", "activation_kv_heads", "activation_kv")
        v = constrain(v, "activation_batch_attn", "activation_kv_length", "activation_kv_heads", "activation_kv")
        mixed = attend(
            q,
            k,
            v,
            backend=spec.backend,
            visibility=spec.visibility,
            scale=spec.scale,
            # Windows may be measured in the row; chunks start anew with each document.
            q_positions=inputs.positions if spec.visibility.chunk else None,
            k_positions=inputs.positions if spec.visibility.chunk else None,
            q_segments=inputs.segments,
            k_segments=inputs.segments,
            soft_cap=spec.soft_cap,
            sinks=None if self.sinks is None else self.sinks[...].astype(jnp.float32),
            float32_logits=spec.float32_logits,
            float32_product=spec.float32_product,
            block_sizes=spec.blocks,
        )
        mixed = checkpoint_name(checkpoint_name(mixed, "context"), "attention_out")
        mixed = constrain(mixed, "activation_batch_attn", "activation_length_attn", "activation_heads", "activation_kv")
        return checkpoint_name(self.out(mixed), "out_proj")
