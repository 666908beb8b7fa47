"""Softmax attention: projections, norms, RoPE and the KV cache. Kernels compute the attention
itself.

Shapes: B batch, S sequence, E embedding, H query heads, K key/value heads, D head dim.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from maxtext.common.errors import ConfigError
from maxtext.kernels.attention import (
    AUTOSELECTED,
    AttentionInputs,
)
from maxtext.kernels.decode import paged_attention
from maxtext.kernels.decode.qkv import HeadNorm, QkvNorms, Rope, split_qkv
from maxtext.kernels.moba import moba_selection
from maxtext.layers.attention_sharding import attend
from maxtext.layers.cache import (
    CacheConfig,
    KVCache,
    PagedKVCache,
    SlidingWindowKVCache,
    empty_kv_cache,
    mark_nonfinite,
    ring_size,
    round_trip,
    update_cache,
)
from maxtext.layers.context import INFERENCE, BuildContext, choose
from maxtext.layers.inputs import Aux, LayerInputs, Sublayer
from maxtext.layers.linear import PackedLinear, build_linear, project
from maxtext.layers.norms import Norm
from maxtext.layers.parameters import Initializer
from maxtext.layers.rope import apply_rope, rope_cos_sin
from maxtext.layers.specs import AttentionSpec
from maxtext.layers.weight_layout import packing_unsupported_reason
from maxtext.sharding import constrain

KEY, VALUE = "key", "value"  # names of the arrays in a KV cache
PROJECTED = ("query_proj", "key_proj", "value_proj")  # names for rematerialization
QKV = tuple[jax.Array, jax.Array, jax.Array]


def empty_cache(spec: AttentionSpec, cache_config: CacheConfig) -> KVCache | None:
    """None if the layer recomputes attention to all tokens."""
    if spec.moba is not None:
        return None
    shape = (spec.kv_heads, spec.head_dim)
    return empty_kv_cache(
        spec.mask, cache_config, {KEY: shape, VALUE: shape}, uses_paged_kernel(spec, cache_config)
    )


def uses_paged_kernel(spec: AttentionSpec, cache_config: CacheConfig) -> bool:
    """Whether decode steps use the kernel for paged attention."""
    if not spec.requires_paged_kernel and spec.backend != AUTOSELECTED:
        return False
    reason = paged_kernel_unsupported_reason(spec, cache_config)
    if reason is not None and spec.requires_paged_kernel:
        raise ConfigError(f"use_ragged_attention=true is not supported here: {reason}")
    return reason is None


def paged_kernel_unsupported_reason(spec: AttentionSpec, cache_config: CacheConfig) -> str | None:
    """Why the kernel for paged attention cannot read this cache; None if it can."""
    context = cache_config.context
    if context.num_devices > 1:
        return "the kernel for paged attention runs on one device"
    mask, block_size = spec.mask, cache_config.tokens_per_block
    num_tokens = cache_config.total_blocks * block_size
    if (size := ring_size(mask, cache_config.length)) is not None:
        if (mask.window and mask.chunk) or cache_config.num_drafts:
            return "it reads all of a ring buffer, which may have more tokens than are visible"
        block_size, num_tokens = size, cache_config.slots * size
    dtype = jnp.dtype(cache_config.quantized or cache_config.dtype)
    num_bytes = num_tokens * spec.kv_heads * spec.head_dim
    if dtype.itemsize == 1 and 2**31 < num_bytes <= 2**32:
        return f"it cannot address {num_bytes} bytes of keys"
    return paged_attention.unsupported_reason(
        spec.head_dim, block_size, dtype.name, context.platform, context.capability
    )


class Attention(Sublayer):
    name = "plain"
    mode: str | None = None

    @classmethod
    def unsupported_reason(cls, spec: AttentionSpec, context: BuildContext) -> str | None:
        return None

    def __init__(
        self, initializer: Initializer, spec: AttentionSpec, embed_dim: int, dtype: DTypeLike
    ):
        self.spec = spec
        self.dtype = dtype
        self.platform = initializer.context.platform
        self.build_projections(initializer, embed_dim)
        self.out = build_linear(
            initializer,
            "out",
            in_shape=(spec.query_heads, spec.head_dim),
            out_shape=(spec.output_dim or embed_dim,),
            axes=("heads", "kv", "embed"),
            dtype=dtype,
            bias=spec.out_bias,
        )
        if spec.gated:
            self.output_gate = self.build_projection(initializer, "output_gate", embed_dim)
        if spec.qk_norm:
            query_dim, key_dim = spec.head_dim, spec.head_dim
            if spec.qk_norm_over == "heads":
                query_dim, key_dim = query_dim * spec.query_heads, key_dim * spec.kv_heads
            per_head = spec.qk_norm_over == "scaled_head"
            heads, kv_heads = (spec.query_heads, spec.kv_heads) if per_head else (None, None)
            self.query_norm = Norm(initializer, spec.qk_norm, query_dim, dtype, heads=heads)
            self.key_norm = Norm(initializer, spec.qk_norm, key_dim, dtype, heads=kv_heads)
        if spec.value_norm:
            self.value_norm = Norm(initializer, spec.value_norm, spec.head_dim, dtype)
        self.sinks = (
            initializer.normal("sinks", (spec.query_heads,), 0.02, ("q_heads",))
            if spec.sinks
            else None
        )

    def build_projections(self, initializer: Initializer, embed_dim: int) -> None:
        spec = self.spec
        if spec.fused:
            # The queries, key and value of each key/value head are adjacent, so that heads can be
            # sharded.
            self.qkv = build_linear(
                initializer,
                "qkv",
                in_shape=(embed_dim,),
                out_shape=(spec.kv_heads, spec.query_heads // spec.kv_heads + 2, spec.head_dim),
                axes=("embed", "kv_heads", "qkv", "kv_head_dim"),
                dtype=self.dtype,
                bias=spec.bias,
            )
            return
        for name in spec.projections:
            setattr(self, name, self.build_projection(initializer, name, embed_dim))

    def build_projection(self, initializer: Initializer, name: str, embed_dim: int) -> Any:
        spec = self.spec
        is_key = name in (KEY, VALUE)
        return build_linear(
            initializer,
            name,
            in_shape=(embed_dim,),
            out_shape=(spec.kv_heads if is_key else spec.query_heads, spec.head_dim),
            axes=("embed", "kv_heads", "kv_head_dim") if is_key else ("embed", "q_heads", "kv"),
            dtype=self.dtype,
            bias=spec.bias,
        )

    def __call__(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        q, k, v = self.norm_and_rotate(*self.project(x), inputs)
        context, aux = self.attend(q, k, v, inputs)
        return self.project_out(context, x), aux

    def decode(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        if not attends_in_place(inputs):
            return self(x, inputs)
        q, k, v = self.norm_and_rotate(*self.project(x), inputs)
        context, aux = self.attend_in_place(q, k, v, inputs)
        return self.project_out(context, x), aux

    def project(self, x: jax.Array) -> QKV:
        """q [B, S, H, D], k and v [B, S, K, D]."""
        spec = self.spec
        if spec.fused:
            qkv = checkpoint_name(self.qkv(x), "qkv_proj")
            q = qkv[..., :-2, :].reshape(*qkv.shape[:-3], spec.query_heads, spec.head_dim)
            return q, qkv[..., -2, :], qkv[..., -1, :]
        linears = [getattr(self, name) for name in spec.projections]
        outputs = [
            checkpoint_name(y, name)
            for y, name in zip(project(x, *linears), PROJECTED, strict=False)
        ]
        return outputs[0], outputs[1], outputs[-1]

    def norm_and_rotate(self, q: jax.Array, k: jax.Array, v: jax.Array, inputs: LayerInputs) -> QKV:
        """The projections after norms and RoPE."""
        spec = self.spec
        if spec.value_norm:
            v = self.value_norm(v)
        if spec.qk_norm and spec.qk_norm_over != "rotated":
            q, k = self.norm_qk(q, k)
        if spec.rope is not None:
            q = apply_rope(q, inputs.positions, spec.rope)
            k = apply_rope(k, inputs.positions, spec.rope)
        if spec.qk_norm and spec.qk_norm_over == "rotated":
            q, k = self.norm_qk(q, k)
        return q, k, v

    def norm_qk(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        if self.spec.qk_norm_over != "heads":
            return self.query_norm(q), self.key_norm(k)

        def norm_all_heads(norm: Norm, x: jax.Array) -> jax.Array:
            return norm(x.reshape(*x.shape[:-2], -1)).reshape(x.shape)

        return norm_all_heads(self.query_norm, q), norm_all_heads(self.key_norm, k)

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, inputs: LayerInputs
    ) -> tuple[jax.Array, Aux]:
        """The context softmax(q kᵀ) v, [B, S, H, D], over the view that the cache gives; without a
        cache, over k and v."""
        spec = self.spec
        if (prefix := inputs.shared_prefix) is not None:
            # XLA's kernel for RoPE and unfolding together takes longer than one for each.
            q, k, v = map(prefix.unfold, jax.lax.optimization_barrier((q, k, v)))
            context, aux = self.attend(q, k, v, inputs.without_shared_prefix())
            return prefix.fold(context), aux
        q, k, v = self.constrain_qkv(q, k, v, inputs)
        new = {KEY: k, VALUE: v}
        view, aux = update_cache(new, inputs)
        attention = AttentionInputs(
            q=q,
            k=view[KEY],
            v=view[VALUE],
            scale=spec.scale,
            **view.mask_inputs(spec.mask, inputs),
            selected=self.select_keys(q, k, inputs),
            soft_cap=spec.soft_cap,
            sinks=None if self.sinks is None else self.sinks[...].astype(jnp.float32),
            float32_logits=spec.float32_logits,
            float32_product=spec.float32_product,
            block_sizes=spec.blocks,
        )
        context = attend(attention, view.backend(spec.backend, q.shape[1]), self.platform)
        return self.constrain_context(mark_nonfinite(context, new, inputs)), aux

    def attend_in_place(
        self, q: jax.Array, k: jax.Array, v: jax.Array, inputs: LayerInputs
    ) -> tuple[jax.Array, Aux]:
        """The context of one token a row, by the kernel that reads and writes the cache in place:
        blocks, which have no window mask, since full-attention layers alone have them, or a ring
        buffer for each row.
        """
        spec, cache = self.spec, inputs.cache
        is_ring = isinstance(cache, SlidingWindowKVCache)
        pool = cache.arrays if is_ring else cache.blocks
        block_table, groups = inputs.block_table, inputs.prefix_groups
        ring: paged_attention.Ring | None = None
        if is_ring:
            block_table, groups = jnp.arange(q.shape[0], dtype=jnp.int32)[:, None], None
            ring = "chunk" if spec.mask.chunk else "window"
        assert block_table is not None
        q, k, v = self.constrain_qkv(q, k, v, inputs)
        new = {KEY: k, VALUE: v}
        if not paged_attention.quantizes_heads(pool):
            new, _ = round_trip(pool, new)
        context, written = paged_attention.paged_attention(
            q[:, 0],
            {name: array[:, 0] for name, array in new.items()},
            pool,
            block_table,
            inputs.positions[:, 0],
            scale=spec.scale,
            soft_cap=spec.soft_cap,
            sinks=None if self.sinks is None else self.sinks[...],
            groups=groups,
            tile_size=spec.paged_kernel_block or paged_attention.TILE_SIZE,
            ring=ring,
        )
        if is_ring:
            aux: Aux = {"cache": cache.with_token(written, inputs.positions[:, 0])}
        else:
            aux = {"cache": replace(cache, blocks=written)}
        return self.constrain_context(context[:, None]), aux

    def constrain_qkv(self, q: jax.Array, k: jax.Array, v: jax.Array, inputs: LayerInputs) -> QKV:
        """q, scaled with the position if the spec says so, k and v, sharded for attention."""
        spec = self.spec
        if spec.temperature:
            steps = jnp.floor((inputs.positions + 1) / spec.temperature.length)
            factor = 1 + spec.temperature.scale * jnp.log1p(steps)
            q = q * factor[..., None, None].astype(q.dtype)
        batch, kv = "activation_batch_attn", "activation_kv"
        keys = (batch, "activation_kv_length", "activation_kv_heads", kv)
        q = constrain(q, batch, "activation_length_attn", "activation_heads", kv)
        return q, constrain(k, *keys), constrain(v, *keys)

    def constrain_context(self, context: jax.Array) -> jax.Array:
        context = checkpoint_name(checkpoint_name(context, "context"), "attention_out")
        axes = ("activation_batch_attn", "activation_length_attn", "activation_heads")
        return constrain(context, *axes, "activation_kv")

    def project_out(self, context: jax.Array, x: jax.Array) -> jax.Array:
        """[B, S, E]: the output projection of the context, after its gate, which is computed of the
        layer's input x."""
        if self.spec.gated:
            context = context * jax.nn.sigmoid(self.output_gate(x))
        return checkpoint_name(self.out(context), "out_proj")

    def select_keys(self, q: jax.Array, k: jax.Array, inputs: LayerInputs) -> jax.Array | None:
        """MoBA's mask of the keys that a query attends to; None without MoBA."""
        moba = self.spec.moba
        if moba is None:
            return None
        return moba_selection(q, k, moba.chunk, moba.top, inputs.positions, inputs.segments)


def attends_in_place(inputs: LayerInputs) -> bool:
    is_kv_cache = isinstance(inputs.cache, PagedKVCache | SlidingWindowKVCache)
    return is_kv_cache and inputs.cache.in_place


class PackedAttention(Attention):
    """Packed QKV: one matmul for queries, keys and values."""

    name = "packed QKV"
    mode = INFERENCE

    @classmethod
    def unsupported_reason(cls, spec: AttentionSpec, context: BuildContext) -> str | None:
        if spec.fused:
            return "needs separate weights for q, k and v"
        return packing_unsupported_reason(context)

    def build_projections(self, initializer: Initializer, embed_dim: int) -> None:
        spec = self.spec
        self.packed_qkv = PackedLinear(
            initializer,
            list(spec.projections),
            in_shape=(embed_dim,),
            out_shapes=list(spec.projections.values()),
            dtype=self.dtype,
            bias=spec.bias,
        )

    def project(self, x: jax.Array) -> QKV:
        outputs = self.packed_qkv(x)
        return outputs[0], outputs[1], outputs[-1]

    def decode(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        if self.spec.split_qkv_unsupported_reason is not None or not attends_in_place(inputs):
            return super().decode(x, inputs)
        q, k, v = self.split(self.packed_qkv.matmul(x[:, 0]), inputs)
        context, aux = self.attend_in_place(q, k, v, inputs)
        return self.project_out(context, x), aux

    def split(self, qkv: jax.Array, inputs: LayerInputs) -> QKV:
        """q, k and v [B, 1, heads, D] of packed projections [B, N] of one token a row, after norms
        and RoPE."""
        spec, rope, norms = self.spec, None, QkvNorms()
        if spec.rope is not None:
            cos, sin = rope_cos_sin(inputs.positions, spec.rope, spec.head_dim)
            rope = Rope(cos[:, 0, 0], sin[:, 0, 0], spec.rope.interleave)
        if spec.qk_norm:
            norms = QkvNorms(
                head_norm(self.query_norm),
                head_norm(self.key_norm),
                after_rope=spec.qk_norm_over == "rotated",
            )
        if spec.value_norm:
            norms = replace(norms, value=head_norm(self.value_norm))
        heads = (spec.query_heads, spec.kv_heads)
        q, k, v = split_qkv(qkv, heads, rope, norms, spec.shared_kv)
        return q[:, None], k[:, None], v[:, None]


def head_norm(norm: Norm) -> HeadNorm:
    scale = None if norm.scale is None else norm.scale[...]
    return HeadNorm(norm.spec.epsilon, scale, 1.0 if norm.spec.offset else 0.0)


ATTENTIONS: tuple[type[Attention], ...] = (PackedAttention, Attention)


def build(
    spec: AttentionSpec, initializer: Initializer, embed_dim: int, dtype: DTypeLike
) -> Attention:
    choice = choose(ATTENTIONS, spec, initializer.context)
    return choice.implementation(initializer, spec, embed_dim, dtype)
