"""Attention of one new token a row over a cache of pages, read where it lies and only as far as a row is filled.

A Pallas kernel for NVIDIA GPUs, by Triton. The keys of a row are cut into `splits` spans, each read by a program of its
own for each key/value head, so that one long row keeps the whole chip busy; a last small sum joins the spans. The
program whose span has the place of the new token writes it there; nobody reads it there, since all have it at hand.

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

LEAST_ROWS = 16  # of a product on tensor cores, either way: fewer query heads are filled up
PROGRAMS = 528  # that keep a chip busy, four for each multiprocessor of an H100 or H200; more spans cost more joining
LEAST_SPLITS = 2  # rows of different lengths are done at about the same time
BLOCK = 64  # tokens that a program reads at a time
STAGES = 4  # tiles on their way, at most
AT_ONCE = 4096  # numbers of spans that are joined
SHARED_BYTES = 96 * 1024  # for all of them, which every such GPU has


def supports(head_size: int, page: int, dtype: str, platform: str, capability: str = "9.0") -> str | None:
    """None, or a reason in words."""
    if platform != "gpu":
        return f"it is a kernel for NVIDIA GPUs, and this is a {platform.upper()}"
    if not is_recent_nvidia(capability):
        return f"it needs an NVIDIA GPU of compute capability 8.0 or newer, not {capability}"
    if tile_bytes(LEAST_ROWS, head_size, dtype) > SHARED_BYTES:
        return f"heads of {head_size} numbers are too large for a GPU's shared memory"
    if dtype == "int4":
        return "it does not read int4, two numbers of which are in a byte"
    if head_size < LEAST_ROWS or head_size & (head_size - 1):
        return f"heads of {head_size} numbers are not a power of two of at least {LEAST_ROWS}"
    if page % LEAST_ROWS:
        return f"pages of {page} tokens cannot be cut into tiles: use a multiple of {LEAST_ROWS}"
    return None


def attend(
    q: Array,
    new: dict[str, Array],
    pool: dict[str, Array],
    table: Array,
    positions: Array,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: Array | None = None,
    block: int = BLOCK,
    splits: int | None = None,
    interpret: bool = False,
) -> tuple[Array, dict[str, Array]]:
    """[B, H, D], and the pool with the new tokens in it.

    q [B, H, D]; `new`: "key" and "value" [B, K, D] as the pool has them, which is [P, page, K, D]; integers with
    "key_scale" and "value_scale", [B] or [B, K]; table [B, C]; positions [B], of the new tokens; -1: an idle row,
    which yields 0. `block`: tokens that a program reads at a time, or as many as divide a page.
    """
    batch, heads, size = q.shape
    pages, page, groups, _ = pool["key"].shape
    group = heads // groups
    rows = max(LEAST_ROWS, pl.next_power_of_2(group))
    block = math.gcd(max(pl.next_power_of_2(block), LEAST_ROWS), page)
    while block > LEAST_ROWS and tile_bytes(block, size, pool["key"].dtype) > SHARED_BYTES // 2:
        block //= 2
    stages = max(1, min(STAGES, SHARED_BYTES // tile_bytes(block, size, pool["key"].dtype)))
    tiles = table.shape[1] * page // block
    splits = splits or min(tiles, max(LEAST_SPLITS, pl.cdiv(PROGRAMS, batch * groups)))
    lines = {name: array.reshape(pages * page, *array.shape[2:]) for name, array in pool.items()}

    def by_head(first: int | None, array: Array, index: Any) -> pl.BlockSpec:
        """One head of what heads have each, all of what they share."""
        if array.ndim == 1:
            return pl.BlockSpec((first,), lambda b, k, s: (index(b),))
        rest = array.shape[2:]
        return pl.BlockSpec((first, None, *rest), lambda b, k, s: (index(b), k, *[0] * len(rest)))

    new_specs = [by_head(None, new[name], lambda b: b) for name in pool]
    pool_specs = [by_head(pages * page, lines[name], lambda b: 0) for name in pool]
    kernel = functools.partial(
        span_of_row, names=tuple(pool), group=group, rows=rows, page=page, block=block, splits=splits, scale=scale,
        soft_cap=soft_cap,
    )  # fmt: skip
    by_span = pl.BlockSpec((None, None, None, group), lambda b, k, s: (b, k, s, 0))
    mixed, largest, total, *written = pl.pallas_call(
        kernel,
        grid=(batch, groups, splits),
        in_specs=[
            pl.BlockSpec((None, None, group, size), lambda b, k, s: (b, k, 0, 0)),
            pl.BlockSpec((None, table.shape[1]), lambda b, k, s: (b, 0)),
            pl.BlockSpec((1,), lambda b, k, s: (b,)),
            *new_specs,
            *pool_specs,
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, group, size), lambda b, k, s: (b, k, s, 0, 0)),
            by_span,
            by_span,
            *pool_specs,
        ],
        out_shape=[
            jax.ShapeDtypeStruct((batch, groups, splits, group, size), jnp.float32),
            jax.ShapeDtypeStruct((batch, groups, splits, group), jnp.float32),
            jax.ShapeDtypeStruct((batch, groups, splits, group), jnp.float32),
            *(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in lines.values()),
        ],
        input_output_aliases={3 + len(pool) + number: 3 + number for number in range(len(pool))},
        interpret=interpret,
        name="attention_over_pages",
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=stages),
    )(q.reshape(batch, groups, group, size), table, positions, *(new[name] for name in pool), *lines.values())
    whole = joined(mixed, largest, total, sinks, q.dtype, interpret)
    after = {name: array.reshape(pool[name].shape) for name, array in zip(pool, written, strict=True)}
    return whole.reshape(q.shape), after


def tile_bytes(block: int, head_size: int, dtype: Any) -> int:
    """Of keys and values."""
    return 2 * block * head_size * max(jnp.dtype(dtype).itemsize, 1)


def is_recent_nvidia(capability: str) -> bool:
    """AMD's are called gfx…"""
    return capability.replace(".", "").isdigit() and float(capability) >= 8


def joined(mixed: Array, largest: Array, total: Array, sinks: Array | None, dtype: Any, interpret: bool) -> Array:
    """Spans [B, K, splits, G, D] as one, [B, K, G, D] of `dtype`."""
    batch, groups, splits, group, size = mixed.shape
    by_span = pl.BlockSpec((None, None, splits, None), lambda b, k, g: (b, k, 0, g))
    by_head = pl.BlockSpec((1,), lambda b, k, g: (k * group + g,))
    return pl.pallas_call(
        functools.partial(spans_of_head, splits=splits),
        grid=(batch, groups, group),
        in_specs=[
            pl.BlockSpec((None, None, splits, None, size), lambda b, k, g: (b, k, 0, g, 0)),
            by_span,
            by_span,
            *([] if sinks is None else [by_head]),
        ],
        out_specs=pl.BlockSpec((None, None, None, size), lambda b, k, g: (b, k, g, 0)),
        out_shape=jax.ShapeDtypeStruct((batch, groups, group, size), dtype),
        interpret=interpret,
        name="spans_of_attention",
        compiler_params=triton.CompilerParams(num_warps=2, num_stages=1),
    )(mixed, largest, total, *([] if sinks is None else [sinks.astype(jnp.float32)]))


def spans_of_head(mixed_ref: Any, largest_ref: Any, total_ref: Any, *refs: Any, splits: int) -> None:
    *sinks, out_ref = refs
    size = mixed_ref.shape[1]
    many = min(pl.next_power_of_2(splits), max(1, AT_ONCE // size))

    def add(step: Any, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        sums, top, whole = carry
        number = step * many + jnp.arange(many)
        at, known = jnp.minimum(number, splits - 1), number < splits
        above = jnp.maximum(top, jnp.max(largest_ref[at]))
        share = jnp.where(known, jnp.exp(largest_ref[at] - above), 0)
        shrunk = jnp.exp(top - above)
        sums = sums * shrunk + (mixed_ref[at, :] * share[:, None]).sum(axis=0)
        return sums, above, whole * shrunk + (total_ref[at] * share).sum()

    carry = jnp.zeros((size,), jnp.float32), jnp.float32(HIDDEN), jnp.float32(0)
    if sinks:
        carry = carry[0], jnp.max(sinks[0][...]), jnp.float32(1)
    if many >= splits:
        sums, _, whole = add(0, carry)
    else:
        sums, _, whole = jax.lax.fori_loop(0, pl.cdiv(splits, many), add, carry)
    out_ref[...] = jnp.where(whole > 0, sums / jnp.maximum(whole, 1e-30), 0).astype(out_ref.dtype)


def parts(x: Array, cos: Array, sin: Array, heads: tuple[int, int], interpret: bool = False) -> list[Array]:
    """Queries [B, H, D], keys and values [B, K, D] from x [B, (H + 2 K) D], the first two turned: each half of a head
    with the other, by cos and sin [B, D / 2]. In one program, where compilers make three."""
    queries, groups = heads
    half = cos.shape[1]

    def run(x_ref: Any, cos_ref: Any, sin_ref: Any, *outs: Any) -> None:
        places = [pl.ds(place * half, half) for place in range(2)]
        halves = [x_ref[at].astype(jnp.float32) for at in places]
        store_head(outs, heads, pl.program_id(1), places, halves, cos_ref[...], sin_ref[...])

    counts = (queries, groups, groups)
    angles = pl.BlockSpec((None, half), lambda b, h: (b, 0))
    return pl.pallas_call(
        run,
        grid=(len(x), queries + 2 * groups),
        in_specs=[pl.BlockSpec((None, 2 * half), lambda b, h: (b, h)), angles, angles],
        out_specs=[pl.BlockSpec((None, count, 2 * half), lambda b, h: (b, 0, 0)) for count in counts],
        out_shape=[jax.ShapeDtypeStruct((len(x), count, 2 * half), x.dtype) for count in counts],
        interpret=interpret,
        name="parts_of_attention",
        compiler_params=triton.CompilerParams(num_warps=1, num_stages=1),
    )(x, cos, sin)


def store_head(
    outs: Any, heads: tuple[int, int], head: Array, places: Any, halves: Any, cos: Array, sin: Array
) -> None:
    """In a kernel: the halves of one head, of H + 2 K, or the same places of both, as they belong in queries, keys and
    values; the first two turned."""
    (first, second), (queries, groups) = halves, heads
    turned = (first * cos - second * sin, second * cos + first * sin)
    begins = (0, queries, queries + groups, queries + 2 * groups)
    for out_ref, begin, end, pair in zip(outs, begins, begins[1:], (turned, turned, (first, second)), strict=False):

        @pl.when((head >= begin) & (head < end))
        def _(out_ref: Any = out_ref, begin: int = begin, pair: Any = pair) -> None:
            for at, values in zip(places, pair, strict=True):
                out_ref[head - begin, at] = values.astype(out_ref.dtype)


def span_of_row(
    q_ref: Any,
    table_ref: Any,
    position_ref: Any,
    *refs: Any,
    names: tuple[str, ...],
    group: int,
    rows: int,
    page: int,
    block: int,
    splits: int,
    scale: float,
    soft_cap: float | None,
) -> None:
    """One span of one row for one key/value head: its weighted values' sum, its largest logit, its weights' sum."""
    news, pools = (
        dict(zip(names, part, strict=True)) for part in (refs[: len(names)], refs[len(names) : -len(names) - 3])
    )
    mixed_ref, largest_ref, total_ref, *written = refs[-len(names) - 3 :]
    row = jnp.arange(rows)
    q = q_ref[jnp.minimum(row, group - 1), :]
    position = position_ref[0]
    span = pl.cdiv(position // block + 1, splits)  # in tiles, for this row
    first = pl.program_id(2) * span
    last = jnp.minimum(first + span, (position + block - 1) // block)  # what is before the new token
    mine = (position >= 0) & (position // block >= first) & (position // block < first + span)

    def bent(logits: Array) -> Array:
        return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)

    def scaled(x: Array, refs: dict[str, Any], name: str, at: Any) -> Array:
        """By the scale of each token, whose place is the last."""
        return x * refs[name + "_scale"][at] if name + "_scale" in refs else x

    def read(tile: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        mixed, largest, total = carry
        places = tile * block + jnp.arange(block)
        lines = table_ref[tile * block // page] * page + places % page  # a tile lies in one page
        logits = triton.dot(q, pools["key"][lines, :].astype(q.dtype), trans_b=True) * scale
        logits = bent(scaled(logits, pools, "key", lines))
        seen = places < position
        logits = jnp.where(seen[None, :], logits, HIDDEN)
        above = jnp.maximum(largest, logits.max(axis=1))
        weights = jnp.where(seen[None, :], jnp.exp(logits - above[:, None]), 0)
        shrunk = jnp.exp(largest - above)
        total = total * shrunk + weights.sum(axis=1)
        weights = scaled(weights, pools, "value", lines).astype(q.dtype)
        mixed = mixed * shrunk[:, None] + triton.dot(weights, pools["value"][lines, :].astype(q.dtype))
        return mixed, above, total

    one = {name: news[name][...] for name in ("key", "value")}
    at_hand = {name: each.astype(jnp.float32) for name, each in one.items()}
    logits = (q.astype(jnp.float32) * at_hand["key"][None, :]).sum(axis=1) * scale
    value = scaled(at_hand["value"], news, "value", ...)
    alone = (
        jnp.zeros((rows, 1), jnp.float32) + jnp.where(mine, value, 0)[None, :],
        jnp.where(mine, bent(scaled(logits, news, "key", ...)), HIDDEN),
        jnp.where(mine, jnp.ones((rows,), jnp.float32), 0),
    )
    mixed, largest, total = jax.lax.fori_loop(first, last, read, alone)
    known = row < group
    column = jnp.arange(q.shape[1])
    triton.store(mixed_ref.at[row[:, None], column[None, :]], mixed, mask=known[:, None] & (column >= 0)[None, :])
    triton.store(largest_ref.at[row], largest, mask=known)
    triton.store(total_ref.at[row], total, mask=known)
    place = jnp.maximum(position, 0)
    line = table_ref[place // page] * page + place % page
    for name, ref in zip(names, written, strict=True):
        new = news[name][...]
        triton.store(ref.at[line], new, mask=jnp.broadcast_to(mine, new.shape))
