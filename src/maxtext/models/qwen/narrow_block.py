"""A decoder layer whose attention output and experts are in a narrower space."""

import jax
from jax.typing import DTypeLike

from maxtext.layers.block import constrain_residual
from maxtext.layers.inputs import Aux, LayerInputs, Sublayer
from maxtext.layers.linear import build_linear
from maxtext.layers.norms import Norm
from maxtext.layers.parameters import Initializer
from maxtext.models.qwen.layers import NarrowSpec


class NarrowBlock(Sublayer):
    def __init__(self, initializer: Initializer, spec: NarrowSpec, dtype: DTypeLike):
        self.attention_norm = Norm(initializer, spec.norm, spec.embed_dim, dtype)
        self.attention = spec.attention.build(initializer.child("attention"), spec.embed_dim, dtype)
        self.mlp_norm = Norm(initializer, spec.norm, spec.mlp_dim, dtype)
        self.mlp = spec.mlp.build(initializer.child("mlp"), spec.mlp_dim, dtype)
        widens = spec.mlp_dim != spec.embed_dim
        axes = ("mlp", "embed")
        self.widen = (
            build_linear(
                initializer,
                "widen",
                in_shape=(spec.mlp_dim,),
                out_shape=(spec.embed_dim,),
                axes=axes,
                dtype=dtype,
            )
            if widens
            else None
        )

    def __call__(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        attn_out, _ = self.attention(self.attention_norm(constrain_residual(x)), inputs.fold(0))
        mlp_out, aux = self.mlp(self.mlp_norm(attn_out), inputs.fold(1))
        if self.widen is not None:
            mlp_out = self.widen(mlp_out)
        return constrain_residual(x + mlp_out), aux


def build(spec: NarrowSpec, initializer: Initializer, dtype: DTypeLike) -> NarrowBlock:
    return NarrowBlock(initializer, spec, dtype)
