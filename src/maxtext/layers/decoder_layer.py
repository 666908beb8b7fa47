"""What a decoder layer consists of, and the implementations that it may be built from."""

from dataclasses import dataclass, field
from typing import Any

from maxtext.layers.block import Block, ParallelBlock
from maxtext.layers.context import choose
from maxtext.layers.engram import EngramSpec
from maxtext.layers.fp8_block import (
    Fp8AttentionBlock,
    Fp8FusedBlock,
    Fp8MlpBlock,
    Fp8SublayersBlock,
)
from maxtext.layers.gemv_block import GemvAttentionBlock, GemvBlock, GemvMlpBlock
from maxtext.layers.hyper_connections import HyperConnectionSpec
from maxtext.layers.norms import NormSpec
from maxtext.layers.parameters import Initializer
from maxtext.layers.spec import IMPLEMENTATION

# The fastest first. A layer is built from the first that supports its spec and the context.
BLOCKS: tuple[type[Block], ...] = (
    Fp8FusedBlock,
    Fp8SublayersBlock,
    Fp8AttentionBlock,
    Fp8MlpBlock,
    GemvBlock,
    GemvAttentionBlock,
    GemvMlpBlock,
    ParallelBlock,
    Block,
)


@dataclass(frozen=True)
class LayerSpec:
    """`attention` and `mlp` are the specs of any sublayers."""

    embed_dim: int
    attention: Any
    mlp: Any
    norm: NormSpec
    parallel: bool = False  # attention and MLP have the same normed input
    attention_norm: bool = True  # a norm on the input of attention
    mlp_norm: bool = True
    post_attention_norm: bool = False  # a norm on the output of attention, before it is added
    post_mlp_norm: bool = False
    scaled: bool = False  # the layer's output times a stored factor that is not trained
    dropout_rate: float = field(default=0.0, metadata=IMPLEMENTATION)
    streams: HyperConnectionSpec | None = None
    engram: EngramSpec | None = None  # a memory of n-grams, added before attention

    def build(self, initializer: Initializer, dtype: Any) -> Block:
        choice = choose(BLOCKS, self, initializer.context)
        return choice.implementation(initializer, self, dtype)
