"""How much a model is: weights and FLOPs, counted from its layers by one set of rules for every architecture.

FLOPs are those of matrix products, 2 for a multiply-add; attention is counted at what its mask needs; logits count, the
embedding look-up does not; a training step is three forward passes; rematerialization is not counted.
"""

import math
from functools import singledispatch
from typing import Any

import jax

from maxtext.kernels.attention import Visibility
from maxtext.layers.attention import AttentionSpec
from maxtext.layers.block import LayerSpec
from maxtext.layers.mlp import MlpSpec
from maxtext.models.registry import segments
from maxtext.models.simple import SimpleSpec


def parameter_count(weights: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(weights))


def visible_keys(visibility: Visibility, length: int) -> float:
    """The mean number of keys that a token of a sequence sees."""
    if not visibility.causal:
        return length
    reach = visibility.window or visibility.chunk
    if reach is None or reach >= length:
        return (length + 1) / 2
    if visibility.window:  # 1, 2, …, reach, reach, …
        return (reach * (reach + 1) / 2 + (length - reach) * reach) / length
    whole, rest = divmod(length, reach)  # chunks that each start anew
    return (whole * reach * (reach + 1) + rest * (rest + 1)) / 2 / length


@singledispatch
def layer_flops(spec: Any, length: int) -> float:
    """Forward FLOPs a token of one layer."""
    raise TypeError(f"no FLOP count for {type(spec).__name__}")


@layer_flops.register
def _(spec: LayerSpec, length: int) -> float:
    return attention_flops(spec.attention, spec.size, length) + mlp_flops(spec.mlp, spec.size)


@layer_flops.register
def _(spec: SimpleSpec, length: int) -> float:
    return 2 * spec.size * spec.size if spec.width is None else 4 * spec.size * spec.width


def attention_flops(spec: AttentionSpec, size: int, length: int) -> float:
    heads = spec.query_heads + 2 * spec.kv_heads + spec.query_heads  # query, key and value, out
    projections = 2 * size * heads * spec.head_dim
    return projections + 4 * spec.query_heads * spec.head_dim * visible_keys(spec.visibility, length)


def mlp_flops(spec: MlpSpec, size: int) -> float:
    return 2 * size * spec.width * (len(spec.activations) + 1)


def forward_flops_per_token(config: Any, length: int | None = None) -> float:
    length = length or config.max_target_length
    layers = sum(
        segment.repeats * sum(layer_flops(spec, length) for spec in segment.pattern) for segment in segments(config)
    )
    return layers + 2 * config.emb_dim * config.vocab_size


def train_flops_per_token(config: Any) -> float:
    return 3 * forward_flops_per_token(config)
