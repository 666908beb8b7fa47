"""How much a model is: weights and FLOPs, counted from its layers by one set of rules for every
architecture.

FLOPs are those of matrix products, 2 for a multiply-add; attention is counted at what its mask
needs; logits count, the embedding look-up does not; a training step is three forward passes;
rematerialization is not counted.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import singledispatch
from typing import Any

import jax

from maxtext.configs.types import MaxTextConfig
from maxtext.kernels.attention import AttentionMask
from maxtext.layers.attention import AttentionSpec, Moba
from maxtext.layers.engram import EngramSpec
from maxtext.layers.gated_delta_net import GatedDeltaNetSpec
from maxtext.layers.indexer import IndexerSpec
from maxtext.layers.mla import MlaSpec
from maxtext.layers.mlp import MlpSpec
from maxtext.layers.moe import MoeSpec
from maxtext.models.gemma import GemmaFeed
from maxtext.models.qwen import NarrowSpec
from maxtext.models.registry import layers
from maxtext.models.simple import SimpleSpec

# The parts of a model, by the names on the way to a weight; the first that has one of them takes
# it.
PARTS: dict[str, tuple[str, ...]] = {
    "n-gram memory": ("engram",),
    "hyper-connections": ("attention_streams", "mlp_streams"),
    "norms": ("norm",),  # and whatever ends in _norm
    "embedding": ("embedder", "positions"),
    "output head": ("head",),
    "experts": ("experts",),
    "shared experts": ("shared", "shared_gate"),
    "routers": ("router",),
    "attention": ("attention",),
    "mlp": ("mlp", "widen", "products"),
}


def parameter_count(weights: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(weights))


def active_count(config: MaxTextConfig, weights: Any) -> int:
    """The weights that a token meets: of the experts, those that are chosen for it; all others,
    embedding and output head among them, whole."""
    parts = breakdown(weights)
    experts = parts.pop("experts", 0)
    return sum(parts.values()) + experts * config.num_experts_per_tok // config.num_experts


def breakdown(weights: Any) -> dict[str, int]:
    """How many weights each part has, for the parts that there are."""
    found: dict[str, int] = {}
    for path, leaf in jax.tree.leaves_with_path(weights):
        part = part_of([str(step.key) for step in path])
        found[part] = found.get(part, 0) + math.prod(leaf.shape)
    order = [
        "embedding",
        "attention",
        "mlp",
        "experts",
        "shared experts",
        "routers",
        "norms",
        "hyper-connections",
    ]
    order += ["n-gram memory", "output head", "other"]
    return {part: found[part] for part in order if part in found}


def part_of(path: Sequence[str]) -> str:
    names = {"norm" if name.endswith("_norm") else name for name in path}
    # A memory, and the connections of streams, have norms and products of their own.
    return next((part for part, marks in PARTS.items() if names.intersection(marks)), "other")


def visible_keys(mask: AttentionMask, length: int, most: int | None = None) -> float:
    """The mean number of keys that a token of a sequence sees; `most`: no token sees more."""
    most = length if most is None else most
    if not mask.causal:
        return min(length, most)
    if mask.window:
        return ramp(length, min(mask.window, most)) / length
    if mask.chunk:
        whole, rest = divmod(length, mask.chunk)  # chunks that each start anew
        return (whole * ramp(mask.chunk, most) + ramp(rest, most)) / length
    return ramp(length, most) / length


def ramp(tokens: int, most: int) -> float:
    """1 + 2 + … + most + most + …, so many terms."""
    rising = min(tokens, most)
    return rising * (rising + 1) / 2 + (tokens - rising) * most


def moba_keys(moba: Moba, length: int) -> tuple[float, float]:
    """The mean number of keys that a token sees, and of chunks before its own that it chooses
    from.
    """
    whole, rest = divmod(length, moba.chunk)
    own = visible_keys(AttentionMask(chunk=moba.chunk), length)
    tokens = [moba.chunk] * whole + [rest]
    before = sum(place * count for place, count in enumerate(tokens)) / length
    kept = sum(min(place, moba.top - 1) * count for place, count in enumerate(tokens)) / length
    return own + kept * moba.chunk, before


def layer_flops(spec: Any, length: int) -> float:
    """Forward FLOPs a token of one layer."""
    if isinstance(spec, SimpleSpec):
        return (
            2 * spec.embed_dim * spec.embed_dim
            if spec.hidden_dim is None
            else 4 * spec.embed_dim * spec.hidden_dim
        )
    flops = mixer_flops(spec.attention, spec.embed_dim, length)
    if isinstance(spec, NarrowSpec):
        return (
            flops
            + feed_flops(spec.mlp, spec.mlp_dim)
            + 2 * spec.mlp_dim * spec.embed_dim * (spec.mlp_dim != spec.embed_dim)
        )
    flops += feed_flops(spec.mlp, spec.embed_dim)
    if spec.streams:
        flops += (1 if spec.parallel else 2) * stream_flops(spec.streams.streams, spec.embed_dim)
    return flops + (engram_flops(spec.engram, spec.embed_dim) if spec.engram else 0.0)


def stream_flops(streams: int, embed_dim: int) -> float:
    """Around one sub-layer: the mappings, k·E to k(k+2) numbers; what is read, k to 1; the mixing,
    k to k; and what is written, 1 to k."""
    return 2 * embed_dim * streams * (streams * (streams + 2) + 1 + streams + 1)


def engram_flops(spec: EngramSpec, embed_dim: int) -> float:
    """Keys for each stream and one value from the rows looked up; the keys' products with the
    streams; the taps.
    """
    return (
        2
        * embed_dim
        * (spec.memory_dim * (spec.streams + 1) + spec.streams + spec.kernel_size * spec.streams)
    )


@singledispatch
def mixer_flops(spec: Any, embed_dim: int, length: int) -> float:
    raise TypeError(f"no FLOP count for {type(spec).__name__}")


@mixer_flops.register
def _(spec: AttentionSpec, embed_dim: int, length: int) -> float:
    heads = spec.query_heads * (1 + spec.gated) + (2 - spec.shared_kv) * spec.kv_heads
    projections = 2 * embed_dim * heads * spec.head_dim
    projections += 2 * spec.query_heads * spec.head_dim * (spec.output_dim or embed_dim)
    if spec.moba:
        seen, weighed = moba_keys(spec.moba, length)
    else:
        seen, weighed = visible_keys(spec.mask, length), 0.0
    return projections + spec.query_heads * spec.head_dim * (4 * seen + 2 * weighed)


@mixer_flops.register
def _(spec: MlaSpec, embed_dim: int, length: int) -> float:
    query = spec.heads * (spec.nope_dim + spec.rope_dim)
    projections = (
        embed_dim * query if not spec.query_rank else spec.query_rank * (embed_dim + query)
    )
    projections += (
        embed_dim * (spec.kv_rank + spec.rope_dim) + spec.heads * spec.value_dim * embed_dim
    )
    projections += spec.kv_rank * spec.heads * (spec.nope_dim + spec.value_dim)
    seen = visible_keys(spec.mask, length)
    scoring = 0.0
    if spec.indexer and scores_keys(spec.indexer, length):
        projections += spec.indexer.heads * (spec.query_rank * spec.indexer.head_dim + embed_dim)
        projections += embed_dim * spec.indexer.head_dim
        scoring = (
            2 * spec.indexer.heads * (spec.indexer.head_dim + 1) * seen
        )  # products with keys, their weighted sum
        if spec.indexer.selecting:
            seen = visible_keys(spec.mask, length, spec.indexer.topk)
    width = spec.nope_dim + spec.rope_dim + spec.value_dim
    if spec.latent:
        width = 2 * spec.kv_rank + spec.rope_dim
    return 2 * projections + scoring + 2 * spec.heads * width * seen


def scores_keys(spec: IndexerSpec, length: int) -> bool:
    """Where there are no more keys than it would keep, an indexer has nothing to do, unless it
    learns.
    """
    return spec.loss_factor > 0 or (spec.selecting and length > spec.topk)


@mixer_flops.register
def _(spec: GatedDeltaNetSpec, embed_dim: int, length: int) -> float:
    """The recurrence as it is defined, three products with the state a token: chunks trade more of
    them for speed.
    """
    keys, values = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
    projections = embed_dim * (2 * keys + 2 * values + 2 * spec.value_heads) + values * embed_dim
    convolution = spec.conv_width * (2 * keys + values)
    return (
        2 * (projections + convolution) + 3 * 2 * spec.value_heads * spec.key_dim * spec.value_dim
    )


@singledispatch
def feed_flops(spec: Any, embed_dim: int) -> float:
    raise TypeError(f"no FLOP count for {type(spec).__name__}")


@feed_flops.register
def _(spec: MlpSpec, embed_dim: int) -> float:
    return 2 * embed_dim * spec.hidden_dim * (len(spec.activations) + 1)


@feed_flops.register
def _(spec: MoeSpec, embed_dim: int) -> float:
    """The experts that a token meets."""
    each = 2 * embed_dim * spec.hidden_dim * (len(spec.activations) + 1)
    shared = (
        feed_flops(spec.shared, embed_dim) + 2 * embed_dim * spec.shared_gate
        if spec.shared
        else 0.0
    )
    return 2 * embed_dim * spec.router.experts + spec.router.chosen * each + shared


@feed_flops.register
def _(spec: GemmaFeed, embed_dim: int) -> float:
    return feed_flops(spec.mlp, embed_dim) + feed_flops(spec.experts, embed_dim)


def forward_flops_per_token(config: MaxTextConfig, length: int | None = None) -> float:
    length = length or config.max_target_length
    specs = layers(config)
    head = 2 * config.emb_dim * config.vocab_size
    flops = sum(layer_flops(spec, length) for spec in specs) + head
    if (
        config.mtp_num_layers
    ):  # each a layer like the last, without its memory, a projection, and the head again
        further = (
            layer_flops(replace(specs[-1], engram=None), length) + 4 * config.emb_dim**2 + head
        )
        flops += config.mtp_num_layers * further
    return flops


def train_flops_per_token(config: MaxTextConfig) -> float:
    return 3 * forward_flops_per_token(config)
