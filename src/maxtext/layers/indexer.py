"""DeepSeek's sparse attention: a small scorer picks the keys that each query of latent attention
may see.

Shapes: B batch, S query length, T key length (here S), E embedding, R rank of the query latent, H
scoring heads, D size of each. The score of a key is the sum over heads of w · relu(q · k) / sqrt(H
D), with one key that all share; queries come from the query latent of the attention, keys and w
from its input. RoPE turns the first dimensions of a head. The published model also turns queries
and keys by a Hadamard matrix and rounds them to 8 bits: the first changes no product, the second is
left out, as in transformers.

The indexer reads its inputs without a gradient and a choice of keys has none, so it learns from its
own loss alone: how far its softmax is from the weights of the attention, averaged over heads,
KL(attention ‖ softmax(score)), the mean over tokens that are not padding. In sparse training both
are over the chosen keys. Without it a loss means dense warm-up: attention sees all keys, and both
are over all visible ones.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.kernels.attention import (
    AttentionInputs,
    dense_head_mask,
    dense_mask,
    map_queries,
    mean_weights,
    ties_depend_on_length,
    torch_topk_mask,
)
from maxtext.layers import aux_names
from maxtext.layers.inputs import Aux, LayerInputs
from maxtext.layers.linear import build_linear
from maxtext.layers.norms import Norm, NormSpec
from maxtext.layers.parameters import Initializer
from maxtext.layers.rope import RopeSpec, apply_rope
from maxtext.sharding import constrain

KEY_NORM = NormSpec(kind="layer", epsilon=1e-6)
HIDDEN = -1e30  # finite, so that padding, which sees nothing, has a finite gradient


@dataclass(frozen=True)
class IndexerSpec:
    heads: int
    head_dim: int
    rope_dim: int  # the first dimensions of a head, which turn
    rope: RopeSpec
    topk: int  # keys that a query keeps; where there are no more, all are kept
    sparse_training: bool = (
        False  # the loss looks at the chosen keys only; false: dense warm-up, if there is a loss
    )
    loss_factor: float = 0.0  # 0: no loss

    @property
    def selecting(self) -> bool:
        """Whether attention is sparse: always, except in the dense warm-up."""
        return self.sparse_training or self.loss_factor == 0

    def depends_on_length(self, length: int) -> bool:
        """Whether keys are selected from up to `length` tokens in such a way that tokens after a
        query may change its selection. A cache cannot hold what follows from that."""
        return self.selecting and length > self.topk and ties_depend_on_length()

    def build(
        self, initializer: Initializer, embed_dim: int, query_rank: int, dtype: Any
    ) -> "Indexer":
        return Indexer(initializer, self, embed_dim, query_rank, dtype)


class Indexer(nnx.Module):
    def __init__(
        self,
        initializer: Initializer,
        spec: IndexerSpec,
        embed_dim: int,
        query_rank: int,
        dtype: Any,
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
        """The attention with its keys chosen, and the loss, if any. x [B, S, E], query_latent [B,
        S, R]; keys [B, T, D] of all tokens that may be seen, from `keys`."""
        spec = self.spec
        choosing = spec.selecting and attention.k.shape[1] > spec.topk
        if not choosing and spec.loss_factor == 0:
            return attention, {}
        scores = self.scores(
            jax.lax.stop_gradient(x), jax.lax.stop_gradient(query_latent), keys, inputs.positions
        )
        if choosing:
            chosen = constrain(
                torch_topk_mask(hide(scores, dense_mask(attention), -jnp.inf), spec.topk, inputs.lengths)[:, None],
                "activation_batch_attn", None, "activation_length_attn", "activation_kv_length",
            )  # fmt: skip
            attention = replace(attention, selected=chosen)
        if spec.loss_factor == 0:
            return attention, {}
        return attention, {aux_names.INDEXER_LOSS: spec.loss_factor * divergence(scores, attention)}

    def keys(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """[B, S, D], one a token for all scoring heads."""
        key = self.key_norm(self.key(jax.lax.stop_gradient(x)))
        key = self.turned(key[:, :, None], positions)[:, :, 0]
        return constrain(key, "activation_batch_attn", "activation_kv_length", None)

    def scores(
        self, x: jax.Array, query_latent: jax.Array, key: jax.Array, positions: jax.Array
    ) -> jax.Array:
        """[B, S, T] in float32, a block of queries at a time: those of all heads at once are the
        largest array here.
        """
        spec = self.spec
        query = self.turned(self.query(query_latent), positions)
        weight = self.weight(x.astype(jnp.float32)) * (spec.heads * spec.head_dim) ** -0.5

        @jax.checkpoint
        def some(part: tuple[jax.Array, jax.Array]) -> jax.Array:
            query, weight = part
            products = jnp.einsum("bshd,btd->bsht", query, key, preferred_element_type=jnp.float32)
            return jnp.einsum("bsh,bsht->bst", weight, jax.nn.relu(products))

        scores = map_queries(some, (query, weight))
        return constrain(
            scores, "activation_batch_attn", "activation_length_attn", "activation_kv_length"
        )

    def turned(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        size = self.spec.rope_dim
        return jnp.concatenate(
            [apply_rope(x[..., :size], positions, self.spec.rope), x[..., size:]], axis=-1
        )


def hide(scores: jax.Array, visible: jax.Array | None, value: float) -> jax.Array:
    return scores if visible is None else jnp.where(visible, scores, value)


def divergence(scores: jax.Array, attention: AttentionInputs) -> jax.Array:
    """KL(weights of the attention ‖ softmax(scores)) over the keys that each query sees, the mean
    over real tokens.
    """
    visible = dense_head_mask(attention)
    if visible is not None and visible.ndim == 4:
        visible = visible[:, 0]  # one choice for all heads
    target = mean_weights(attention)
    predicted = jax.nn.log_softmax(hide(scores, visible, HIDDEN), axis=-1)
    each = jax.scipy.special.xlogy(target, target) - target * predicted
    each = (each if visible is None else jnp.where(visible, each, 0)).sum(axis=-1)
    if attention.q_segments is None:
        return each.mean()
    real = attention.q_segments != 0
    return jnp.where(real, each, 0).sum() / jnp.maximum(real.sum(), 1)
