"""Blocks that are nothing but products, for trying out sharding and pipelines."""

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from maxtext.configs.types import MaxTextConfig
from maxtext.layers.inputs import Aux, LayerInputs, Sublayer
from maxtext.layers.linear import build_linear
from maxtext.layers.parameters import Initializer
from maxtext.models.flops import layer_flops


@dataclass(frozen=True)
class SimpleSpec:
    """One matrix, or with a hidden dimension two in a row."""

    embed_dim: int
    hidden_dim: int | None = None

    def build(self, initializer: Initializer, dtype: Any) -> "SimpleBlock":
        return SimpleBlock(initializer, self, dtype)


class SimpleBlock(Sublayer):
    def __init__(self, initializer: Initializer, spec: SimpleSpec, dtype: Any):
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


def simple(config: MaxTextConfig) -> list[SimpleSpec]:
    return [SimpleSpec(config.emb_dim)] * config.num_decoder_layers


def simple_mlp(config: MaxTextConfig) -> list[SimpleSpec]:
    return [SimpleSpec(config.emb_dim, config.mlp_dim)] * config.num_decoder_layers


@layer_flops.register
def _(spec: SimpleSpec, length: int) -> float:
    return (
        2 * spec.embed_dim * spec.embed_dim
        if spec.hidden_dim is None
        else 4 * spec.embed_dim * spec.hidden_dim
    )
