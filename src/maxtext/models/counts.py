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
from maxtext.layers.gated_delta_net import GatedDeltaNetSpec
from maxtext.layers.mla import MlaSpec
from maxtext.layers.mlp import MlpSpec
from maxtext.layers.moe import MoeSpec
from maxtext.models.gemma import GemmaFeed
from maxtext.models.qwen import NarrowSpec
from maxtext.models.registry import layers
from maxtext.models.simple import SimpleSpec


def parameter_count(weights: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(weights))


def active_count(config: Any, weights: Any) -> int:
    """The weights that a token meets: of the experts, those that are chosen for it."""
    chosen, experts = config.num_experts_per_tok, config.num_experts
    return sum(
        math.prod(leaf.shape) * chosen // experts
        if any(getattr(step, "key", None) == "experts" for step in path)
        else math.prod(leaf.shape)
        for path, leaf in jax.tree.leaves_with_path(weights)
    )


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


def layer_flops(spec: Any, length: int) -> float:
    """Forward FLOPs a token of one layer."""
    if isinstance(spec, SimpleSpec):
        return 2 * spec.size * spec.size if spec.width is None else 4 * spec.size * spec.width
    flops = mixer_flops(spec.attention, spec.size, length)
    if isinstance(spec, NarrowSpec):
        return flops + feed_flops(spec.mlp, spec.width) + 2 * spec.width * spec.size * (spec.width != spec.size)
    flops += feed_flops(spec.mlp, spec.size)
    if spec.streams:  # two sub-layers, each with its mappings, what it reads, and the mixing of the streams
        count = spec.streams.streams
        flops += 2 * 2 * spec.size * count * (count * (count + 2) + 1 + count)
    if spec.engram:
        flops += 2 * spec.engram.width * spec.size * (spec.engram.streams + 1)
        flops += 2 * spec.engram.kernel_size * spec.size * spec.engram.streams
    return flops


@singledispatch
def mixer_flops(spec: Any, size: int, length: int) -> float:
    raise TypeError(f"no FLOP count for {type(spec).__name__}")


@mixer_flops.register
def _(spec: AttentionSpec, size: int, length: int) -> float:
    heads = spec.query_heads * (1 + spec.gated) + (2 - spec.shared_kv) * spec.kv_heads
    projections = 2 * size * heads * spec.head_dim
    projections += 2 * spec.query_heads * spec.head_dim * (spec.output_size or size)
    seen = visible_keys(spec.visibility, length)
    if spec.moba:
        seen = min(seen, spec.moba.chunk * spec.moba.top)
    return projections + 4 * spec.query_heads * spec.head_dim * seen


@mixer_flops.register
def _(spec: MlaSpec, size: int, length: int) -> float:
    query = spec.heads * (spec.nope_dim + spec.rope_dim)
    projections = size * query if not spec.query_rank else spec.query_rank * (size + query)
    projections += size * (spec.kv_rank + spec.rope_dim) + spec.heads * spec.value_dim * size
    projections += spec.kv_rank * spec.heads * (spec.nope_dim + spec.value_dim)
    everything = visible_keys(spec.visibility, length)
    seen, scoring = everything, 0.0
    if spec.indexer:
        projections += spec.indexer.heads * (spec.query_rank * spec.indexer.head_dim + size)
        projections += size * spec.indexer.head_dim
        scoring = 2 * spec.indexer.heads * (spec.indexer.head_dim + 1) * everything
        seen = min(everything, spec.indexer.topk) if spec.indexer.selecting else everything
    width = spec.nope_dim + spec.rope_dim + spec.value_dim
    if spec.latent:
        width = 2 * spec.kv_rank + spec.rope_dim
    return 2 * projections + scoring + 2 * spec.heads * width * seen


@mixer_flops.register
def _(spec: GatedDeltaNetSpec, size: int, length: int) -> float:
    """The recurrence as it is defined, three products with the state a token: chunks trade more of them for speed."""
    keys, values = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
    projections = size * (2 * keys + 2 * values + 2 * spec.value_heads) + values * size
    convolution = spec.conv_width * (2 * keys + values)
    return 2 * (projections + convolution) + 3 * 2 * spec.value_heads * spec.key_dim * spec.value_dim


@singledispatch
def feed_flops(spec: Any, size: int) -> float:
    raise TypeError(f"no FLOP count for {type(spec).__name__}")


@feed_flops.register
def _(spec: MlpSpec, size: int) -> float:
    return 2 * size * spec.width * (len(spec.activations) + 1)


@feed_flops.register
def _(spec: MoeSpec, size: int) -> float:
    """The experts that a token meets."""
    each = 2 * size * spec.width * (len(spec.activations) + 1)
    shared = feed_flops(spec.shared, size) + 2 * size * spec.shared_gate if spec.shared else 0.0
    return 2 * size * spec.router.experts + spec.router.chosen * each + shared


@feed_flops.register
def _(spec: GemmaFeed, size: int) -> float:
    return feed_flops(spec.mlp, size) + feed_flops(spec.experts, size)


def forward_flops_per_token(config: Any, length: int | None = None) -> float:
    length = length or config.max_target_length
    specs = layers(config)
    head = 2 * config.emb_dim * config.vocab_size
    ahead = layer_flops(specs[-1], length) + 4 * config.emb_dim**2 + head  # a layer, its projection, the head again
    return sum(layer_flops(spec, length) for spec in specs) + head + config.mtp_num_layers * ahead


def train_flops_per_token(config: Any) -> float:
    return 3 * forward_flops_per_token(config)
