"""EAGLE-3 (Li et al. 2025): a layer that drafts the tokens of a model from the residuals after some
of its layers.

With z_t the residuals of the model at token t, one after the other, and e_t+1 the embedding of the
next token,

    h_t = W z_t
    x   = h_t + Attention([RMSNorm(e_t+1) ; RMSNorm(h_t)]),   h = x + MLP(RMSNorm(x))
    a head of its own over RMSNorm(h) predicts token t + 2, out of a part of the vocabulary

For a token t that is a draft itself, h_t is the h before.

Shapes: B batch, S sequence, E embed_dim, D tokens that may be drafted, V vocabulary.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from maxtext.layers.inputs import Aux, LayerInputs
from maxtext.layers.linear import build_linear
from maxtext.layers.norms import Norm
from maxtext.layers.parameters import Initializer
from maxtext.layers.specs import LayerSpec


class Eagle(nnx.Module):
    """`spec` is that of a layer; its attention reads twice its width."""

    def __init__(
        self,
        initializer: Initializer,
        spec: LayerSpec,
        tapped_dim: int,
        draft_vocab_size: int,
        dtype: DTypeLike,
    ):
        dim = spec.embed_dim
        self.fuse = build_linear(
            initializer,
            "fuse",
            in_shape=(tapped_dim,),
            out_shape=(dim,),
            axes=("mlp", "embed"),
            dtype=dtype,
        )
        self.embedding_norm = Norm(initializer, spec.norm, dim, dtype)
        self.hidden_norm = Norm(initializer, spec.norm, dim, dtype)
        attention = replace(spec.attention, output_dim=dim)
        self.attention = attention.build(initializer.child("attention"), 2 * dim, dtype)
        self.mlp_norm = Norm(initializer, spec.norm, dim, dtype)
        self.mlp = spec.mlp.build(initializer.child("mlp"), dim, dtype)
        self.output_norm = Norm(initializer, spec.norm, dim, dtype)
        self.head = build_linear(
            initializer,
            "head",
            in_shape=(dim,),
            out_shape=(draft_vocab_size,),
            axes=("embed_vocab", "vocab"),
            dtype=dtype,
        )

    def __call__(
        self, hidden: jax.Array, embedded: jax.Array, inputs: LayerInputs
    ) -> tuple[jax.Array, jax.Array, Aux]:
        """h_t and e_t+1 [B, S, E] to h, to h normed for the head, and to what attention reports."""
        is_decoding = inputs.cache is not None and hidden.shape[1] == 1
        attend = self.attention.decode if is_decoding else self.attention
        both = [self.embedding_norm(embedded), self.hidden_norm(hidden)]
        attn_out, aux = attend(jnp.concatenate(both, axis=-1), inputs)
        hidden = hidden + attn_out
        mlp_out, _ = self.mlp(self.mlp_norm(hidden), inputs)
        hidden = hidden + mlp_out
        return hidden, self.output_norm(hidden), aux

    def logits(self, x: jax.Array, token_ids: jax.Array, vocab_size: int) -> jax.Array:
        """[B, S, V]: -inf for all but the tokens [D] that may be drafted."""
        drafted = self.head(x).astype(jnp.float32)
        logits = jnp.full((*x.shape[:-1], vocab_size), -jnp.inf)
        return logits.at[..., token_ids].set(drafted)
