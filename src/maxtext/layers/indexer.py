"""DeepSeek's sparse attention (DSA): a lightning indexer selects the top-k keys of each query of
latent attention.

    score[s, t] = Σ_h w[s, h] · relu(q[s, h] · k[t]) / √(H D)

Queries come from the query latent of the attention, keys, which all heads share, and w from its
input. RoPE is applied to the first dimensions of a head. The published model also multiplies
queries and keys by a Hadamard matrix and rounds them to 8 bits: the first changes no dot product,
the second is left out, as in transformers.

Shapes: B batch, S query length, T key length (here S), E embed_dim, R rank of the query latent, H
indexer heads, D head_dim.

The inputs of the indexer and the selection have no gradient, so it learns only from its own loss,
KL(attention ‖ softmax(score)): attention weights are averaged over heads, and the loss over tokens
that are not padding. In sparse training both distributions are over the selected keys. Without it,
a loss means dense warm-up: attention sees all keys, and both are over all visible keys.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from maxtext.kernels.attention import (
    AttentionInputs,
    dense_head_mask,
    dense_mask,
    map_queries,
    mean_weights,
    ties_depend_on_length,
    torch_topk_mask,
)
from maxtext.layers.inputs import INDEXER_LOSS, Aux, LayerInputs
from maxtext.layers.linear import build_linear
from maxtext.layers.norms import Norm
from maxtext.layers.parameters import Initializer
from maxtext.layers.rope import apply_rope
from maxtext.layers.specs import IndexerSpec, NormSpec
from maxtext.sharding import constrain

KEY_NORM = NormSpec(kind="layer", epsilon=1e-6)
MASK_VALUE = -1e30  # finite, so that padding, which sees no key, has a finite gradient


class Indexer(nnx.Module):
    def __init__(
        self,
        initializer: Initializer,
        spec: IndexerSpec,
        embed_dim: int,
        query_rank: int,
        dtype: DTypeLike,
    ):
        self.spec = spec
        heads, dim = spec.heads, spec.head_dim
        self.query = build_linear(
            initializer,
            "query",
            in_shape=(query_rank,),
            out_shape=(heads, dim),
            axes=("q_lora", "q_heads", "kv"),
            dtype=dtype,
        )
        self.key = build_linear(
            initializer,
            "key",
            in_shape=(embed_dim,),
            out_shape=(dim,),
            axes=("embed", "kv"),
            dtype=dtype,
        )
        self.key_norm = Norm(initializer, KEY_NORM, dim, dtype)
        self.weight = build_linear(
            initializer,
            "weight",
            in_shape=(embed_dim,),
            out_shape=(heads,),
            axes=("embed", "q_heads"),
            dtype=jnp.float32,
            exact=True,
        )

    def __call__(
        self,
        attention: AttentionInputs,
        x: jax.Array,
        query_latent: jax.Array,
        keys: jax.Array,
        inputs: LayerInputs,
    ) -> tuple[AttentionInputs, Aux]:
        """The attention inputs with selected keys, and the loss, if any. x [B, S, E], query_latent
        [B, S, R]; keys [B, T, D] of all visible tokens, from `self.keys`."""
        spec = self.spec
        selects = spec.is_sparse and attention.k.shape[1] > spec.topk
        if not selects and spec.loss_factor == 0:
            return attention, {}
        scores = self.scores(
            jax.lax.stop_gradient(x), jax.lax.stop_gradient(query_latent), keys, inputs.positions
        )
        if selects:
            visible_scores = mask_scores(scores, dense_mask(attention), -jnp.inf)
            selected = constrain(
                torch_topk_mask(visible_scores, spec.topk, inputs.lengths)[:, None],
                "activation_batch_attn",
                None,
                "activation_length_attn",
                "activation_kv_length",
            )
            attention = replace(attention, selected=selected)
        if spec.loss_factor == 0:
            return attention, {}
        return attention, {INDEXER_LOSS: spec.loss_factor * kl_divergence(scores, attention)}

    def keys(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """[B, S, D], shared by all indexer heads."""
        key = self.key_norm(self.key(jax.lax.stop_gradient(x)))
        key = self.apply_rope(key[:, :, None], positions)[:, :, 0]
        return constrain(key, "activation_batch_attn", "activation_kv_length", None)

    def scores(
        self, x: jax.Array, query_latent: jax.Array, key: jax.Array, positions: jax.Array
    ) -> jax.Array:
        """[B, S, T] in float32, a block of queries at a time: the scores of all heads are the
        largest array here.
        """
        spec = self.spec
        query = self.apply_rope(self.query(query_latent), positions)
        weight = self.weight(x.astype(jnp.float32)) * (spec.heads * spec.head_dim) ** -0.5

        @jax.checkpoint
        def block_scores(block: tuple[jax.Array, jax.Array]) -> jax.Array:
            query, weight = block
            products = jnp.einsum("bshd,btd->bsht", query, key, preferred_element_type=jnp.float32)
            return jnp.einsum("bsh,bsht->bst", weight, jax.nn.relu(products))

        scores = map_queries(block_scores, (query, weight))
        return constrain(
            scores, "activation_batch_attn", "activation_length_attn", "activation_kv_length"
        )

    def apply_rope(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """RoPE on the first `rope_dim` dimensions of x [B, S, H, D]."""
        rope, nope = jnp.split(x, [self.spec.rope_dim], axis=-1)
        return jnp.concatenate([apply_rope(rope, positions, self.spec.rope), nope], axis=-1)


def mask_scores(scores: jax.Array, visible: jax.Array | None, value: float) -> jax.Array:
    return scores if visible is None else jnp.where(visible, scores, value)


def kl_divergence(scores: jax.Array, attention: AttentionInputs) -> jax.Array:
    """KL(attention weights ‖ softmax(scores)) over the visible keys of each query, averaged over
    tokens that are not padding.
    """
    visible = dense_head_mask(attention)
    if visible is not None and visible.ndim == 4:
        visible = visible[:, 0]  # all heads share the selection
    target = mean_weights(attention)
    predicted = jax.nn.log_softmax(mask_scores(scores, visible, MASK_VALUE), axis=-1)
    terms = jax.scipy.special.xlogy(target, target) - target * predicted
    divergence = (terms if visible is None else jnp.where(visible, terms, 0)).sum(axis=-1)
    if attention.q_segments is None:
        return divergence.mean()
    real = attention.q_segments != 0
    return jnp.where(real, divergence, 0).sum() / jnp.maximum(real.sum(), 1)


def build(
    spec: IndexerSpec, initializer: Initializer, embed_dim: int, query_rank: int, dtype: DTypeLike
) -> Indexer:
    return Indexer(initializer, spec, embed_dim, query_rank, dtype)


def depends_on_length(spec: IndexerSpec, length: int) -> bool:
    """Whether later tokens, up to `length`, may change the selection of a query. Then the results
    cannot be cached."""
    return spec.is_sparse and length > spec.topk and ties_depend_on_length()
