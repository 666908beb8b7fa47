"""Blocks that are nothing but products, for trying out sharding and pipelines."""

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from maxtext.configs.types import MaxTextConfig
from maxtext.layers.inputs import Aux, LayerInputs
from maxtext.layers.linear import Linear
from maxtext.layers.parameters import Maker


@dataclass(frozen=True)
class SimpleSpec:
    """One matrix, or with a width two in a row."""

    size: int
    width: int | None = None

    def build(self, maker: Maker, dtype: Any) -> nnx.Module:
        return SimpleBlock(maker, self, dtype)


class SimpleBlock(nnx.Module):
    def __init__(self, maker: Maker, spec: SimpleSpec, dtype: Any):
        size, width = spec.size, spec.width
        if width is None:
            self.products = nnx.List(
                [Linear(maker.child(0), (size,), (size,), ("embed", None), dtype)]
            )
        else:
            up = Linear(maker.child(0), (size,), (width,), ("embed", "mlp"), dtype)
            down = Linear(maker.child(1), (width,), (size,), ("mlp", "embed"), dtype)
            self.products = nnx.List([up, down])

    def __call__(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        for product in self.products:
            x = product(x)
        return x, {}


def simple(config: MaxTextConfig) -> list[SimpleSpec]:
    return [SimpleSpec(config.emb_dim)] * config.num_decoder_layers


def simple_mlp(config: MaxTextConfig) -> list[SimpleSpec]:
    return [SimpleSpec(config.emb_dim, config.mlp_dim)] * config.num_decoder_layers
