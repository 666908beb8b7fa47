"""The feed-forward of Gemma 4: an MLP and experts in parallel."""

from collections.abc import Callable

import jax
from jax.typing import DTypeLike

from maxtext.layers.inputs import Aux, LayerInputs, Sublayer
from maxtext.layers.norms import Norm
from maxtext.layers.parameters import Initializer
from maxtext.models.gemma.layers import GemmaFeed


class GemmaFeedForward(Sublayer):
    def __init__(self, initializer: Initializer, spec: GemmaFeed, embed_dim: int, dtype: DTypeLike):
        self.dense = spec.mlp.build(initializer.child("dense"), embed_dim, dtype)
        self.sparse = spec.experts.build(initializer.child("sparse"), embed_dim, dtype)
        self.dense_norm = Norm(initializer, spec.norm, embed_dim, dtype)
        self.sparse_norm = Norm(initializer, spec.norm, embed_dim, dtype)
        self.post_dense_norm = Norm(initializer, spec.norm, embed_dim, dtype)
        self.post_sparse_norm = Norm(initializer, spec.norm, embed_dim, dtype)

    def __call__(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        return self.add_both(self.sparse, x, inputs)

    def decode(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        return self.add_both(self.sparse.decode, x, inputs)

    def add_both(
        self,
        sparse_forward: Callable[..., tuple[jax.Array, Aux]],
        x: jax.Array,
        inputs: LayerInputs,
    ) -> tuple[jax.Array, Aux]:
        dense, _ = self.dense(self.dense_norm(x), inputs)
        sparse, aux = sparse_forward(self.sparse_norm(x), inputs, router_input=x)
        return self.post_dense_norm(dense) + self.post_sparse_norm(sparse), aux


def build(
    spec: GemmaFeed, initializer: Initializer, embed_dim: int, dtype: DTypeLike
) -> GemmaFeedForward:
    return GemmaFeedForward(initializer, spec, embed_dim, dtype)
