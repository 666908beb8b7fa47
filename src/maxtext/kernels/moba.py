"""Mixture of block attention (MoBA, Lu et al. 2025): each query sees the top-k chunks of keys.

    gate[s, c] = q[s] · mean(k[t] for t in chunk c),   in float32, unscaled

The query's own chunk is always selected and is one of the `topk`; later chunks never are. The
selection has no gradient.

Shapes: B batch, S sequence, H query heads, K key heads, G = H / K, D head_dim, C chunks.

Chunks are contiguous in the row. With `segments` they restart in each document, by `positions`,
and gates use only keys of the query's own document: a packed document is treated as if it were
alone in its row. That takes the product of every query with every key instead of the means, a block
of queries at a time. The last chunk of a row or document may be short; its mean is not used, since
all queries that see it are in it.
"""

import jax
import jax.numpy as jnp
from jax import Array

from maxtext.kernels.attention.masks import map_queries
from maxtext.kernels.attention.topk import topk_mask


def moba_selection(
    q: Array,
    k: Array,
    chunk: int,
    topk: int,
    positions: Array | None = None,
    segments: Array | None = None,
) -> Array:
    """[B, H, S, S], True for the keys of the selected chunks up to the query itself, as `selected`
    of attention.

    q [B, S, H, D], k [B, S, K, D] as they enter attention. segments [B, S], where 0 is padding,
    need positions [B, S] within the documents; without segments a row is one document and positions
    are ignored.
    """
    batch, length, q_heads, head_dim = q.shape
    k_heads, chunks, dtype = k.shape[2], -(-length // chunk), q.dtype
    q = (
        jax.lax.stop_gradient(q)
        .astype(jnp.float32)
        .reshape(batch, length, k_heads, q_heads // k_heads, head_dim)
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
    own_chunk, chunk_index = chunk_of[:, :, None, None, None], jnp.arange(chunks)
    gates = jnp.where(chunk_index == own_chunk, jnp.inf, gates)
    gates = jnp.where(chunk_index > own_chunk, -jnp.inf, gates)
    chosen = topk_mask(gates, min(topk, chunks)).reshape(batch, length, q_heads, chunks)
    # From chunks to their keys by a matmul with a one-hot matrix, which is faster than a gather on
    # most hardware.
    members = jax.nn.one_hot(chunk_of, chunks, dtype=dtype)
    return (jnp.einsum("bshc,btc->bhst", chosen.astype(dtype), members) > 0) & visible


def chunk_means(k: Array, chunk: int) -> Array:
    """[B, C, K, D]; a short last chunk is zero-padded."""
    batch, length, heads, head_dim = k.shape
    padded = jnp.pad(k, ((0, 0), (0, -length % chunk), (0, 0), (0, 0)))
    return padded.reshape(batch, -1, chunk, heads, head_dim).mean(axis=2)


def document_gates(q: Array, k: Array, chunk_of: Array, segments: Array, chunks: int) -> Array:
    """[B, S, K, G, C]: the sum of a query's products with the keys of a chunk of its own document.

    Sums rank chunks as means do, since all chunks before the query's own are full.
    """
    members = jax.nn.one_hot(chunk_of, chunks)  # [B, T, C]

    def block_gates(block: tuple[Array, Array]) -> Array:
        block_q, block_segments = block
        same = block_segments[:, :, None] == segments[:, None, :]
        products = jnp.einsum("bskgd,btkd->bskgt", block_q, k)
        return jnp.einsum(
            "bskgt,btc->bskgc", jnp.where(same[:, :, None, None], products, 0), members
        )

    return map_queries(block_gates, (q, segments))
