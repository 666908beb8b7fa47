"""Mixture of block attention (MoBA, Lu et al. 2025): each query sees the few chunks of keys that
suit it best.

Shapes: B batch, S sequence, H query heads, K key heads, G = H / K, D head size, C chunks.

The gate of a query and a chunk is the unscaled product of the query with the mean of the chunk's
keys, in float32. The query's own chunk is always chosen and counts among the `topk`; chunks after
it never are. A choice has no gradient.

Chunks are counted in the row. With `segments` they are counted by `positions`, anew in each
document, and gates look at the query's own document alone: a packed document is treated as one that
has the row to itself. That takes the product of every query with every key instead of with the
means, a block of queries at a time. The last chunk of a row or of a document may be short; its mean
is never asked for, since all queries that could see it are in it.
"""

import jax
import jax.numpy as jnp
from jax import Array

from maxtext.kernels.attention.queries import map_queries
from maxtext.kernels.attention.topk import topk_mask


def moba_selection(
    q: Array,
    k: Array,
    chunk: int,
    topk: int,
    positions: Array | None = None,
    segments: Array | None = None,
) -> Array:
    """[B, H, S, S], True for the keys of the chosen chunks up to the query itself, for `selected`
    of attention.

    q [B, S, H, D], k [B, S, K, D] as they enter attention. segments [B, S], where 0 is padding,
    need positions [B, S] within the documents; without segments a row is one document and positions
    are not read.
    """
    batch, length, q_heads, size = q.shape
    k_heads, chunks, dtype = k.shape[2], -(-length // chunk), q.dtype
    q = (
        jax.lax.stop_gradient(q)
        .astype(jnp.float32)
        .reshape(batch, length, k_heads, q_heads // k_heads, size)
    )
    k = jax.lax.stop_gradient(k).astype(jnp.float32)
    index = jnp.arange(length)
    visible = index[None, :] <= index[:, None]
    if segments is None:
        chunk_of = jnp.broadcast_to(index // chunk, (batch, length))
        gates = jnp.einsum("bskgd,bckd->bskgc", q, chunk_means(k, chunk))
    else:
        if positions is None:
            raise ValueError("segments need positions, from which chunks are counted")
        chunk_of = positions // chunk
        gates = document_gates(q, k, chunk_of, segments, chunks)
        same = (segments[:, :, None] == segments[:, None, :]) & (segments[:, :, None] != 0)
        visible = (visible & same)[:, None]
    own, place = chunk_of[:, :, None, None, None], jnp.arange(chunks)
    gates = jnp.where(place > own, -jnp.inf, jnp.where(place == own, jnp.inf, gates))
    chosen = topk_mask(gates, min(topk, chunks)).reshape(batch, length, q_heads, chunks)
    # From chunks to their keys by a product with ones and zeros, which is faster than a gather on
    # most hardware.
    members = jax.nn.one_hot(chunk_of, chunks, dtype=dtype)
    return (jnp.einsum("bshc,btc->bhst", chosen.astype(dtype), members) > 0) & visible


def chunk_means(k: Array, chunk: int) -> Array:
    """[B, C, K, D]; a short last chunk is filled up with zeros."""
    batch, length, heads, size = k.shape
    padded = jnp.pad(k, ((0, 0), (0, -length % chunk), (0, 0), (0, 0)))
    return padded.reshape(batch, -1, chunk, heads, size).mean(axis=2)


def document_gates(q: Array, k: Array, chunk_of: Array, segments: Array, chunks: int) -> Array:
    """[B, S, K, G, C], the sum of a query's products with the keys of a chunk of its own document.

    Sums order the chunks as means do, since those before the query's own are all full.
    """
    members = jax.nn.one_hot(chunk_of, chunks)  # [B, T, C]

    def some(part: tuple[Array, Array]) -> Array:
        some_q, some_segments = part
        same = some_segments[:, :, None] == segments[:, None, :]
        products = jnp.einsum("bskgd,btkd->bskgt", some_q, k)
        return jnp.einsum(
            "bskgt,btc->bskgc", jnp.where(same[:, :, None, None], products, 0), members
        )

    return map_queries(some, (q, segments))
