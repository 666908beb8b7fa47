"""Blocks that are nothing but products, for trying out sharding and pipelines."""

from dataclasses import dataclass

from maxtext.configs.types import MaxTextConfig
from maxtext.layers.specs import Spec
from maxtext.models.flops import layer_flops


@dataclass(frozen=True)
class SimpleSpec(Spec):
    """One matrix, or with a hidden dimension two in a row."""

    module = "maxtext.models.simple.block"

    embed_dim: int
    hidden_dim: int | None = None


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
