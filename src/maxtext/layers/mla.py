"""Multi-head latent attention (MLA, DeepSeek V2 and V3): keys and values of all heads come from one
low-rank latent of a token.

    queries    x -> query_a [Rq] -> norm -> query_b [H, N + P]      (query_rank 0: x -> [H, N + P])
    latent     x -> kv_a [R + P];   the first R are normed, the last P are a key that heads share
    keys       [H, N] from the normed latent by kv_b, concatenated with the shared [P]
    values     [H, V] from the normed latent by kv_b

RoPE is applied to the last P dimensions of queries and keys only.

Shapes: B batch, S sequence, T key length (here S), E embed_dim, H heads, Rq and R ranks of the
query and key/value latents, N head dim without RoPE (nope), P with RoPE, V head dim of values.

With `latent` (weight absorption) keys and values are not computed: the key part of kv_b is applied
to the queries and its value part to the context, and attention runs over the latent, as one head of
keys [R + P] and values [R]. A cache then holds latents, which are much smaller; for many queries it
costs more, since R is larger than N and V.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from maxtext.common.errors import ConfigError
from maxtext.kernels.attention import (
    AUTOSELECTED,
    AttentionInputs,
    max_logits,
)
from maxtext.kernels.decode import latent_attention
from maxtext.layers.attention_sharding import attend
from maxtext.layers.cache import (
    CacheConfig,
    KVCache,
    PagedKVCache,
    empty_kv_cache,
    ring_size,
    update_cache,
)
from maxtext.layers.indexer import depends_on_length
from maxtext.layers.inputs import MAX_LOGITS, Aux, LayerInputs, Sublayer
from maxtext.layers.linear import build_linear
from maxtext.layers.norms import Norm
from maxtext.layers.parameters import Initializer
from maxtext.layers.rope import apply_rope
from maxtext.layers.specs import MlaSpec
from maxtext.sharding import constrain

# The arrays of a cache.
LATENT, KEY_ROPE, KEY, VALUE = "latent", "key_rope", "key", "value"
INDEX_KEY = "index_key"


class Mla(Sublayer):
    def __init__(self, initializer: Initializer, spec: MlaSpec, embed_dim: int, dtype: DTypeLike):
        self.platform = initializer.context.platform
        self.spec = spec
        self.dtype = dtype
        heads, rank = spec.heads, spec.kv_rank
        shape = (heads, spec.nope_dim + spec.rope_dim)
        if spec.query_rank:
            axes: tuple[str, ...] = ("embed", "q_lora_up_proj")
            self.query_a = build_linear(
                initializer,
                "query_a",
                in_shape=(embed_dim,),
                out_shape=(spec.query_rank,),
                axes=axes,
                dtype=dtype,
                bias=spec.bias,
            )
            self.query_norm = Norm(initializer, spec.norm, spec.query_rank, dtype)
            self.query_b = build_linear(
                initializer,
                "query_b",
                in_shape=(spec.query_rank,),
                out_shape=shape,
                axes=("q_lora", "q_heads", "kv"),
                dtype=dtype,
            )
        else:
            self.query = build_linear(
                initializer,
                "query",
                in_shape=(embed_dim,),
                out_shape=shape,
                axes=("embed", "q_heads", "kv"),
                dtype=dtype,
            )
        axes = ("embed", "kv_lora_up_proj")
        self.kv_a = build_linear(
            initializer,
            "kv_a",
            in_shape=(embed_dim,),
            out_shape=(rank + spec.rope_dim,),
            axes=axes,
            dtype=dtype,
            bias=spec.bias,
        )
        self.kv_norm = Norm(initializer, spec.norm, rank, dtype)
        axes = ("kv_lora", "kv_heads", "kv_head_dim")
        self.kv_b = build_linear(
            initializer,
            "kv_b",
            in_shape=(rank,),
            out_shape=(heads, spec.nope_dim + spec.value_dim),
            axes=axes,
            dtype=dtype,
        )
        adapter = self.kv_b.spec.adapter
        if spec.latent and adapter is not None and adapter.slots:
            raise ConfigError(
                "mla_naive_kvcache=false multiplies queries by kv_b, which has an adapter for each "
                "sequence: set mla_naive_kvcache=true, or merge the adapter"
            )
        axes = ("heads", "kv", "embed")
        self.out = build_linear(
            initializer,
            "out",
            in_shape=(heads, spec.value_dim),
            out_shape=(embed_dim,),
            axes=axes,
            dtype=dtype,
            bias=spec.bias,
        )
        self.indexer = (
            spec.indexer.build(initializer.child("indexer"), embed_dim, spec.query_rank, dtype)
            if spec.indexer
            else None
        )

    def __call__(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        spec = self.spec
        query, query_latent = self.queries(x, inputs.positions)
        latent, key_rope = self.compress(x, inputs.positions)
        q = self.latent_queries(query) if spec.latent else self.constrain_queries(query)
        caches_latents = spec.latent or has_latents(inputs.cache)
        if caches_latents:
            new = {LATENT: latent, KEY_ROPE: key_rope}
        else:
            new = self.keys_and_values(latent, key_rope)
        if self.indexer is not None:
            new[INDEX_KEY] = self.indexer.keys(x, inputs.positions)
        view, aux = update_cache(new, inputs)
        if spec.latent:
            k, v = self.latent_keys_and_values(view[LATENT], view[KEY_ROPE])
        else:
            expanded = view.arrays
            if caches_latents:
                expanded = self.keys_and_values(view[LATENT], view[KEY_ROPE])
            k, v = expanded[KEY], expanded[VALUE]
        attention = AttentionInputs(
            q=q,
            k=k,
            v=v,
            scale=spec.scale,
            **view.mask_inputs(spec.mask, inputs),
            soft_cap=spec.soft_cap,
            float32_logits=spec.float32_logits,
            float32_product=spec.float32_product,
            block_sizes=spec.blocks,
        )
        if self.indexer is not None and query_latent is not None:
            attention, report = self.indexer(attention, x, query_latent, view[INDEX_KEY], inputs)
            aux |= report
        if spec.report_max_logits:
            aux = aux | {MAX_LOGITS: max_logits(attention)}
        context = attend(attention, view.backend(spec.backend, q.shape[1]), self.platform)
        if spec.latent:
            context = self.expand_context(context)
        return self.project_out(context), aux

    def decode(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        """By the kernel that attends to latents in their blocks, if it supports the cache."""
        cache = inputs.cache
        if not (has_latents(cache) and cache.in_place):
            return self(x, inputs)
        assert inputs.block_table is not None
        query, _ = self.queries(x, inputs.positions)
        latent, key_rope = self.compress(x, inputs.positions)
        q, q_rope = jnp.split(self.latent_queries(query)[:, 0], [self.spec.kv_rank], axis=-1)
        ropes = cache.blocks[KEY_ROPE]
        context, (latents, written_ropes) = latent_attention.latent_attention(
            q,
            q_rope,
            (latent[:, 0], key_rope[:, 0, 0]),
            (cache.blocks[LATENT], ropes[:, :, 0]),
            inputs.block_table,
            inputs.positions[:, 0],
            scale=self.spec.scale,
            soft_cap=self.spec.soft_cap,
        )
        blocks = {LATENT: latents, KEY_ROPE: written_ropes.reshape(ropes.shape)}
        attn_out = self.project_out(self.expand_context(context[:, None]))
        return attn_out, {"cache": replace(cache, blocks=blocks)}

    def expand_context(self, context: jax.Array) -> jax.Array:
        """[B, S, H, V] of sums of latents [B, S, H, R]."""
        return jnp.einsum("bshr,rhv->bshv", context, self.up_projections()[1])

    def project_out(self, context: jax.Array) -> jax.Array:
        context = checkpoint_name(checkpoint_name(context, "context"), "attention_out")
        context = constrain(
            context,
            "activation_batch_attn",
            "activation_length_attn",
            "activation_heads",
            "activation_kv",
        )
        return checkpoint_name(self.out(context), "out_proj")

    def queries(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """[B, S, H, N + P] with RoPE, and the normed query latent [B, S, Rq], if there is one."""
        latent = None
        if self.spec.query_rank:
            latent = self.query_norm(checkpoint_name(self.query_a(x), "query_wa_proj"))
            query = self.query_b(latent)
        else:
            query = self.query(x)
        query = checkpoint_name(query, "mla_q")
        nope, rope = jnp.split(query, [self.spec.nope_dim], axis=-1)
        return jnp.concatenate([nope, apply_rope(rope, positions, self.spec.rope)], axis=-1), latent

    def compress(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The normed latent [B, S, R] and the key part with RoPE [B, S, 1, P] that heads share."""
        latent_and_rope = checkpoint_name(self.kv_a(x), "kv_wa_proj")
        latent, rope = jnp.split(latent_and_rope, [self.spec.kv_rank], axis=-1)
        latent = constrain(
            self.kv_norm(latent), "activation_batch_attn", "activation_kv_length", None
        )
        return latent, apply_rope(rope[:, :, None], positions, self.spec.rope)

    def keys_and_values(self, latent: jax.Array, key_rope: jax.Array) -> dict[str, jax.Array]:
        """Keys [B, S, H, N + P] and values [B, S, H, V]."""
        nope_and_value = checkpoint_name(self.kv_b(latent), "mla_kv")
        nope, value = jnp.split(nope_and_value, [self.spec.nope_dim], axis=-1)
        shared = jnp.broadcast_to(key_rope, (*nope.shape[:-1], key_rope.shape[-1]))
        key = jnp.concatenate([nope, shared], axis=-1)
        axes = (
            "activation_batch_attn",
            "activation_kv_length",
            "activation_kv_heads",
            "activation_kv",
        )
        return {
            KEY: checkpoint_name(constrain(key, *axes), "key_proj"),
            VALUE: checkpoint_name(constrain(value, *axes), "value_proj"),
        }

    def latent_queries(self, query: jax.Array) -> jax.Array:
        """Queries [B, S, H, R + P] over latents: the key part of kv_b is absorbed."""
        nope, rope = jnp.split(query, [self.spec.nope_dim], axis=-1)
        query = jnp.concatenate(
            [jnp.einsum("bshn,rhn->bshr", nope, self.up_projections()[0]), rope], axis=-1
        )
        return self.constrain_queries(query)

    def latent_keys_and_values(
        self, latent: jax.Array, key_rope: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """k [B, T, 1, R + P], v [B, T, 1, R]: the latent is one key/value head for all queries."""
        value = latent[:, :, None]
        key = checkpoint_name(jnp.concatenate([value, key_rope], axis=-1), "key_proj")
        return key, checkpoint_name(value, "value_proj")

    def up_projections(self) -> tuple[jax.Array, jax.Array]:
        """The key part [R, H, N] and the value part [R, H, V] of kv_b."""
        weight = self.kv_b.merged_weight().astype(self.dtype)
        key, value = jnp.split(weight, [self.spec.nope_dim], axis=-1)
        return key, value

    def constrain_queries(self, query: jax.Array) -> jax.Array:
        names = (
            "activation_batch_attn",
            "activation_length_attn",
            "activation_heads",
            "activation_kv",
        )
        return checkpoint_name(constrain(query, *names), "query_proj")


def build(spec: MlaSpec, initializer: Initializer, embed_dim: int, dtype: DTypeLike) -> Mla:
    return Mla(initializer, spec, embed_dim, dtype)


def empty_cache(spec: MlaSpec, cache_config: CacheConfig) -> KVCache | None:
    """An empty cache of latents, or of the keys and values of all heads; None if results cannot be
    cached."""
    if spec.indexer and depends_on_length(spec.indexer, cache_config.length):
        return None
    in_place = uses_latent_kernel(spec, cache_config)
    if spec.latent or in_place:
        sizes: dict[str, tuple[int, ...]] = {
            LATENT: (spec.kv_rank,),
            KEY_ROPE: (1, spec.rope_dim),
        }
    else:
        sizes = {
            KEY: (spec.heads, spec.nope_dim + spec.rope_dim),
            VALUE: (spec.heads, spec.value_dim),
        }
    if spec.indexer:
        sizes[INDEX_KEY] = (spec.indexer.head_dim,)
    return empty_kv_cache(spec.mask, cache_config, sizes, in_place)


def uses_latent_kernel(spec: MlaSpec, cache_config: CacheConfig) -> bool:
    """Whether decode steps use the kernel for latent attention; then the cache has latents, which
    prefill expands to the keys and values of all heads."""
    context, dtype = cache_config.context, cache_config.quantized or cache_config.dtype
    has_adapters = context.adapters is not None and context.adapters.slots > 0
    if spec.indexer or has_adapters or context.num_devices > 1 or spec.backend != AUTOSELECTED:
        return False
    if ring_size(spec.mask, cache_config.length) is not None:
        return False
    block_size = cache_config.tokens_per_block
    platform, capability = context.platform, context.capability
    reason = latent_attention.unsupported_reason(
        spec.kv_rank, spec.rope_dim, block_size, dtype, platform, capability
    )
    return reason is None


def has_latents(cache: object) -> bool:
    """Whether a cache has latents, and not the keys and values of all heads."""
    return isinstance(cache, PagedKVCache) and LATENT in cache.blocks
