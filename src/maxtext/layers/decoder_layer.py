"""Builds a decoder layer from the fastest implementation that supports its spec."""

from jax.typing import DTypeLike

from maxtext.layers.block import Block, ParallelBlock
from maxtext.layers.context import choose
from maxtext.layers.fp8_block import (
    Fp8AttentionBlock,
    Fp8FusedBlock,
    Fp8MlpBlock,
    Fp8SublayersBlock,
)
from maxtext.layers.fp8_decode_block import (
    Fp8DecodeAttentionBlock,
    Fp8DecodeBlock,
    Fp8DecodeMlpBlock,
)
from maxtext.layers.gemv_block import GemvAttentionBlock, GemvBlock, GemvMlpBlock
from maxtext.layers.parameters import Initializer
from maxtext.layers.specs import LayerSpec

# The fastest first. A layer is built from the first that supports its spec and the context.
BLOCKS: tuple[type[Block], ...] = (
    Fp8FusedBlock,
    Fp8SublayersBlock,
    Fp8AttentionBlock,
    Fp8MlpBlock,
    GemvBlock,
    GemvAttentionBlock,
    GemvMlpBlock,
    Fp8DecodeBlock,
    Fp8DecodeAttentionBlock,
    Fp8DecodeMlpBlock,
    ParallelBlock,
    Block,
)


def build(spec: LayerSpec, initializer: Initializer, dtype: DTypeLike) -> Block:
    choice = choose(BLOCKS, spec, initializer.context)
    return choice.implementation(initializer, spec, dtype)
