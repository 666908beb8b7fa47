"""What a layer keeps of the tokens before, so that a new token runs alone.

A mixer that is called with its cache (`LayerInputs.cache`) reads it, and reports it extended as
"cache". Position -1 is no token: such queries are padding, and such places are empty. There are
three kinds of cache:

- pages, for what grows with the sequence: {"pages": {name: [P, page, ...]}}, a pool that all
  sequences of the batch share. `LayerInputs.table` [B, C] lists each row's pages in order, so the
  token at position p is in page table[p // page] at p % page; with segments, it lists those of each
  segment, from 1 on. Where row b's only page is page b (`aligned`), the pool is read as it is, else
  copied.
- rings, for windows and chunks: {name: [B, T, ...], "position": [B, T]}. The token at position p is
  at place p mod T, with its position beside it, so a window needs no more places than it sees.
- states of a fixed size, the mixer's own affair.

Shapes: B batch, S new tokens, T places, P pages, and what one token has.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from maxtext.kernels.attention import AttentionMask
from maxtext.kernels.weight_only import dequantize, quantize
from maxtext.layers.inputs import Cache, LayerInputs
from maxtext.sharding import constrain

POSITION, PAGES, SCALE = "position", "pages", "_scale"
Arrays = dict[str, jax.Array]


@dataclass(frozen=True)
class CacheSize:
    """How much there is to be kept, and as what."""

    slots: int  # sequences at a time
    length: int  # of a sequence, at most
    dtype: Any
    page: int = 0  # tokens of a page; 0: `length`, a page a slot
    pages: int = 0  # of the pool; 0: enough for all slots
    quantized: Any = None  # integers of this dtype with a scale for what one token has
    scale_by_head: bool = False  # a scale for each head of a token


def kept(mask: AttentionMask, size: CacheSize, **sizes: tuple[int, ...]) -> Cache:
    """An empty cache for named arrays, of which one token has so much, and a query sees so many
    tokens at most.
    """
    places = min(size.length, mask.window or size.length, mask.chunk or size.length)
    if places < size.length:
        return arrays(size.slots, places, size, sizes) | {
            POSITION: jnp.full((size.slots, places), -1, jnp.int32)
        }
    page = size.page or size.length
    return {PAGES: arrays(size.pages or size.slots * -(-size.length // page), page, size, sizes)}


def arrays(batch: int, places: int, size: CacheSize, sizes: dict[str, tuple[int, ...]]) -> Arrays:
    made = {}
    for name, each in sizes.items():
        made[name] = laid_out(name, jnp.zeros((batch, places, *each), size.quantized or size.dtype))
        if size.quantized is not None:
            by_head = each[:-1] if size.scale_by_head else ()
            made[name + SCALE] = laid_out(
                name + SCALE, jnp.zeros((batch, places, *by_head), jnp.float32)
            )
    return made


def extended(inputs: LayerInputs, new: Arrays) -> tuple[Arrays, Cache]:
    """What the queries of new tokens may look at, with its positions, and the cache with the new
    tokens in it.

    The tokens of a `fresh` row, which has nothing before them, look at each other alone.
    """
    assert inputs.cache is not None
    store = inputs.cache.get(PAGES, inputs.cache)
    if inputs.segments is not None:
        # Hidden or not, what is not a number would be one more term in the sums of all that share
        # the row. `marked` tells whose it was.
        new = {name: jnp.where(jnp.isfinite(x), x, 0) for name, x in new.items()}
    stored, new = through_store(store, new)
    if PAGES in inputs.cache:
        seen, after = in_pages(inputs, store, stored)
    else:
        seen, after = in_ring(inputs, store, stored)
    if inputs.fresh:
        return new | {POSITION: inputs.positions}, after
    return {name: read(seen, name, new[name].dtype) for name in new} | {
        POSITION: seen[POSITION]
    }, after


def marked(mixed: jax.Array, inputs: LayerInputs, new: Arrays) -> jax.Array:
    """What attention gave [B, S, ...], no number where a token of a shared row had keys or values
    that are none.
    """
    if inputs.cache is None or inputs.segments is None:
        return mixed
    tokens = mixed.shape[:2]
    whole = [jnp.isfinite(x).reshape(*tokens, -1).all(axis=-1) for x in new.values()]
    return jnp.where(
        jnp.all(jnp.stack(whole), axis=0).reshape(*tokens, *[1] * (mixed.ndim - 2)), mixed, jnp.nan
    )


def through_store(store: Arrays, new: Arrays) -> tuple[Arrays, Arrays]:
    """New tokens as the cache holds them, and as they will be read: the same whether they are read
    now or later, so that what a token sees does not depend on how its sequence was cut."""
    stored, seen = {}, {}
    for name, x in new.items():
        if name + SCALE in store:
            scale_rank = store[name + SCALE].ndim
            values, scale = quantize(x, tuple(range(scale_rank, x.ndim)), store[name].dtype)
            stored[name], stored[name + SCALE] = values, scale.reshape(scale.shape[:scale_rank])
        else:
            stored[name] = x.astype(store[name].dtype)
        seen[name] = read(stored, name, x.dtype)
    return stored, seen


def read(store: Arrays, name: str, dtype: Any) -> jax.Array:
    x = store[name]
    if name + SCALE not in store:
        return x.astype(dtype)
    scale = store[name + SCALE]
    return dequantize(x, scale.reshape(*scale.shape, *[1] * (x.ndim - scale.ndim)), dtype)


def write(inputs: LayerInputs, pool: Arrays, new: Arrays) -> Arrays:
    assert inputs.table is not None
    pages, page = next(iter(pool.values())).shape[:2]
    column = jnp.maximum(inputs.positions, 0) // page
    if inputs.segments is None:
        number = jnp.take_along_axis(inputs.table, column, axis=1)
    else:  # several sequences in a row
        number = inputs.table[jnp.maximum(inputs.segments - 1, 0), column]
    number = jnp.where(inputs.positions >= 0, number, pages)  # out of bounds: not written
    place = inputs.positions % page
    return {
        name: laid_out(name, pool[name].at[number, place].set(x, mode="drop"))
        for name, x in new.items()
    }


def in_pages(inputs: LayerInputs, pool: Arrays, new: Arrays) -> tuple[Arrays, Cache]:
    assert inputs.table is not None
    positions, table, page = inputs.positions, inputs.table, next(iter(pool.values())).shape[1]
    written = write(inputs, pool, new)
    if inputs.fresh:
        return new, {PAGES: written}
    batch, reach = positions.shape[0], inputs.reach or table.shape[1] * page
    if inputs.aligned:
        seen = {name: x[:, :reach] for name, x in written.items()}
    else:
        columns = table[:, : -(-reach // page)]
        seen = {name: x[columns].reshape(batch, -1, *x.shape[2:]) for name, x in written.items()}
    # What lies beyond a row's last token is nobody's or another's: a causal query does not see it.
    places = next(iter(seen.values())).shape[1]
    seen[POSITION] = jnp.broadcast_to(jnp.arange(places, dtype=jnp.int32), (batch, places))
    return seen, {PAGES: written}


def in_ring(inputs: LayerInputs, ring: Arrays, new: Arrays) -> tuple[Arrays, Cache]:
    """A single token is written first and looks at the ring itself, which costs no copy; it takes
    the place of the one that just left the window. Several look at the ring as it was and at each
    other."""
    positions = inputs.positions
    places = ring[POSITION].shape[1]
    # Of more tokens than places, the last are kept; out of bounds means not written.
    last = (positions >= 0) & (positions > positions.max(axis=1, keepdims=True) - places)
    place = jnp.where(last, positions % places, places)
    rows = jnp.arange(positions.shape[0])[:, None]
    new = new | {POSITION: positions}
    written = {
        name: laid_out(name, ring[name].at[rows, place].set(x, mode="drop"))
        for name, x in new.items()
    }
    if inputs.fresh:
        # Nothing of a sequence that had these rows before may be left.
        unseen = ~jnp.zeros((positions.shape[0], places), bool).at[rows, place].set(
            True, mode="drop"
        )
        written[POSITION] = jnp.where(unseen, -1, written[POSITION])
        return new, written
    if positions.shape[1] == 1:
        return written, written
    return {name: jnp.concatenate([ring[name], new[name]], axis=1) for name in new}, written


def laid_out(name: str, array: jax.Array) -> jax.Array:
    """[B, T], [B, T, D] of what all heads share, [B, T, K, D]; scales have no D."""
    each: tuple[str | None, ...] = ("cache_heads", "cache_kv")
    if array.ndim < 4 and not name.endswith(SCALE):
        each = ("cache_kv",)
    return constrain(array, "cache_batch", "cache_sequence", *each[: array.ndim - 2])


def sight(mask: AttentionMask, inputs: LayerInputs, seen: Arrays) -> dict[str, Any]:
    """Who sees whom, as attention is told: by the order of the row, or by positions where a cache
    holds the keys.
    """
    if inputs.cache is not None and not inputs.fresh:
        return {
            "mask": mask,
            "q_positions": inputs.positions,
            "k_positions": seen[POSITION],
            "q_segments": (inputs.positions >= 0).astype(jnp.int32),
            "k_segments": (seen[POSITION] >= 0).astype(jnp.int32),
        }
    # Windows may be measured in the row; chunks start anew with each document.
    by_chunk = inputs.positions if mask.chunk else None
    return {
        "mask": replace(mask, order=inputs.order),
        "q_positions": by_chunk,
        "k_positions": by_chunk,
        "q_segments": inputs.segments,
        "k_segments": inputs.segments,
        "max_segments": inputs.max_segments,
    }


def backend_of(backend: str, inputs: LayerInputs) -> str:
    """Keys in a cache lie in any order, which only one back end takes."""
    return backend if inputs.cache is None or inputs.fresh else "dot_product"
