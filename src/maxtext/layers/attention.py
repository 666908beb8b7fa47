"""Attention over projected queries, keys and values: the weights and their tags; the kernels
compute.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxtext.common.errors import ConfigError
from maxtext.kernels.attention import (
    AUTOSELECTED,
    AttentionInputs,
    AttentionMask,
    AttentionRequest,
    BlockSizes,
)
from maxtext.kernels.decode import paged_attention
from maxtext.kernels.moba import moba_selection
from maxtext.layers.attend import attend, attend_pages, cannot_attend_pages, packed_request
from maxtext.layers.cache import (
    PAGES,
    CacheSize,
    backend_of,
    extended,
    kept,
    marked,
    sight,
    through_store,
)
from maxtext.layers.inputs import Aux, Cache, LayerInputs
from maxtext.layers.joined import Joined
from maxtext.layers.linear import Linear, together
from maxtext.layers.norms import Norm, NormSpec
from maxtext.layers.parameters import Initializer
from maxtext.layers.rope import RopeSpec, rotate, turns
from maxtext.sharding import constrain

KEY, VALUE = "key", "value"  # in a cache
PROJECTED = ("query_proj", "key_proj", "value_proj")  # for rematerialisation


@dataclass(frozen=True)
class Temperature:
    """Queries grow with the logarithm of the position: times 1 + scale ln(floor((position + 1) /
    length) + 1).
    """

    scale: float = 0.1
    length: int = 8192


@dataclass(frozen=True)
class Moba:
    """Each query sees the `top` chunks of keys that suit it best, its own among them."""

    chunk: int
    top: int


@dataclass(frozen=True)
class AttentionSpec:
    query_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    mask: AttentionMask
    rope: RopeSpec | None = None
    bias: bool = False  # of queries, keys and values
    out_bias: bool = False
    fused: bool = False  # one product for queries, keys and values
    shared_kv: bool = False  # values are the projected keys, before norm and rotation
    gated: bool = (
        False  # the output of a head times the sigmoid of a gate that is projected like its query
    )
    qk_norm: NormSpec | None = None
    qk_norm_over: str = (
        "head"  # head: each before RoPE; heads: all of a token jointly; rotated: each after RoPE
    )
    value_norm: NormSpec | None = None
    temperature: Temperature | None = None
    moba: Moba | None = None
    soft_cap: float | None = None
    sinks: bool = False
    output_dim: int | None = None  # None: as wide as the input
    backend: str = "dot_product"
    float32_product: bool = False
    float32_logits: bool = False
    blocks: BlockSizes | None = None
    # tokens that the kernel for one token a row over pages, which is then a must, reads at a time
    ragged: int = 0

    def build(self, initializer: Initializer, embed_dim: int, dtype: Any) -> nnx.Module:
        return Attention(initializer, self, embed_dim, dtype)

    def cache(self, size: CacheSize) -> Cache | None:
        """Empty; None: it looks at all tokens anew."""
        if self.moba is not None:
            return None
        each = (self.kv_heads, self.head_dim)
        return kept(self.mask, size, **{KEY: each, VALUE: each})

    def request(self, length: int, dtype: str, platform: str) -> AttentionRequest:
        """What attention over packed rows of so many tokens asks for."""
        sizes = (self.query_heads, self.kv_heads, self.head_dim, self.head_dim)
        found = packed_request(platform, dtype, length, sizes, self.mask)
        return replace(
            found, soft_cap=self.soft_cap, has_sinks=self.sinks, has_selection=self.moba is not None
        )


class Attention(nnx.Module):
    def __init__(self, initializer: Initializer, spec: AttentionSpec, embed_dim: int, dtype: Any):
        self.spec = spec
        heads, groups, dim = spec.query_heads, spec.kv_heads, spec.head_dim
        if spec.fused:
            # Each key/value head's queries, key and value lie together, so that heads can be split
            # over devices.
            shape = (groups, heads // groups + 2, dim)
            axes: tuple[str | None, ...] = ("embed", "kv_heads", "qkv", "kv_head_dim")
            self.qkv = Linear(
                initializer.child("qkv"),
                in_shape=(embed_dim,),
                out_shape=shape,
                axes=axes,
                dtype=dtype,
                bias=spec.bias,
            )
        else:
            axes = ("embed", "q_heads", "kv")
            self.query = Linear(
                initializer.child("query"),
                in_shape=(embed_dim,),
                out_shape=(heads, dim),
                axes=axes,
                dtype=dtype,
                bias=spec.bias,
            )
            if spec.gated:
                self.output_gate = Linear(
                    initializer.child("output_gate"),
                    in_shape=(embed_dim,),
                    out_shape=(heads, dim),
                    axes=axes,
                    dtype=dtype,
                    bias=spec.bias,
                )
            axes = ("embed", "kv_heads", "kv_head_dim")
            self.key = Linear(
                initializer.child("key"),
                in_shape=(embed_dim,),
                out_shape=(groups, dim),
                axes=axes,
                dtype=dtype,
                bias=spec.bias,
            )
            if not spec.shared_kv:
                self.value = Linear(
                    initializer.child("value"),
                    in_shape=(embed_dim,),
                    out_shape=(groups, dim),
                    axes=axes,
                    dtype=dtype,
                    bias=spec.bias,
                )
        out_dim = spec.output_dim or embed_dim
        self.out = Linear(
            initializer.child("out"),
            in_shape=(heads, dim),
            out_shape=(out_dim,),
            axes=("heads", "kv", "embed"),
            dtype=dtype,
            bias=spec.out_bias,
        )
        if spec.qk_norm:
            jointly = spec.qk_norm_over == "heads"
            self.query_norm = Norm(
                initializer, spec.qk_norm, heads * dim if jointly else dim, dtype
            )
            self.key_norm = Norm(initializer, spec.qk_norm, groups * dim if jointly else dim, dtype)
        if spec.value_norm:
            self.value_norm = Norm(initializer, spec.value_norm, dim, dtype)
        self.sinks = (
            initializer.normal("sinks", (heads,), 0.02, ("q_heads",)) if spec.sinks else None
        )

    @property
    def bare(self) -> bool:
        """Whether queries, keys and values are what one product gives, the first two turned as a
        whole.
        """
        spec = self.spec
        if (
            spec.rope is None
            or spec.rope.interleave
            or spec.rope.rotated(spec.head_dim) != spec.head_dim
        ):
            return False
        more = (spec.fused, spec.bias, spec.shared_kv, spec.qk_norm, spec.value_norm, spec.moba)
        return not any(more) and isinstance(self.query.kernel[...], Joined)

    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q [B, S, H, D], k and v [B, S, K, D]."""
        if self.spec.fused:
            joined = checkpoint_name(self.qkv(x), "qkv_proj")
            query = joined[..., :-2, :].reshape(
                *joined.shape[:-3], self.spec.query_heads, self.spec.head_dim
            )
            return query, joined[..., -2, :], joined[..., -1, :]
        linears = [self.query, self.key] + ([] if self.spec.shared_kv else [self.value])
        found = [
            checkpoint_name(each, name)
            for each, name in zip(together(x, *linears), PROJECTED, strict=False)
        ]
        return found[0], found[1], found[-1]

    def normed(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        if self.spec.qk_norm_over != "heads":
            return self.query_norm(q), self.key_norm(k)
        jointly = [
            norm(x.reshape(*x.shape[:-2], -1)).reshape(x.shape)
            for norm, x in ((self.query_norm, q), (self.key_norm, k))
        ]
        return jointly[0], jointly[1]

    def turned(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        return x if self.spec.rope is None else rotate(x, positions, self.spec.rope)

    def select(self, q: jax.Array, k: jax.Array, inputs: LayerInputs) -> jax.Array | None:
        """Which keys a query may see besides what the mask allows."""
        if self.spec.moba is None:
            return None
        return moba_selection(
            q, k, self.spec.moba.chunk, self.spec.moba.top, inputs.positions, inputs.segments
        )

    def parts(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q [B, S, H, D], k and v [B, S, K, D], where they belong."""
        spec = self.spec
        if self.bare and self.one_by_one(inputs):
            assert spec.rope is not None
            cos, sin = (each[:, 0, 0] for each in turns(inputs.positions, spec.rope, spec.head_dim))
            kernels: Any = self.query.kernel[...]
            product = kernels.product(x[:, 0], self.query.dtype)
            q, k, v = paged_attention.split_qkv_rope(
                product, cos, sin, (spec.query_heads, spec.kv_heads)
            )
            return q[:, None], k[:, None], v[:, None]
        return self.placed(*self.project(x), inputs)

    def placed(
        self, q: jax.Array, k: jax.Array, v: jax.Array, inputs: LayerInputs
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What was projected, normed and turned."""
        spec = self.spec
        if spec.value_norm:
            v = self.value_norm(v)
        if spec.qk_norm and spec.qk_norm_over != "rotated":
            q, k = self.normed(q, k)
        q, k = self.turned(q, inputs.positions), self.turned(k, inputs.positions)
        if spec.qk_norm and spec.qk_norm_over == "rotated":
            q, k = self.normed(q, k)
        return q, k, v

    def __call__(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        mixed, aux = self.mixed(*self.parts(x, inputs), inputs)
        if self.spec.gated:
            mixed = mixed * jax.nn.sigmoid(self.output_gate(x))
        return self.read(mixed), aux

    def read(self, mixed: jax.Array) -> jax.Array:
        """[B, S, E] of what was mixed."""
        return checkpoint_name(self.out(mixed), "out_proj")

    def mixed(
        self, q: jax.Array, k: jax.Array, v: jax.Array, inputs: LayerInputs
    ) -> tuple[jax.Array, Aux]:
        """[B, S, H, D], of what `parts` gives."""
        spec = self.spec
        if spec.temperature:
            steps = jnp.floor((inputs.positions + 1) / spec.temperature.length)
            q = q * (1 + spec.temperature.scale * jnp.log1p(steps))[..., None, None].astype(q.dtype)
        q = constrain(
            q,
            "activation_batch_attn",
            "activation_length_attn",
            "activation_heads",
            "activation_kv",
        )
        k = constrain(
            k,
            "activation_batch_attn",
            "activation_kv_length",
            "activation_kv_heads",
            "activation_kv",
        )
        v = constrain(
            v,
            "activation_batch_attn",
            "activation_kv_length",
            "activation_kv_heads",
            "activation_kv",
        )
        new = {KEY: k, VALUE: v}
        mixed, aux = (
            self.over_pages(q, new, inputs)
            if self.one_by_one(inputs)
            else self.attended(q, new, inputs)
        )
        mixed = checkpoint_name(checkpoint_name(mixed, "context"), "attention_out")
        mixed = constrain(
            mixed,
            "activation_batch_attn",
            "activation_length_attn",
            "activation_heads",
            "activation_kv",
        )
        return mixed, aux

    def one_by_one(self, inputs: LayerInputs) -> bool:
        """Whether the kernel for one token a row, over pages, does it."""
        spec = self.spec
        if inputs.cache is None or PAGES not in inputs.cache or inputs.positions.shape[1] > 1:
            return False
        if not spec.ragged and spec.backend != AUTOSELECTED:
            return False
        reason = cannot_attend_pages(spec.head_dim, inputs.cache[PAGES])
        if reason is not None and spec.ragged:
            raise ConfigError(f"use_ragged_attention=true cannot do this: {reason}; leave it out")
        return reason is None

    def over_pages(
        self, q: jax.Array, new: dict[str, jax.Array], inputs: LayerInputs
    ) -> tuple[jax.Array, Aux]:
        """One token a row over its pages, and the cache with it. What is in pages has no window:
        all is seen.
        """
        assert inputs.cache is not None
        spec, pool = self.spec, inputs.cache[PAGES]
        sinks = None if self.sinks is None else self.sinks[...]
        options = {
            "scale": spec.scale,
            "soft_cap": spec.soft_cap,
            "sinks": sinks,
            "block": spec.ragged or paged_attention.BLOCK,
        }
        mixed, after = attend_pages(q, through_store(pool, new)[0], pool, inputs, options)
        return mixed, {"cache": {PAGES: after}}

    def attended(
        self, q: jax.Array, new: dict[str, jax.Array], inputs: LayerInputs
    ) -> tuple[jax.Array, Aux]:
        spec, seen = self.spec, new
        aux: Aux = {}
        if inputs.cache is not None:
            seen, aux["cache"] = extended(inputs, seen)
        attention = AttentionInputs(
            q=q,
            k=seen[KEY],
            v=seen[VALUE],
            scale=spec.scale,
            **sight(spec.mask, inputs, seen),
            selected=self.select(q, new[KEY], inputs),
            soft_cap=spec.soft_cap,
            sinks=None if self.sinks is None else self.sinks[...].astype(jnp.float32),
            float32_logits=spec.float32_logits,
            float32_product=spec.float32_product,
            block_sizes=spec.blocks,
        )
        return marked(attend(attention, backend_of(spec.backend, inputs)), inputs, new), aux
