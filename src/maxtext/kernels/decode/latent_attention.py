"""Paged attention of a decode step over latents (MLA), with one new token a sequence: the latent of
a token is the key and the value of all heads, and is read once for a tile of them. A Pallas kernel
for NVIDIA GPUs, lowered by Triton.

    logits[h, t] = scale · (q[h] · latent[t] + q_rope[h] · key_rope[t])
    out[h]       = softmax(logits[h, 0..t]) latent[0..t]

The keys of a sequence are split into spans as in paged_attention.py, whose kernel combines them.

Shapes: B rows, H heads, R latent rank, P RoPE dim, N blocks of block_size tokens, C columns of a
block table.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike

from maxtext.common.hardware import is_nvidia
from maxtext.kernels.attention.dot_product import MASK_VALUE
from maxtext.kernels.decode.paged_attention import MIN_SPLITS, PROGRAMS, combine_spans
from maxtext.kernels.decode.paged_tiles import (
    MIN_ROWS,
    Partial,
    add_partial,
    soft_capped,
    store_rows,
    tile_slots,
)

MAX_HEADS_PER_PROGRAM = 32
TILE_SIZE = 32  # tokens that a program reads at a time
MAX_RANK = 512  # the sums of a tile of heads are in registers


def unsupported_reason(
    rank: int, rope_dim: int, block_size: int, dtype: DTypeLike, platform: str, capability: str
) -> str | None:
    """None, or why the kernel is not supported."""
    if platform != "gpu" or not is_nvidia(capability):
        return "the kernel for latent attention needs an NVIDIA GPU"
    if jnp.dtype(dtype) != jnp.bfloat16:
        return "the kernel for latent attention reads bfloat16"
    if any(size < MIN_ROWS or size & (size - 1) for size in (rank, rope_dim)) or rank > MAX_RANK:
        return f"a rank of {rank} and {rope_dim} RoPE dimensions are not powers of two up to 512"
    return None if block_size % MIN_ROWS == 0 else f"blocks have {block_size} tokens"


def latent_attention(
    q: Array,
    q_rope: Array,
    new: tuple[Array, Array],
    pools: tuple[Array, Array],
    block_table: Array,
    positions: Array,
    *,
    scale: float,
    soft_cap: float | None = None,
    splits: int | None = None,
    interpret: bool = False,
) -> tuple[Array, tuple[Array, Array]]:
    """The weighted sums of latents [B, H, R], and the pools with the new tokens in them.

    q [B, H, R] with the key projection absorbed, q_rope [B, H, P]; `new` is the latent [B, R] and
    the key part with RoPE [B, P] of the new token, the pools are [N, block_size, R] and
    [N, block_size, P]; block_table [B, C]; positions [B], -1 for an idle row, whose output is 0.
    """
    batch, heads, _ = q.shape
    block_size = pools[0].shape[1]
    tile_size = min(TILE_SIZE, block_size & -block_size)
    heads_tile = min(max(MIN_ROWS, pl.next_power_of_2(heads)), MAX_HEADS_PER_PROGRAM)
    tiles = block_table.shape[1] * block_size // tile_size
    programs = batch * pl.cdiv(heads, heads_tile)
    splits = splits or min(tiles, max(MIN_SPLITS, pl.cdiv(PROGRAMS, programs)))
    flat = [pool.reshape(-1, pool.shape[-1]) for pool in pools]
    span = functools.partial(
        latent_span,
        heads_tile=heads_tile,
        block_size=block_size,
        tile_size=tile_size,
        splits=splits,
        scale=scale,
        soft_cap=soft_cap,
    )
    rows = (q, q_rope, block_table, positions[:, None], *new)
    warps = 4 if heads_tile == MIN_ROWS else 8
    spans, written = attend_spans(span, rows, flat, (splits, heads_tile), warps, interpret)
    attn_out = combine_spans(
        *(part[:, None] for part in spans), sinks=None, dtype=q.dtype, interpret=interpret
    )
    latents, ropes = (array.reshape(pool.shape) for array, pool in zip(written, pools, strict=True))
    return attn_out[:, 0], (latents, ropes)


def attend_spans(
    span: Callable[..., None],
    rows: Sequence[Array],
    pools: Sequence[Array],
    sizes: tuple[int, int],
    warps: int,
    interpret: bool,
) -> tuple[list[Array], list[Array]]:
    """The partial results [B, splits, H, R] and twice [B, splits, H] of each span, and the pools
    with the new tokens in them. `rows` are the arrays of each row of the batch, the queries first;
    `sizes` are (splits, heads of a program)."""
    (batch, heads, rank), (splits, heads_tile) = rows[0].shape, sizes

    def row_spec(array: Array) -> pl.BlockSpec:
        rest = array.shape[1:]
        return pl.BlockSpec((None, *rest), lambda b, h, s: (b, *[0] * len(rest)))

    pool_specs = [pl.BlockSpec(pool.shape, lambda b, h, s: (0, 0)) for pool in pools]
    by_head = pl.BlockSpec((None, None, heads), lambda b, h, s: (b, s, 0))
    context_spec = pl.BlockSpec((None, None, heads, rank), lambda b, h, s: (b, s, 0, 0))
    sums = jax.ShapeDtypeStruct((batch, splits, heads), jnp.float32)
    outputs = pl.pallas_call(
        span,
        grid=(batch, pl.cdiv(heads, heads_tile), splits),
        in_specs=[*map(row_spec, rows), *pool_specs],
        out_specs=[context_spec, by_head, by_head, *pool_specs],
        out_shape=[
            jax.ShapeDtypeStruct((*sums.shape, rank), jnp.float32),
            sums,
            sums,
            *(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools),
        ],
        input_output_aliases={len(rows) + i: 3 + i for i in range(len(pools))},
        interpret=interpret,
        name="latent_attention",
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=2),
    )(*rows, *pools)
    return list(outputs[:3]), list(outputs[3:])


def latent_span(
    q_ref: Ref,
    q_rope_ref: Ref,
    block_table_ref: Ref,
    position_ref: Ref,
    new_ref: Ref,
    new_rope_ref: Ref,
    latents_ref: Ref,
    ropes_ref: Ref,
    context_ref: Ref,
    largest_ref: Ref,
    total_ref: Ref,
    *written: Ref,
    heads_tile: int,
    block_size: int,
    tile_size: int,
    splits: int,
    scale: float,
    soft_cap: float | None,
) -> None:
    """One span of a sequence for a tile of heads: the weighted sum of its latents, the largest
    logits, and the sums of softmax weights."""
    num_heads = q_ref.shape[0]
    head = pl.program_id(1) * heads_tile + jnp.arange(heads_tile)
    index = jnp.minimum(head, num_heads - 1)
    q, q_rope = q_ref[index, :], q_rope_ref[index, :]
    position = position_ref[0]
    span = pl.cdiv(position // tile_size + 1, splits)  # in tiles, for this row
    first = pl.program_id(2) * span
    last = jnp.minimum(first + span, (position + tile_size - 1) // tile_size)
    own_tile = position // tile_size
    owns_new_token = (position >= 0) & (own_tile >= first) & (own_tile < first + span)

    def read(tile: Array, partial: Partial) -> Partial:
        slots = tile_slots(block_table_ref, tile, tile_size, block_size)
        visible = (tile * tile_size + jnp.arange(tile_size) < position)[None, :]
        latents = latents_ref[slots, :]
        logits = triton.dot(q, latents, trans_b=True)
        logits += triton.dot(q_rope, ropes_ref[slots, :], trans_b=True)
        logits = jnp.where(visible, soft_capped(logits * scale, soft_cap), MASK_VALUE)
        largest = logits.max(axis=1)
        weights = jnp.where(visible, jnp.exp(logits - largest[:, None]), 0)
        context = triton.dot(weights.astype(q.dtype), latents)
        return add_partial(partial, (context, largest, weights.sum(axis=1)))

    new, new_rope = (ref[...].astype(jnp.float32) for ref in (new_ref, new_rope_ref))
    logits = (q.astype(jnp.float32) * new[None]).sum(axis=1)
    logits += (q_rope.astype(jnp.float32) * new_rope[None]).sum(axis=1)
    logits = soft_capped(logits * scale, soft_cap)
    partial = (
        jnp.zeros((heads_tile, 1), jnp.float32) + jnp.where(owns_new_token, new, 0)[None],
        jnp.where(owns_new_token, logits, MASK_VALUE),
        jnp.where(owns_new_token, jnp.ones((heads_tile,), jnp.float32), 0),
    )
    partial = jax.lax.fori_loop(first, last, read, partial)
    for ref, values in zip((context_ref, largest_ref, total_ref), partial, strict=True):
        store_rows(ref, head, values, head < num_heads)
    place = jnp.maximum(position, 0)
    slot = block_table_ref[place // block_size] * block_size + place % block_size
    writes = owns_new_token & (pl.program_id(1) == 0)
    for source, ref in zip((new_ref, new_rope_ref), written, strict=True):
        token = source[...].astype(ref.dtype)
        triton.store(ref.at[slot], token, mask=jnp.broadcast_to(writes, token.shape))
