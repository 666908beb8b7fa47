"""Attention of one new token a row over a cache of pages, read where it lies and only as far as a row is filled.

A Pallas kernel for NVIDIA GPUs, by Triton. The keys of a row are cut into `splits` spans, each read by a program of its
own for each key/value head, so that one long row keeps the whole chip busy; a last small sum joins the spans.

Shapes: B rows, H query heads, K key/value heads, G = H / K, D head size, P pages of `page` tokens, C table columns.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from maxtext.kernels.attention.dot_product import HIDDEN

LEAST_ROWS = 16  # of a product on tensor cores: fewer query heads are filled up
PROGRAMS = 264  # that keep a chip busy, two for each multiprocessor of an H100 or H200; more spans cost more joining


def supports(head_size: int, page: int, dtype: str, platform: str) -> str | None:
    """None, or a reason in words."""
    if platform != "gpu":
        return f"it is a kernel for NVIDIA GPUs, and this is a {platform.upper()}"
    if dtype == "int4":
        return "it does not read int4, two numbers of which are in a byte"
    if head_size < LEAST_ROWS or head_size & (head_size - 1):
        return f"heads of {head_size} numbers are not a power of two of at least {LEAST_ROWS}"
    if page & (page - 1) and page % LEAST_ROWS:
        return f"pages of {page} tokens cannot be cut into tiles: use a multiple of {LEAST_ROWS}"
    return None


def attend(
    q: Array,
    keys: Array,
    values: Array,
    table: Array,
    positions: Array,
    *,
    scale: float,
    reach: int,
    soft_cap: float | None = None,
    sinks: Array | None = None,
    key_scales: Array | None = None,
    value_scales: Array | None = None,
    block: int = 64,
    splits: int | None = None,
    interpret: bool = False,
) -> Array:
    """[B, H, D]; q [B, H, D], keys and values [P, page, K, D], table [B, C], positions [B], of the token that is asked
    for, which is in the cache already; -1: an idle row, which yields 0. All positions are below `reach`. Scales
    [P, page, K] belong to integers. `block`: tokens that a program reads at a time, or as many as divide a page."""
    batch, heads, size = q.shape
    pages, page, groups, _ = keys.shape
    group = heads // groups
    rows = max(LEAST_ROWS, pl.next_power_of_2(group))
    block = math.gcd(pl.next_power_of_2(block), page)
    tiles = pl.cdiv(reach, block)
    splits = splits or max(1, min(tiles, pl.cdiv(PROGRAMS, batch * groups)))
    span = pl.cdiv(tiles, splits)
    padded = jnp.pad(q.reshape(batch, groups, group, size), ((0, 0), (0, 0), (0, rows - group), (0, 0)))
    pools = [keys.reshape(pages * page, groups, size), values.reshape(pages * page, groups, size)]
    if key_scales is not None and value_scales is not None:
        pools += [key_scales.reshape(pages * page, groups), value_scales.reshape(pages * page, groups)]

    def pool_spec(pool: Array) -> pl.BlockSpec:
        rest = pool.ndim - 2
        return pl.BlockSpec((pages * page, None, *pool.shape[2:]), lambda b, k, s: (0, k, *[0] * rest))

    kernel = functools.partial(
        span_of_row, page=page, block=block, span=span, scale=scale, soft_cap=soft_cap,
        quantized=key_scales is not None,
    )  # fmt: skip
    out = [
        jax.ShapeDtypeStruct((batch, groups, splits, rows, size), jnp.float32),
        jax.ShapeDtypeStruct((batch, groups, splits, rows), jnp.float32),
        jax.ShapeDtypeStruct((batch, groups, splits, rows), jnp.float32),
    ]
    mixed, largest, total = pl.pallas_call(
        kernel,
        grid=(batch, groups, splits),
        in_specs=[
            pl.BlockSpec((None, None, rows, size), lambda b, k, s: (b, k, 0, 0)),
            pl.BlockSpec((None, table.shape[1]), lambda b, k, s: (b, 0)),
            pl.BlockSpec((1,), lambda b, k, s: (b,)),
            *map(pool_spec, pools),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, rows, size), lambda b, k, s: (b, k, s, 0, 0)),
            pl.BlockSpec((None, None, None, rows), lambda b, k, s: (b, k, s, 0)),
            pl.BlockSpec((None, None, None, rows), lambda b, k, s: (b, k, s, 0)),
        ],
        out_shape=out,
        interpret=interpret,
        name="attention_over_pages",
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
    )(padded, table, positions, *pools)
    whole = joined(mixed[..., :group, :], largest[..., :group], total[..., :group], sinks)
    return whole.reshape(q.shape).astype(q.dtype)


def joined(mixed: Array, largest: Array, total: Array, sinks: Array | None) -> Array:
    """Spans [B, K, splits, G, D] as one."""
    top = largest.max(axis=2)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(top.shape[1:])
        top = jnp.maximum(top, sink)
    share = jnp.exp(largest - top[:, :, None])
    whole = (total * share).sum(axis=2)
    if sinks is not None:
        whole += jnp.exp(sink - top)
    mixed = (mixed * share[..., None]).sum(axis=2)
    return jnp.where(whole[..., None] > 0, mixed / jnp.maximum(whole, 1e-30)[..., None], 0)


def span_of_row(
    q_ref: Any,
    table_ref: Any,
    position_ref: Any,
    key_ref: Any,
    value_ref: Any,
    *rest: Any,
    page: int,
    block: int,
    span: int,
    scale: float,
    soft_cap: float | None,
    quantized: bool,
) -> None:
    """One span of one row for one key/value head: its weighted values' sum, its largest logit, its weights' sum."""
    key_scale_ref, value_scale_ref = rest[:2] if quantized else (None, None)
    mixed_ref, largest_ref, total_ref = rest[-3:]
    rows, size = q_ref.shape
    q = q_ref[...]
    position = position_ref[0]
    first = pl.program_id(2) * span
    last = jnp.minimum(first + span, (position + block) // block)

    def read(tile: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        mixed, largest, total = carry
        places = tile * block + jnp.arange(block)
        number = table_ref[tile * block // page]  # a tile lies in one page
        lines = number * page + places % page
        keys = key_ref[lines, :].astype(q.dtype)
        logits = triton.dot(q, keys, trans_b=True) * scale
        if quantized:
            logits = logits * key_scale_ref[lines][None, :]
        if soft_cap is not None:
            logits = soft_cap * jnp.tanh(logits / soft_cap)
        seen = places <= position
        logits = jnp.where(seen[None, :], logits, HIDDEN)
        above = jnp.maximum(largest, logits.max(axis=1))
        weights = jnp.where(seen[None, :], jnp.exp(logits - above[:, None]), 0)
        shrunk = jnp.exp(largest - above)
        total = total * shrunk + weights.sum(axis=1)
        values = value_ref[lines, :].astype(q.dtype)
        if quantized:
            weights = weights * value_scale_ref[lines][None, :]
        mixed = mixed * shrunk[:, None] + triton.dot(weights.astype(q.dtype), values)
        return mixed, above, total

    empty = (
        jnp.zeros((rows, size), jnp.float32),
        jnp.full((rows,), HIDDEN, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
    )
    mixed_ref[...], largest_ref[...], total_ref[...] = jax.lax.fori_loop(first, last, read, empty)
