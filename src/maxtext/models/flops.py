"""Forward FLOPs of layers, by one set of rules for every architecture.

FLOPs are those of matrix products, 2 for a multiply-add; attention is counted at what its mask
needs. A family registers the specs that it defines itself.
"""

from functools import singledispatch

from maxtext.kernels.attention_options import AttentionMask
from maxtext.layers.specs import (
    AttentionSpec,
    EngramSpec,
    GatedDeltaNetSpec,
    IndexerSpec,
    LayerSpec,
    MlaSpec,
    MlpSpec,
    Moba,
    MoeSpec,
)


def visible_keys(mask: AttentionMask, length: int, limit: int | None = None) -> float:
    """The mean number of keys that a token of a sequence attends to, at most `limit` for each."""
    limit = length if limit is None else limit
    if not mask.causal:
        return min(length, limit)
    if mask.window:
        return ramp_sum(length, min(mask.window, limit)) / length
    if mask.chunk:
        full_chunks, rest = divmod(length, mask.chunk)
        tokens = full_chunks * ramp_sum(mask.chunk, limit) + ramp_sum(rest, limit)
        return tokens / length
    return ramp_sum(length, limit) / length


def ramp_sum(terms: int, limit: int) -> float:
    """1 + 2 + … + limit + limit + …, of this many terms."""
    rising = min(terms, limit)
    return rising * (rising + 1) / 2 + (terms - rising) * limit


def moba_keys(moba: Moba, length: int) -> tuple[float, float]:
    """The mean number of keys that a token attends to, and of earlier chunks that it chooses
    from.
    """
    full_chunks, rest = divmod(length, moba.chunk)
    own_chunk = visible_keys(AttentionMask(chunk=moba.chunk), length)
    chunk_lengths = [moba.chunk] * full_chunks + [rest]
    earlier = sum(index * count for index, count in enumerate(chunk_lengths)) / length
    chosen = (
        sum(min(index, moba.top - 1) * count for index, count in enumerate(chunk_lengths)) / length
    )
    return own_chunk + chosen * moba.chunk, earlier


@singledispatch
def layer_flops(spec: object, length: int) -> float:
    """Forward FLOPs a token of one layer."""
    raise TypeError(f"no FLOP count for {type(spec).__name__}")


@layer_flops.register
def _(spec: LayerSpec, length: int) -> float:
    flops = mixer_flops(spec.attention, spec.embed_dim, length) + feed_flops(
        spec.mlp, spec.embed_dim
    )
    if spec.streams:
        sublayers = 1 if spec.parallel else 2
        flops += sublayers * hyper_connection_flops(spec.streams.streams, spec.embed_dim)
    return flops + (engram_flops(spec.engram, spec.embed_dim) if spec.engram else 0.0)


def hyper_connection_flops(streams: int, embed_dim: int) -> float:
    """Around one sub-layer with k streams: the mappings, k·E to k(k+2) values; the mix that the
    sub-layer reads, k to 1; the mix of the streams, k to k; and the update, 1 to k."""
    return 2 * embed_dim * streams * (streams * (streams + 2) + 1 + streams + 1)


def engram_flops(spec: EngramSpec, embed_dim: int) -> float:
    """Keys for each stream and one value from the embeddings looked up; the products of keys with
    the streams; the taps of the convolution.
    """
    projections = spec.memory_dim * (spec.streams + 1)
    return 2 * embed_dim * (projections + spec.streams + spec.kernel_size * spec.streams)


@singledispatch
def mixer_flops(spec: object, embed_dim: int, length: int) -> float:
    raise TypeError(f"no FLOP count for {type(spec).__name__}")


@mixer_flops.register
def _(spec: AttentionSpec, embed_dim: int, length: int) -> float:
    heads = spec.query_heads * (1 + spec.gated) + (2 - spec.shared_kv) * spec.kv_heads
    projections = 2 * embed_dim * heads * spec.head_dim
    projections += 2 * spec.query_heads * spec.head_dim * (spec.output_dim or embed_dim)
    if spec.moba:
        keys, chunks = moba_keys(spec.moba, length)
    else:
        keys, chunks = visible_keys(spec.mask, length), 0.0
    return projections + spec.query_heads * spec.head_dim * (4 * keys + 2 * chunks)


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
    keys = visible_keys(spec.mask, length)
    indexer_flops = 0.0
    if spec.indexer and indexer_runs(spec.indexer, length):
        projections += spec.indexer.heads * (spec.query_rank * spec.indexer.head_dim + embed_dim)
        projections += embed_dim * spec.indexer.head_dim
        # Products with keys, and their weighted sum.
        indexer_flops = 2 * spec.indexer.heads * (spec.indexer.head_dim + 1) * keys
        if spec.indexer.is_sparse:
            keys = visible_keys(spec.mask, length, spec.indexer.topk)
    head_dims = spec.nope_dim + spec.rope_dim + spec.value_dim
    if spec.latent:
        head_dims = 2 * spec.kv_rank + spec.rope_dim
    return 2 * projections + indexer_flops + 2 * spec.heads * head_dims * keys


def indexer_runs(spec: IndexerSpec, length: int) -> bool:
    """An indexer that is not trained runs only if there are more keys than it selects."""
    return spec.loss_factor > 0 or (spec.is_sparse and length > spec.topk)


@mixer_flops.register
def _(spec: GatedDeltaNetSpec, embed_dim: int, length: int) -> float:
    """The recurrence as defined, three products with the state a token; the chunked form needs
    more.
    """
    keys, values = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
    projections = embed_dim * (2 * keys + 2 * values + 2 * spec.value_heads) + values * embed_dim
    convolution = spec.conv_width * (2 * keys + values)
    return (
        2 * (projections + convolution) + 3 * 2 * spec.value_heads * spec.key_dim * spec.value_dim
    )


@singledispatch
def feed_flops(spec: object, embed_dim: int) -> float:
    raise TypeError(f"no FLOP count for {type(spec).__name__}")


@feed_flops.register
def _(spec: MlpSpec, embed_dim: int) -> float:
    return 2 * embed_dim * spec.hidden_dim * (len(spec.activations) + 1)


@feed_flops.register
def _(spec: MoeSpec, embed_dim: int) -> float:
    """The experts chosen for a token, and the shared ones."""
    expert = 2 * embed_dim * spec.hidden_dim * (len(spec.activations) + 1)
    shared = (
        feed_flops(spec.shared, embed_dim) + 2 * embed_dim * spec.shared_gate
        if spec.shared
        else 0.0
    )
    return 2 * embed_dim * spec.router.experts + spec.router.topk * expert + shared
