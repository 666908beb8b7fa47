"""The blocks of matrix products."""

import jax
from flax import nnx
from jax.typing import DTypeLike

from maxtext.layers.inputs import Aux, LayerInputs, Sublayer
from maxtext.layers.linear import build_linear
from maxtext.layers.parameters import Initializer
from maxtext.models.simple.layers import SimpleSpec


class SimpleBlock(Sublayer):
    def __init__(self, initializer: Initializer, spec: SimpleSpec, dtype: DTypeLike):
        embed_dim, hidden_dim = spec.embed_dim, spec.hidden_dim
        if hidden_dim is None:
            self.products = nnx.List(
                [
                    build_linear(
                        initializer,
                        "product",
                        in_shape=(embed_dim,),
                        out_shape=(embed_dim,),
                        axes=("embed", None),
                        dtype=dtype,
                    )
                ]
            )
        else:
            up = build_linear(
                initializer,
                "up",
                in_shape=(embed_dim,),
                out_shape=(hidden_dim,),
                axes=("embed", "mlp"),
                dtype=dtype,
            )
            down = build_linear(
                initializer,
                "down",
                in_shape=(hidden_dim,),
                out_shape=(embed_dim,),
                axes=("mlp", "embed"),
                dtype=dtype,
            )
            self.products = nnx.List([up, down])

    def __call__(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        for product in self.products:
            x = product(x)
        return x, {}


def build(spec: SimpleSpec, initializer: Initializer, dtype: DTypeLike) -> SimpleBlock:
    return SimpleBlock(initializer, spec, dtype)
