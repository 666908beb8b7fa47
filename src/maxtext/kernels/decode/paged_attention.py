"""Paged attention of a decode step, with one new token a sequence, which reads blocks in place.
Pallas kernels for NVIDIA GPUs, lowered by Triton.

    paged_attention    softmax(scale · q k[0..t]) v[0..t],   k[t] and v[t] written to their block

Shapes: B rows, H query heads, K key/value heads, G = H / K, D head_dim, P blocks of block_size
tokens, C columns of a block table.

As in Flash-Decoding, the keys of a sequence are split into `splits` spans, each read by one program
for each key/value head, so that one long sequence occupies the whole GPU; a second kernel combines
the spans. The program whose span has the position of the new token writes it to its block. No
program reads it there: the new token is an input of all of them. Blocks that several rows share can
be read once for all of them, see prefix_attention.py.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike

from maxtext.common.hardware import is_nvidia
from maxtext.kernels.attention.dot_product import MASK_VALUE
from maxtext.kernels.decode.paged_tiles import (
    MIN_ROWS,
    SHARED_BYTES,
    Partial,
    add_partial,
    add_tile,
    head_spec,
    scaled,
    soft_capped,
    store_rows,
    tile_and_stages,
    tile_bytes,
    tile_slots,
)
from maxtext.kernels.decode.prefix_attention import (
    GROUP_ROWS,
    MAX_QUERY_ROWS,
    PrefixGroups,
    prefix_attention,
)
from maxtext.kernels.fp8.quantize import E4M3, scale_from_amax

PROGRAMS = 528  # four for each multiprocessor of an H100 or H200; more are slower to combine
MIN_SPLITS = 2  # balances sequences of different lengths
TILE_SIZE = 64  # tokens that a program reads at a time
# The block of a row is a ring buffer: position p is at p % block_size. Queries attend to the last
# block_size tokens (window), or to those since the last multiple of block_size (chunk).
Ring = Literal["window", "chunk"]
MAX_TWO_WARP_TILE = 32  # tokens
COMBINED_ELEMENTS = 4096  # elements of spans that are combined at a time


def unsupported_reason(
    head_dim: int, block_size: int, dtype: str, platform: str, capability: str = "9.0"
) -> str | None:
    """None, or why the kernel is not supported."""
    if platform != "gpu":
        return f"it is a kernel for NVIDIA GPUs, and this is a {platform.upper()}"
    if not is_nvidia(capability):
        return f"it needs an NVIDIA GPU of compute capability 8.0 or newer, not {capability}"
    if tile_bytes(MIN_ROWS, head_dim, dtype) > SHARED_BYTES:
        return f"a head_dim of {head_dim} is too large for a GPU's shared memory"
    if dtype == "int4":
        return "it does not read int4, which packs two values into a byte"
    if dtype == "float8_e4m3fn" and not is_nvidia(capability, (8, 9)):
        return f"it reads fp8 on GPUs of compute capability 8.9 or newer, not {capability}"
    if head_dim < MIN_ROWS or head_dim & (head_dim - 1):
        return f"a head_dim of {head_dim} is not a power of two of at least {MIN_ROWS}"
    if block_size % MIN_ROWS:
        return (
            f"blocks of {block_size} tokens cannot be cut into tiles: use a multiple of {MIN_ROWS}"
        )
    return None


def paged_attention(
    q: Array,
    new: dict[str, Array],
    pool: dict[str, Array],
    block_table: Array,
    positions: Array,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: Array | None = None,
    groups: PrefixGroups | None = None,
    tile_size: int = TILE_SIZE,
    splits: int | None = None,
    ring: Ring | None = None,
    interpret: bool = False,
) -> tuple[Array, dict[str, Array]]:
    """The attention output [B, H, D], and the pool with the new tokens in it.

    q [B, H, D]; `new` has "key" and "value" [B, K, D] in the dtype of the pool, which is
    [P, block_size, K, D]; a quantized pool also has "key_scale" and "value_scale", [B] or [B, K]
    for a token. If `quantizes_heads(pool)`, `new` may have floats without scales, which the kernel
    quantizes. block_table [B, C]: the blocks of each row. positions [B] of the new tokens; -1 for
    an idle row, whose output is 0. `groups` of rows that share blocks, which are read once.
    `tile_size`: tokens that a program reads at a time; reduced to a divisor of block_size. With a
    `ring`, each row has one block.
    """
    batch, heads, head_dim = q.shape
    _, block_size, kv_heads, _ = pool["key"].shape
    if GROUP_ROWS * heads // kv_heads > MAX_QUERY_ROWS:
        groups = None
    tile_size, stages = tile_and_stages(tile_size, block_size, head_dim, pool["key"].dtype)
    tiles = block_table.shape[1] * block_size // tile_size
    min_splits = MIN_SPLITS if groups is None else 1  # rows that share a prompt begin together
    splits = splits or min(tiles, max(min_splits, pl.cdiv(PROGRAMS, batch * kv_heads)))
    flat_pool = {name: array.reshape(-1, *array.shape[2:]) for name, array in pool.items()}
    tile_options: dict[str, Any] = dict(
        block_size=block_size, tile_size=tile_size, scale=scale, soft_cap=soft_cap
    )
    assert ring is None or block_table.shape[1] == 1
    run_options: dict[str, Any] = dict(stages=stages, interpret=interpret)
    prefix: list[Array] = []
    if groups is not None:
        partial = prefix_attention(q, flat_pool, block_table, groups, **tile_options, **run_options)
        prefix = [groups.row_lengths, *partial]
    spans, written = attend_spans(
        q.reshape(batch, kv_heads, -1, head_dim),
        new,
        flat_pool,
        block_table,
        positions,
        prefix,
        splits=splits,
        is_whole=splits == 1 and sinks is None,
        ring=ring,
        tile_options=tile_options,
        **run_options,
    )
    if len(spans) == 1:
        attn_out = spans[0]
    else:
        attn_out = combine_spans(*spans, sinks=sinks, dtype=q.dtype, interpret=interpret)
    updated_pool = {name: array.reshape(pool[name].shape) for name, array in written.items()}
    return attn_out.reshape(q.shape), updated_pool


def attend_spans(
    q: Array,
    new: dict[str, Array],
    flat_pool: dict[str, Array],
    block_table: Array,
    positions: Array,
    prefix: list[Array],
    *,
    splits: int,
    is_whole: bool,
    ring: Ring | None,
    tile_options: dict[str, Any],
    stages: int,
    interpret: bool,
) -> tuple[list[Array], dict[str, Array]]:
    """The partial results [B, K, splits, G, D] and twice [B, K, splits, G] of each span of q [B, K,
    G, D]; if `is_whole`, the attention output alone; and the pool with the new tokens in it."""
    batch, kv_heads, group_size, head_dim = q.shape
    by_row = pl.BlockSpec((1,), lambda b, k, s: (b,))
    query_heads = pl.BlockSpec((None, None, group_size, head_dim), lambda b, k, s: (b, k, 0, 0))
    by_head = pl.BlockSpec((None, None, group_size), lambda b, k, s: (b, k, 0))
    by_span = pl.BlockSpec((None, None, None, group_size), lambda b, k, s: (b, k, s, 0))
    pool_specs = [head_spec(len(array), array, lambda b: 0) for array in flat_pool.values()]
    spans = (batch, kv_heads, splits, group_size)
    num_inputs = 3 + len(new) + len(prefix)
    num_outputs = 1 if is_whole else 3
    outputs = pl.pallas_call(
        functools.partial(
            attention_span,
            names=tuple(flat_pool),
            new_names=tuple(new),
            group_size=group_size,
            padded_group=max(MIN_ROWS, pl.next_power_of_2(group_size)),
            splits=splits,
            is_whole=is_whole,
            ring=ring,
            **tile_options,
        ),
        grid=(batch, kv_heads, splits),
        in_specs=[
            query_heads,
            pl.BlockSpec((None, block_table.shape[1]), lambda b, k, s: (b, 0)),
            by_row,
            *(head_spec(None, array, lambda b: b) for array in new.values()),
            *([by_row, query_heads, by_head, by_head] if prefix else []),
            *pool_specs,
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, group_size, head_dim), lambda b, k, s: (b, k, s, 0, 0)),
            *[by_span] * (num_outputs - 1),
            *pool_specs,
        ],
        out_shape=[
            jax.ShapeDtypeStruct((*spans, head_dim), q.dtype if is_whole else jnp.float32),
            *[jax.ShapeDtypeStruct(spans, jnp.float32)] * (num_outputs - 1),
            *(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in flat_pool.values()),
        ],
        input_output_aliases={num_inputs + i: num_outputs + i for i in range(len(flat_pool))},
        interpret=interpret,
        name="paged_attention",
        compiler_params=triton.CompilerParams(
            num_warps=2 if tile_options["tile_size"] <= MAX_TWO_WARP_TILE else 4, num_stages=stages
        ),
    )(q, block_table, positions, *new.values(), *prefix, *flat_pool.values())
    written = outputs[num_outputs:]
    return list(outputs[:num_outputs]), dict(zip(flat_pool, written, strict=True))


def combine_spans(
    context: Array,
    largest: Array,
    total: Array,
    *,
    sinks: Array | None,
    dtype: DTypeLike,
    interpret: bool,
) -> Array:
    """The spans' outputs [B, K, splits, G, D] combined by their softmax sums, [B, K, G, D] in
    `dtype`.
    """
    batch, kv_heads, splits, group_size, head_dim = context.shape
    by_span = pl.BlockSpec((None, None, splits, None), lambda b, k, g: (b, k, 0, g))
    by_head = pl.BlockSpec((1,), lambda b, k, g: (k * group_size + g,))
    return pl.pallas_call(
        functools.partial(combine_program, splits=splits),
        grid=(batch, kv_heads, group_size),
        in_specs=[
            pl.BlockSpec((None, None, splits, None, head_dim), lambda b, k, g: (b, k, 0, g, 0)),
            by_span,
            by_span,
            *([] if sinks is None else [by_head]),
        ],
        out_specs=pl.BlockSpec((None, None, None, head_dim), lambda b, k, g: (b, k, g, 0)),
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, group_size, head_dim), dtype),
        interpret=interpret,
        name="combine_attention_spans",
        compiler_params=triton.CompilerParams(num_warps=2, num_stages=1),
    )(context, largest, total, *([] if sinks is None else [sinks.astype(jnp.float32)]))


def combine_program(
    context_ref: Ref, largest_ref: Ref, total_ref: Ref, *refs: Ref, splits: int
) -> None:
    *sinks, out_ref = refs
    head_dim = context_ref.shape[1]
    block = min(pl.next_power_of_2(splits), max(1, COMBINED_ELEMENTS // head_dim))

    def add(step: Array | int, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        context, running_max, total = carry
        span = step * block + jnp.arange(block)
        index, valid = jnp.minimum(span, splits - 1), span < splits
        new_max = jnp.maximum(running_max, jnp.max(largest_ref[index]))
        weight = jnp.where(valid, jnp.exp(largest_ref[index] - new_max), 0)
        decay = jnp.exp(running_max - new_max)
        context = context * decay + (context_ref[index, :] * weight[:, None]).sum(axis=0)
        return context, new_max, total * decay + (total_ref[index] * weight).sum()

    carry = jnp.zeros((head_dim,), jnp.float32), jnp.float32(MASK_VALUE), jnp.float32(0)
    if sinks:
        carry = carry[0], jnp.max(sinks[0][...]), jnp.float32(1)
    if block >= splits:
        context, _, total = add(0, carry)
    else:
        context, _, total = jax.lax.fori_loop(0, pl.cdiv(splits, block), add, carry)
    out_ref[...] = normalized(context, total).astype(out_ref.dtype)


def normalized(context: Array, total: Array) -> Array:
    """The output of a row without tokens is 0."""
    return jnp.where(total > 0, context / jnp.maximum(total, 1e-30), 0)


def attention_span(
    q_ref: Ref,
    block_table_ref: Ref,
    position_ref: Ref,
    *refs: Ref,
    names: tuple[str, ...],
    new_names: tuple[str, ...],
    group_size: int,
    padded_group: int,
    block_size: int,
    tile_size: int,
    splits: int,
    is_whole: bool,
    ring: Ring | None,
    scale: float,
    soft_cap: float | None,
) -> None:
    """One span of a sequence for one key/value head: the weighted sum of its values, its largest
    logit, and the sum of its softmax weights; if `is_whole`, the attention output."""
    num_pools, num_new = len(names), len(new_names)
    num_last = num_pools + (1 if is_whole else 3)  # the outputs
    new_refs, pool_refs = refs[:num_new], refs[-num_last - num_pools : -num_last]
    news = {name: ref[...] for name, ref in zip(new_names, new_refs, strict=True)}
    pools = dict(zip(names, pool_refs, strict=True))
    if len(news) < len(pools):
        news = quantize_heads(news, pools["key"].dtype)
    prefix_refs = refs[num_new : -num_last - num_pools]
    partial_refs, written = refs[-num_last:-num_pools], refs[-num_pools:]
    row = jnp.arange(padded_group)
    q = q_ref[jnp.minimum(row, group_size - 1), :]
    position = position_ref[0]
    # Of the earlier tokens, `end` are in the first places; the new one is written to `place`.
    end, place = position, position
    if ring is not None:
        place = jnp.where(position >= 0, position % block_size, -1)
        end = place if ring == "chunk" else jnp.minimum(position, block_size)
    first_tile = prefix_refs[0][0] // tile_size if prefix_refs else 0
    end_tile = jnp.maximum(place // tile_size + 1, (end + tile_size - 1) // tile_size)
    span = pl.cdiv(end_tile - first_tile, splits)  # in tiles, for this row
    first = first_tile + pl.program_id(2) * span
    last = jnp.minimum(first + span, (end + tile_size - 1) // tile_size)
    owns_new_token = (
        (position >= 0) & (place // tile_size >= first) & (place // tile_size < first + span)
    )

    def read(tile: Array, partial: Partial) -> Partial:
        slots = tile_slots(block_table_ref, tile, tile_size, block_size)
        at = tile * tile_size + jnp.arange(tile_size)
        visible = (at < end) & (at != place)
        return add_tile(q, pools, slots, visible, partial, scale=scale, soft_cap=soft_cap)

    new_key, new_value = (news[name].astype(jnp.float32) for name in ("key", "value"))
    logits = (q.astype(jnp.float32) * new_key[None, :]).sum(axis=1) * scale
    logits = soft_capped(scaled(logits, news, "key", ...), soft_cap)
    value = scaled(new_value, news, "value", ...)
    partial = (
        jnp.zeros((padded_group, 1), jnp.float32) + jnp.where(owns_new_token, value, 0)[None, :],
        jnp.where(owns_new_token, logits, MASK_VALUE),
        jnp.where(owns_new_token, jnp.ones((padded_group,), jnp.float32), 0),
    )
    if prefix_refs:
        is_first_span = (pl.program_id(2) == 0) & (first_tile > 0) & (position >= 0)
        partial = add_partial(partial, read_prefix(prefix_refs, row, group_size, is_first_span))
    context, largest, total = jax.lax.fori_loop(first, last, read, partial)
    if is_whole:
        context = normalized(context, total[:, None])
    for ref, values in zip(partial_refs, (context, largest, total), strict=False):
        store_rows(ref, row, values, row < group_size)
    written_place = jnp.maximum(place, 0)
    slot = block_table_ref[written_place // block_size] * block_size + written_place % block_size
    for name, ref in zip(names, written, strict=True):
        new = news[name]
        triton.store(ref.at[slot], new, mask=jnp.broadcast_to(owns_new_token, new.shape))


def quantizes_heads(pool: dict[str, Array]) -> bool:
    """Whether the kernel can quantize new keys and values: the pool is fp8 and has a scale for
    each head of a token, [P, block_size, K]."""
    scale = pool.get("key_scale")
    return scale is not None and scale.ndim == 3 and pool["key"].dtype == E4M3


def quantize_heads(news: dict[str, Array], dtype: DTypeLike) -> dict[str, Array]:
    """In a kernel: the key and the value [D] of a head in fp8 `dtype`, and their scales []."""
    quantized: dict[str, Array] = {}
    for name, values in news.items():
        values = values.astype(jnp.float32)
        scale = scale_from_amax(jnp.max(jnp.abs(values)), dtype)
        quantized |= {name: (values * (1 / scale)).astype(dtype), f"{name}_scale": scale}
    return quantized


def read_prefix(refs: Any, row: Array, group_size: int, is_used: Array) -> Partial:
    """In a kernel: the partial result of `prefix_attention`, or one over no tokens: that of a row
    without a group is undefined."""
    _, context_ref, largest_ref, total_ref = refs
    head = jnp.minimum(row, group_size - 1)
    return (
        jnp.where(is_used, context_ref[head, :], 0.0),
        jnp.where(is_used, largest_ref[head], MASK_VALUE),
        jnp.where(is_used, total_ref[head], 0.0),
    )
