"""KV caches: what a layer stores of earlier tokens, so that a decode step runs the new token alone.

A sublayer that is called with its cache (`LayerInputs.cache`) calls `update` with the keys and
values of the new tokens, attends to the view that it gets back, and reports the new cache as
"cache". Position -1 is padding: such queries are ignored, and such cache entries are empty.

- `PagedKVCache`, for full attention: name -> [P, block_size, ...], a pool of blocks that all
  sequences of the batch share. `LayerInputs.block_table` [B, C] lists the blocks of each row in
  order, so the token at position p is in block_table[p // block_size] at offset p % block_size. In
  rows that hold several sequences (segments), row s - 1 of the table is that of segment s.
- `SlidingWindowKVCache`, for windows and chunks: name -> [B, W, ...], a ring buffer. The token at
  position p is at p mod W, and `position` [B, W] says which position an entry has. If tokens may be
  rejected, W is the window and their number, so that they replace no token that is still visible.
- `RecurrentState`, of a fixed size: name -> [B, ...], updated by the sublayer itself.

Quantized caches also have an array name + "_scale" for each name. Shapes: B batch, S new tokens,
T keys that a view holds, W window, P blocks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from maxtext.common.types import Tree
from maxtext.kernels.attention import AUTOSELECTED, AttentionMask
from maxtext.kernels.weight_only import dequantize, quantize
from maxtext.layers.context import REFERENCE, BuildContext
from maxtext.layers.inputs import Aux, LayerInputs
from maxtext.sharding import constrain
from maxtext.sharding.manual import current

SCALE = "_scale"
Arrays = dict[str, jax.Array]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class CacheConfig:
    """The capacity and the dtype of the caches of a model."""

    slots: int  # sequences at a time
    length: int  # tokens of a sequence, at most
    dtype: DTypeLike
    block_size: int | None = None  # tokens; None: `length`, one block for each slot
    num_blocks: int | None = None  # of all slots together; None: enough for each
    quantized: DTypeLike | None = None  # int8, int4 or e4m3, with a scale for each token
    scale_by_head: bool = False  # a scale for each head of each token
    num_drafts: int = 0  # newest tokens that may be rejected, so that others replace them
    context: BuildContext = REFERENCE

    @property
    def tokens_per_block(self) -> int:
        return self.length if self.block_size is None else self.block_size

    @property
    def total_blocks(self) -> int:
        if self.num_blocks is not None:
            return self.num_blocks
        return self.slots * -(-self.length // self.tokens_per_block)


@dataclass(frozen=True)
class KVView:
    """The keys and values that the queries of a step attend to."""

    arrays: Arrays  # name -> [B, T, ...]
    positions: jax.Array | None = None  # [B, T]; None: the row's own tokens, in their order

    def __getitem__(self, name: str) -> jax.Array:
        return self.arrays[name]

    def backend(self, backend: str, q_length: int) -> str:
        """The back end for `q_length` queries a row."""
        return backend if self.positions is None else view_backend(backend, q_length)

    def mask_inputs(self, mask: AttentionMask, inputs: LayerInputs) -> dict[str, Tree]:
        """The fields of `AttentionInputs` that say which keys a query attends to."""
        if self.positions is not None:
            return {
                "mask": mask,
                "q_positions": inputs.positions,
                "k_positions": self.positions,
                "q_segments": (inputs.positions >= 0).astype(jnp.int32),
                "k_segments": (self.positions >= 0).astype(jnp.int32),
            }
        # Windows may be measured in the row; chunks restart with each document.
        positions = inputs.positions if mask.chunk else None
        return {
            "mask": replace(mask, order=inputs.order),
            "q_positions": positions,
            "k_positions": positions,
            "q_segments": inputs.segments,
            "k_segments": inputs.segments,
            "max_segments": inputs.max_segments,
        }


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedKVCache:
    blocks: Arrays  # name -> [P, block_size, ...]
    # Whether decode steps read the blocks in place, by the kernel for paged attention.
    in_place: bool = field(default=False, metadata={"static": True})

    @classmethod
    def empty(cls, cache_config: CacheConfig, shapes: Shapes, in_place: bool = False):
        blocks = empty_arrays(
            cache_config.total_blocks, cache_config.tokens_per_block, cache_config, shapes
        )
        return cls(blocks, in_place)

    @property
    def block_size(self) -> int:
        return next(iter(self.blocks.values())).shape[1]

    def rows(self, slots: jax.Array) -> "PagedKVCache":
        """The cache of some slots: all share the blocks."""
        return self

    def set_rows(self, slots: jax.Array, rows: "PagedKVCache") -> "PagedKVCache":
        return rows

    def update(self, new: Arrays, inputs: LayerInputs) -> "tuple[KVView, PagedKVCache]":
        stored, seen = round_trip(self.blocks, new)
        blocks = self.write(stored, inputs)
        cache = replace(self, blocks=blocks)
        if inputs.is_first_chunk:
            return KVView(seen), cache
        assert inputs.block_table is not None
        batch = inputs.positions.shape[0]
        kv_len = inputs.max_kv_len or inputs.block_table.shape[1] * self.block_size
        if inputs.contiguous:
            stored = {name: x[:, :kv_len] for name, x in blocks.items()}
        else:
            columns = inputs.block_table[:, : -(-kv_len // self.block_size)]
            stored = {name: read_blocks(x, columns, kv_len) for name, x in blocks.items()}
        # Entries beyond a row's last token belong to nobody or to another row: the causal mask
        # hides them.
        length = next(iter(stored.values())).shape[1]
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
        return KVView(load_all(stored, new), positions), cache

    def write(self, stored: Arrays, inputs: LayerInputs) -> Arrays:
        """The blocks with new tokens [B, S, ...] at their positions."""
        assert inputs.block_table is not None
        num_blocks, block_size = next(iter(self.blocks.values())).shape[:2]
        column = jnp.maximum(inputs.positions, 0) // block_size
        if inputs.segments is None:
            block = jnp.take_along_axis(inputs.block_table, column, axis=1)
        else:
            block = inputs.block_table[jnp.maximum(inputs.segments - 1, 0), column]
        block = jnp.where(inputs.positions >= 0, block, num_blocks)  # out of bounds: not written
        offset = inputs.positions % block_size
        return {
            name: constrain_cache(name, self.blocks[name].at[block, offset].set(x, mode="drop"))
            for name, x in stored.items()
        }


def read_blocks(blocks: jax.Array, columns: jax.Array, kv_len: int) -> jax.Array:
    """The blocks [P, block_size, ...] that are in columns [B, C], as [B, T, ...]; of a block that
    is longer than `kv_len`, that many tokens alone are read."""
    if kv_len >= blocks.shape[1]:
        return blocks[columns].reshape(columns.shape[0], -1, *blocks.shape[2:])
    starts = (0,) * (blocks.ndim - 1)
    sizes = (1, kv_len, *blocks.shape[2:])
    return jax.vmap(lambda i: jax.lax.dynamic_slice(blocks, (i, *starts), sizes)[0])(columns[:, 0])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlidingWindowKVCache:
    arrays: Arrays  # name -> [B, W, ...]
    position: jax.Array  # [B, W], -1: empty
    # Whether decode steps read and write the arrays in place, by the kernel for paged attention.
    in_place: bool = field(default=False, metadata={"static": True})

    @classmethod
    def empty(
        cls, cache_config: CacheConfig, shapes: Shapes, window: int, in_place: bool = False
    ) -> "SlidingWindowKVCache":
        arrays = empty_arrays(cache_config.slots, window, cache_config, shapes)
        position = jnp.full((cache_config.slots, window), -1, jnp.int32)
        return cls(arrays, position, in_place)

    def with_token(self, arrays: Arrays, positions: jax.Array) -> "SlidingWindowKVCache":
        """The cache with `arrays` into which a token at positions [B] was written."""
        row, size = jnp.arange(positions.shape[0]), self.position.shape[1]
        index = jnp.where(positions >= 0, positions % size, size)  # out of bounds: not written
        position = self.position.at[row, index].set(positions, mode="drop")
        return replace(self, arrays=arrays, position=constrain_cache("position", position))

    def rows(self, slots: jax.Array) -> "SlidingWindowKVCache":
        return jax.tree.map(lambda x: x[slots], self)

    def set_rows(self, slots: jax.Array, rows: "SlidingWindowKVCache") -> "SlidingWindowKVCache":
        return jax.tree.map(lambda x, y: x.at[slots].set(y, mode="drop"), self, rows)

    def update(self, new: Arrays, inputs: LayerInputs) -> "tuple[KVView, SlidingWindowKVCache]":
        """A single token is written first and attends to the ring buffer itself, without a copy: it
        replaces the token that just left the window. Several tokens attend to the buffer as it was
        and to each other."""
        positions, window = inputs.positions, self.position.shape[1]
        stored, seen = round_trip(self.arrays, new)
        # If there are more tokens than the window holds, the last are stored: indices out of
        # bounds are not written.
        is_last = (positions >= 0) & (positions > positions.max(axis=1, keepdims=True) - window)
        index = jnp.where(is_last, positions % window, window)
        row = jnp.arange(positions.shape[0])[:, None]

        def write(old: jax.Array, value: jax.Array) -> jax.Array:
            return old.at[row, index].set(value, mode="drop")

        cache = replace(
            self,
            arrays={n: constrain_cache(n, write(self.arrays[n], x)) for n, x in stored.items()},
            position=constrain_cache("position", write(self.position, positions)),
        )
        if inputs.is_first_chunk:
            # Nothing of a sequence that had these rows before may stay visible.
            written = write(jnp.zeros(self.position.shape, bool), jnp.ones(positions.shape, bool))
            return KVView(seen), replace(cache, position=jnp.where(written, cache.position, -1))
        if positions.shape[1] == 1:
            return KVView(load_all(cache.arrays, new), cache.position), cache
        both = {n: jnp.concatenate([self.arrays[n], stored[n]], axis=1) for n in stored}
        # Tokens that the new ones replace were rejected.
        earlier = jnp.where(self.position < positions[:, :1], self.position, -1)
        view_positions = jnp.concatenate([earlier, positions], axis=1)
        return KVView(load_all(both, new), view_positions), cache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RecentTokens:
    """The latest tokens of each row, of which the last may be rejected: a recurrent state cannot
    drop a token, so these are added to it once they are accepted."""

    arrays: Arrays  # name -> [B, C, ...], of which the state after a token is computed
    first: jax.Array  # [B], the position of the first of them
    count: jax.Array  # [B]

    @staticmethod
    def empty(arrays: Arrays) -> "RecentTokens":
        zeros = jnp.zeros(len(next(iter(arrays.values()))), jnp.int32)
        return RecentTokens(arrays, zeros, zeros)

    @property
    def columns(self) -> jax.Array:
        return jnp.arange(next(iter(self.arrays.values())).shape[1])

    def accepted(self, positions: jax.Array) -> jax.Array:
        """[B, C]: 1 for tokens before the new ones, which have these positions [B, S]. A new token
        replaces those from its position on."""
        is_before = self.first[:, None] + self.columns < positions[:, :1]
        return ((self.columns < self.count[:, None]) & is_before).astype(jnp.int32)

    def replaced(self, arrays: Arrays, positions: jax.Array) -> "RecentTokens":
        """With new tokens in the rows that have some: `arrays` are [B, S, ...], S <= C."""
        is_new = positions[:, 0] >= 0

        def write(old: jax.Array, new: jax.Array) -> jax.Array:
            written = old.at[:, : positions.shape[1]].set(new.astype(old.dtype))
            return jnp.where(is_new.reshape(-1, *[1] * (old.ndim - 1)), written, old)

        return RecentTokens(
            {name: write(old, arrays[name]) for name, old in self.arrays.items()},
            first=jnp.where(is_new, positions[:, 0], self.first),
            count=jnp.where(is_new, (positions >= 0).sum(axis=1), self.count),
        )

    def cleared(self, positions: jax.Array) -> "RecentTokens":
        """Without those of the rows that have new tokens."""
        return replace(self, count=jnp.where(positions[:, 0] >= 0, 0, self.count))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RecurrentState:
    arrays: Arrays  # name -> [B, ...]
    recent: RecentTokens | None = None  # the arrays are without these; None: none can be rejected

    def updated(
        self,
        before: Mapping[str, jax.Array],
        after: Mapping[str, jax.Array],
        tokens: Mapping[str, jax.Array],
        positions: jax.Array,
    ) -> "RecurrentState":
        """The states after new tokens at `positions` [B, S]. `before` them, {} is zeros; `tokens`
        are what `RecentTokens` holds of them, [B, S, ...]."""
        recent, states = self.recent, after
        if recent is not None and positions.shape[1] > len(recent.columns):
            recent = recent.cleared(positions)
        elif recent is not None:
            recent, states = recent.replaced(dict(tokens), positions), before
        arrays = {
            name: states[name].astype(old.dtype) if states else jnp.zeros_like(old)
            for name, old in self.arrays.items()
        }
        return RecurrentState(arrays, recent)

    def rows(self, slots: jax.Array) -> "RecurrentState":
        return jax.tree.map(lambda x: x[slots], self)

    def set_rows(self, slots: jax.Array, rows: "RecurrentState") -> "RecurrentState":
        return jax.tree.map(lambda x, y: x.at[slots].set(y, mode="drop"), self, rows)


KVCache = PagedKVCache | SlidingWindowKVCache


def view_backend(backend: str, q_length: int) -> str:
    """The back end for queries that attend to cached keys at any positions: cuDNN with a dense
    mask, where it supports that, or the reference."""
    has_mask = backend in (AUTOSELECTED, "cudnn_flash_jax") and current() is None
    return AUTOSELECTED if has_mask and q_length > 1 else "dot_product"


def empty_kv_cache(
    mask: AttentionMask, cache_config: CacheConfig, shapes: Shapes, in_place: bool = False
) -> KVCache:
    """An empty cache of named arrays; `shapes` are those of one token.

    A ring buffer if a query never attends to all `cache_config.length` tokens, else blocks."""
    size = ring_size(mask, cache_config.length)
    if size is not None:
        size += cache_config.num_drafts
        return SlidingWindowKVCache.empty(cache_config, shapes, size, in_place)
    return PagedKVCache.empty(cache_config, shapes, in_place)


def ring_size(mask: AttentionMask, length: int) -> int | None:
    """The most tokens that a query attends to; None if these are all of `length` tokens."""
    size = min(length, mask.window or length, mask.chunk or length)
    return size if size < length else None


def update_cache(new: Arrays, inputs: LayerInputs) -> tuple[KVView, Aux]:
    """The view of keys and values for the queries of new tokens, and the updated cache as aux.

    Without a cache, the view is the new tokens. The tokens of a first chunk attend to each other
    alone.
    """
    if inputs.cache is None:
        return KVView(new), {}
    if inputs.segments is not None:
        # Masked or not, a non-finite value would be a term in the sums of all sequences that share
        # the row. `mark_nonfinite` restores it in its own sequence.
        new = {name: jnp.where(jnp.isfinite(x), x, 0) for name, x in new.items()}
    view, cache = inputs.cache.update(new, inputs)
    return view, {"cache": cache}


def mark_nonfinite(context: jax.Array, new: Arrays, inputs: LayerInputs) -> jax.Array:
    """Attention's output [B, S, ...], NaN for the tokens of a shared row whose keys or values are
    not finite.
    """
    if inputs.cache is None or inputs.segments is None:
        return context
    tokens = context.shape[:2]
    finite = [jnp.isfinite(x).reshape(*tokens, -1).all(axis=-1) for x in new.values()]
    is_finite = jnp.all(jnp.stack(finite), axis=0).reshape(*tokens, *[1] * (context.ndim - 2))
    return jnp.where(is_finite, context, jnp.nan)


def empty_arrays(batch: int, length: int, cache_config: CacheConfig, shapes: Shapes) -> Arrays:
    arrays = {}
    for name, shape in shapes.items():
        zeros = jnp.zeros((batch, length, *shape), cache_config.quantized or cache_config.dtype)
        arrays[name] = constrain_cache(name, zeros)
        if cache_config.quantized is not None:
            heads = shape[:-1] if cache_config.scale_by_head else ()
            scale = jnp.zeros((batch, length, *heads), jnp.float32)
            arrays[name + SCALE] = constrain_cache(name + SCALE, scale)
    return arrays


def round_trip(store: Arrays, new: Arrays) -> tuple[Arrays, Arrays]:
    """New tokens in the dtype of the cache, and as they are read from it: the same whether they are
    attended to now or later, so that a token does not depend on how its sequence was chunked."""
    stored, seen = {}, {}
    for name, x in new.items():
        if name + SCALE in store:
            scale_ndim = store[name + SCALE].ndim
            qvalue, scale = quantize(x, tuple(range(scale_ndim, x.ndim)), store[name].dtype)
            stored[name], stored[name + SCALE] = qvalue, scale.reshape(scale.shape[:scale_ndim])
        else:
            stored[name] = x.astype(store[name].dtype)
        seen[name] = load(stored, name, x.dtype)
    return stored, seen


def load(store: Arrays, name: str, dtype: DTypeLike) -> jax.Array:
    x = store[name]
    if name + SCALE not in store:
        return x.astype(dtype)
    scale = store[name + SCALE]
    return dequantize(x, scale.reshape(*scale.shape, *[1] * (x.ndim - scale.ndim)), dtype)


def load_all(store: Arrays, new: Arrays) -> Arrays:
    return {name: load(store, name, x.dtype) for name, x in new.items()}


def constrain_cache(name: str, array: jax.Array) -> jax.Array:
    """[B, T], [B, T, D] of what all heads share, [B, T, K, D]; scales have no D."""
    axes: tuple[str | None, ...] = ("cache_heads", "cache_kv")
    if array.ndim < 4 and not name.endswith(SCALE):
        axes = ("cache_kv",)
    return constrain(array, "cache_batch", "cache_sequence", *axes[: array.ndim - 2])
