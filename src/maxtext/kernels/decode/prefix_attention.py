"""Attention of rows of a decode step over the blocks that they share, such as those of one prompt.
A Pallas kernel for NVIDIA GPUs, lowered by Triton.

A program reads the shared blocks once for all rows of a group, where `paged_attention` would read
them once for each row. Its partial results are inputs of `paged_attention`, which adds the other
blocks of each row.

Shapes: B rows, H query heads, K key/value heads, G = H / K, D head_dim, N groups of up to
`GROUP_ROWS` rows, C columns of a block table.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from maxtext.common.trees import common_prefix_length
from maxtext.kernels.attention.dot_product import MASK_VALUE
from maxtext.kernels.decode.paged_tiles import (
    MIN_ROWS,
    SHARED_BYTES,
    Partial,
    add_tile,
    head_spec,
    store_rows,
    tile_bytes,
    tile_slots,
)

GROUP_ROWS = 8
ROWS_PER_GROUP = 4  # of a batch: groups beyond B / 4 are not used
TILE_SIZE = 64  # tokens that a program reads at a time, of several blocks if these are smaller
MAX_QUERY_ROWS = 64  # of a program, as registers and shared memory allow
MAX_TWO_WARP_ROWS = 32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrefixGroups:
    """Which rows of a batch share their first tokens."""

    rows: Any  # [N, GROUP_ROWS], indices of rows; B: none
    lengths: Any  # [N], tokens that the rows of a group share, a multiple of block_size
    row_lengths: Any  # [B], the length of the group of each row; 0: it is in none

    @classmethod
    def from_blocks(
        cls, blocks: Sequence[list[int]], rows: Sequence[int], num_rows: int, block_size: int
    ) -> "PrefixGroups":
        """Groups of sequences by the blocks that they begin with. `rows` has the row of each
        sequence in a batch of `num_rows`. A block of several sequences is full."""
        order = sorted(range(len(blocks)), key=lambda index: blocks[index])
        common = [common_prefix_length(blocks[a], blocks[b]) for a, b in itertools.pairwise(order)]
        groups = []
        start = 0
        while start < len(order):
            size, shared = first_group(common[start : start + GROUP_ROWS])
            if shared:
                members = order[start : start + size]
                groups.append((shared * (size - 1), shared, members))
            start += size
        groups.sort(key=lambda group: -group[0])
        count = max(1, num_rows // ROWS_PER_GROUP)
        indices = np.full((count, GROUP_ROWS), num_rows, np.int32)
        lengths = np.zeros(count, np.int32)
        row_lengths = np.zeros(num_rows, np.int32)
        for number, (_, shared, members) in enumerate(groups[:count]):
            columns = [rows[index] for index in members]
            indices[number, : len(columns)] = columns
            lengths[number] = row_lengths[columns] = shared * block_size
        return cls(indices, lengths, row_lengths)


def first_group(common: Sequence[int]) -> tuple[int, int]:
    """(size of the first group of sorted sequences, up to GROUP_ROWS; number of blocks that its
    members share).

    `common[i]` is the number of blocks that sequence i shares with sequence i + 1. Sequence i + 1
    joins the group if common[i] > 0 and 2 · common[i] >= max(blocks shared so far, common[i + 1]).
    """
    shared = 0
    for size, blocks in enumerate(common[: GROUP_ROWS - 1], start=1):
        following = common[size] if size < len(common) else 0
        if not blocks or 2 * blocks < max(shared, following):
            return size, shared
        shared = min(shared or blocks, blocks)
    return min(len(common) + 1, GROUP_ROWS), shared


def prefix_attention(
    q: Array,
    flat_pool: dict[str, Array],
    block_table: Array,
    groups: PrefixGroups,
    *,
    block_size: int,
    tile_size: int,
    stages: int,
    scale: float,
    soft_cap: float | None,
    interpret: bool,
) -> Partial:
    """The partial results [B + 1, K, G, D], [B + 1, K, G] and [B + 1, K, G] of the rows of groups
    over the tokens that they share. Those of other rows are undefined. See `paged_attention`."""
    batch, heads, head_dim = q.shape
    kv_heads = flat_pool["key"].shape[1]
    group_size = heads // kv_heads
    query_rows = max(MIN_ROWS, pl.next_power_of_2(GROUP_ROWS * group_size))
    if TILE_SIZE % block_size == 0:
        tile_size = max(tile_size, TILE_SIZE)
    stages = min(stages, SHARED_BYTES // tile_bytes(tile_size, head_dim, flat_pool["key"].dtype))
    outputs = (batch + 1) * heads
    pool_specs = [head_spec(len(array), array, lambda b: 0) for array in flat_pool.values()]

    def whole(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda n, k: (0,) * len(shape))

    context, largest, total = pl.pallas_call(
        functools.partial(
            attend_to_prefix,
            names=tuple(flat_pool),
            num_rows=batch,
            heads=heads,
            group_size=group_size,
            query_rows=query_rows,
            block_size=block_size,
            tile_size=tile_size,
            scale=scale,
            soft_cap=soft_cap,
        ),
        grid=(len(groups.rows), kv_heads),
        in_specs=[
            whole(batch * heads, head_dim),
            pl.BlockSpec((None, GROUP_ROWS), lambda n, k: (n, 0)),
            pl.BlockSpec((1,), lambda n, k: (n,)),
            pl.BlockSpec((None, block_table.shape[1]), lambda n, k: (n, 0)),
            *pool_specs,
        ],
        out_specs=[whole(outputs, head_dim), whole(outputs), whole(outputs)],
        out_shape=[
            jax.ShapeDtypeStruct((outputs, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((outputs,), jnp.float32),
            jax.ShapeDtypeStruct((outputs,), jnp.float32),
        ],
        interpret=interpret,
        name="prefix_attention",
        compiler_params=triton.CompilerParams(
            num_warps=2 if query_rows <= MAX_TWO_WARP_ROWS else 4,
            num_stages=max(1, stages - 1),  # the queries also take shared memory
        ),
    )(
        q.reshape(-1, head_dim),
        groups.rows,
        groups.lengths,
        block_table[jnp.minimum(groups.rows[:, 0], batch - 1)],
        *flat_pool.values(),
    )
    by_head = (batch + 1, kv_heads, group_size)
    return context.reshape(*by_head, head_dim), largest.reshape(by_head), total.reshape(by_head)


def attend_to_prefix(
    q_ref: Ref,
    rows_ref: Ref,
    length_ref: Ref,
    block_table_ref: Ref,
    *refs: Ref,
    names: tuple[str, ...],
    num_rows: int,
    heads: int,
    group_size: int,
    query_rows: int,
    block_size: int,
    tile_size: int,
    scale: float,
    soft_cap: float | None,
) -> None:
    """The shared tokens of one group for one key/value head."""
    pools = dict(zip(names, refs, strict=False))
    query = jnp.arange(query_rows)
    member = query // group_size
    row = rows_ref[jnp.minimum(member, GROUP_ROWS - 1)]
    row = jnp.where(member < GROUP_ROWS, row, num_rows)
    head = pl.program_id(1) * group_size + query % group_size
    q = q_ref[jnp.minimum(row, num_rows - 1) * heads + head, :]
    length = length_ref[0]

    def read(tile: Array, partial: Partial) -> Partial:
        slots = tile_slots(block_table_ref, tile, tile_size, block_size)
        visible = (
            None if tile_size <= block_size else tile * tile_size + jnp.arange(tile_size) < length
        )
        return add_tile(q, pools, slots, visible, partial, scale=scale, soft_cap=soft_cap)

    partial = (
        jnp.zeros(q.shape, jnp.float32),
        jnp.full((query_rows,), MASK_VALUE, jnp.float32),
        jnp.zeros((query_rows,), jnp.float32),
    )
    results = jax.lax.fori_loop(0, pl.cdiv(length, tile_size), read, partial)
    # Programs that have no rows would wait for each other's writes.
    for ref, values in zip(refs[len(names) :], results, strict=True):
        store_rows(ref, row * heads + head, values, row < num_rows)
