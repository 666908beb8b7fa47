"""Token embeddings, and learned and sinusoidal position embeddings."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from maxtext.layers.adapters import AdapterInputs, LayerAdapter, adapter_inputs
from maxtext.layers.lora import LowRank, SavedCopies, adapter_param, select_slots
from maxtext.layers.parameters import Initializer
from maxtext.sharding import constrain


class Embedding(nnx.Module):
    """Rows of [V, E] by token id; `one_hot` multiplies with one-hot rows instead, which shards
    better on some meshes. `cast_to` is as in `Initializer.weight`; a tied head reads the table,
    too."""

    def __init__(
        self,
        initializer: Initializer,
        vocab_size: int,
        embed_dim: int,
        dtype: DTypeLike,
        one_hot: bool = False,
        cast_to: DTypeLike | None = None,
    ):
        self.dtype = dtype
        self.one_hot = one_hot
        self.embedding = initializer.normal(
            "embedding",
            (vocab_size, embed_dim),
            1 / math.sqrt(embed_dim),
            ("vocab", "embed_vocab"),
            cast_to=cast_to,
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


class AdaptedEmbedding(LowRank, Embedding):
    """An embedding with a low-rank adapter, scale · A[ids] B with A [V, R] and B [R, E], or with
    the copies of adapters that save it in full. As in PEFT, A starts at zero and B does not."""

    def __init__(
        self,
        initializer: Initializer,
        vocab_size: int,
        embed_dim: int,
        dtype: DTypeLike,
        one_hot: bool = False,
        cast_to: DTypeLike | None = None,
        adapter: LayerAdapter | None = None,
        copies: SavedCopies | None = None,
    ):
        super().__init__(initializer, vocab_size, embed_dim, dtype, one_hot, cast_to)
        self.copies = copies
        self.has_adapter = adapter is not None
        if adapter is None:
            return
        self.init_adapter(
            initializer,
            adapter,
            in_shape=(vocab_size,),
            out_shape=(embed_dim,),
            axes=("vocab", "embed_vocab"),
            dtype=adapter.spec.dtype,
        )
        if not adapter.slots:
            b = initializer.standard_normal("lora_b", (adapter.rank, embed_dim))
            a = jnp.zeros((vocab_size, adapter.rank), adapter.spec.dtype)
            self.lora_a = adapter_param(a, ("vocab", None))
            self.lora_b = adapter_param(b.astype(adapter.spec.dtype), (None, "embed_vocab"))

    def __call__(self, ids: jax.Array) -> jax.Array:
        x, inputs = super().__call__(ids), adapter_inputs()
        if self.copies is not None:
            x = self.copies.select(
                x, inputs.ids, lambda table: jnp.take(table.astype(x.dtype), ids, axis=0)
            )
        return x if not self.has_adapter else self.add_embedding_update(x, ids, inputs)

    def add_embedding_update(
        self, x: jax.Array, ids: jax.Array, inputs: AdapterInputs
    ) -> jax.Array:
        a, b = self.lora_a[...], self.lora_b[...]
        if not self.adapter.slots:
            update = jnp.take(a, ids, axis=0) @ b * self.adapter_scale(inputs)
        elif inputs.ids is None:
            return x
        else:
            hidden = jnp.take(a, ids, axis=0)  # [B, S, n R]
            slots, rank = self.adapter.slots, self.adapter.rank
            update = select_slots(hidden, inputs.ids, slots, [rank]) @ b
        return (x.astype(a.dtype) + update).astype(x.dtype)


def build_embedding(
    initializer: Initializer,
    vocab_size: int,
    embed_dim: int,
    dtype: DTypeLike,
    one_hot: bool,
    cast_to: DTypeLike | None = None,
) -> Embedding:
    """The embedding at the path of the initializer, with its adapters."""
    spec = initializer.context.adapters
    adapter = None if spec is None else spec.at(initializer.paths)
    copies = SavedCopies.of(spec, initializer.paths[0], (vocab_size, embed_dim), initializer.dtype)
    if adapter is None and copies is None:
        return Embedding(initializer, vocab_size, embed_dim, dtype, one_hot, cast_to)
    return AdaptedEmbedding(
        initializer,
        vocab_size,
        embed_dim,
        dtype,
        one_hot=one_hot,
        cast_to=cast_to,
        adapter=adapter,
        copies=copies,
    )


class Positions(nnx.Module):
    """[positions, E], added to the embeddings."""

    def __init__(self, initializer: Initializer, count: int, embed_dim: int, dtype: DTypeLike):
        self.dtype = dtype
        self.embedding = initializer.normal(
            "embedding", (count, embed_dim), 1 / math.sqrt(embed_dim), (None, "embed_vocab")
        )

    def __call__(self, positions: jax.Array) -> jax.Array:
        return jnp.take(self.embedding[...].astype(self.dtype), positions, axis=0)


def sinusoids(
    positions: jax.Array, embed_dim: int, dtype: DTypeLike, max_timescale: float = 10_000.0
) -> jax.Array:
    """Sinusoidal position embeddings (Attention Is All You Need): sines in the first half of the
    features, cosines in the second."""
    count = embed_dim // 2
    scale = math.log(max_timescale) / max(count - 1, 1)
    angles = positions[..., None].astype(jnp.float32) * jnp.exp(
        -scale * jnp.arange(count, dtype=jnp.float32)
    )
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1).astype(dtype)
