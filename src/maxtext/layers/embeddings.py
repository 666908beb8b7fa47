"""Token embeddings, and learned and sinusoidal position embeddings."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.layers.parameters import Initializer
from maxtext.sharding import constrain


class Embedding(nnx.Module):
    """Rows of [V, E] by token id; `one_hot` multiplies with one-hot rows instead, which shards
    better on some meshes."""

    def __init__(
        self,
        initializer: Initializer,
        vocab_size: int,
        embed_dim: int,
        dtype: Any,
        one_hot: bool = False,
    ):
        self.dtype = dtype
        self.one_hot = one_hot
        self.embedding = initializer.normal(
            "embedding", (vocab_size, embed_dim), 1 / math.sqrt(embed_dim), ("vocab", "embed_vocab")
        )

    def __call__(self, ids: jax.Array) -> jax.Array:
        table = self.embedding[...].astype(self.dtype)
        if ids.ndim == 2:
            ids = constrain(ids, "activation_embed_and_logits_batch", "activation_length")
        if self.one_hot:
            x = jax.nn.one_hot(ids, table.shape[0], dtype=self.dtype) @ table
        else:
            x = jnp.take(table, ids, axis=0)
        # In two steps: first the partial sums of a sharded vocabulary are reduced, then the
        # sequence may be sharded.
        x = constrain(
            x, "activation_embed_and_logits_batch", "activation_length", "activation_embed"
        )
        return constrain(
            x, "activation_embed_and_logits_batch", "activation_norm_length", "activation_embed"
        )


class Positions(nnx.Module):
    """[positions, E], added to the embeddings."""

    def __init__(self, initializer: Initializer, count: int, embed_dim: int, dtype: Any):
        self.dtype = dtype
        self.embedding = initializer.normal(
            "embedding", (count, embed_dim), 1 / math.sqrt(embed_dim), (None, "embed_vocab")
        )

    def __call__(self, positions: jax.Array) -> jax.Array:
        return jnp.take(self.embedding[...].astype(self.dtype), positions, axis=0)


def sinusoids(
    positions: jax.Array, embed_dim: int, dtype: Any, max_timescale: float = 10_000.0
) -> jax.Array:
    """Sinusoidal position embeddings (Attention Is All You Need): sines in the first half of the
    features, cosines in the second."""
    count = embed_dim // 2
    scale = math.log(max_timescale) / max(count - 1, 1)
    angles = positions[..., None].astype(jnp.float32) * jnp.exp(
        -scale * jnp.arange(count, dtype=jnp.float32)
    )
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1).astype(dtype)
