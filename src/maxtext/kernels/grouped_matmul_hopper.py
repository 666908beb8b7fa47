"""Grouped matmul on NVIDIA Hopper GPUs: forward, dx and dw. Pallas kernels, lowered by Mosaic GPU.

    grouped_matmul     y[n]  = x[n] w[g(n)],   or w[g(n)]ᵀ
    weight_gradient    dw[g] = Σ x[n]ᵀ dy[n] over the rows n of group g

Shapes: N rows, X groups, K contracted dimension, M columns, T tiles of rows.

The rows of a group are contiguous, and a group starts at any row, so a block of rows may belong to
several groups. It is multiplied once for each of them, and only the rows of that group are stored
(or, for dw, summed). The block and the group of a tile are read from a table (`TileTable`) that is
computed first, so the lookup costs the same with 8 groups and with 800.

The kernels are persistent: one program runs on each streaming multiprocessor and loops over tiles.
One warpgroup copies; two multiply, each its half of the columns. Operands are bfloat16; those of
`grouped_matmul` may be fp8.

Rows after the last group are not written: callers must not read them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from maxtext.common.types import Tree

COMPUTE_WARPGROUPS = 2
SWIZZLE_BYTES = 128
BLOCK_K = SWIZZLE_BYTES // 2  # 16-bit values that a step contracts
STORE_COLUMNS = 64  # columns that are stored at a time
MEMORY_REGISTERS = 40  # of the warpgroup that copies


class TileConfig(NamedTuple):
    """`rows` and `columns` of an output tile; `stages` of the copy pipeline; `snake_width`: the
    number of column blocks that are finished before the next ones start, for reuse in L2."""

    rows: int = 128
    columns: int = 256
    stages: int = 4
    snake_width: int = 16


# The fastest on an H200.
DEFAULT_TILES = TileConfig()
WEIGHT_GRADIENT_TILES = TileConfig(snake_width=4)


class TileTable(NamedTuple):
    """For each tile [T]: its group, its block of rows, its first row within that block, and its
    number of rows.
    """

    groups: Array
    blocks: Array
    first_rows: Array
    num_rows: Array


def make_tile_table(group_sizes: Array, num_rows: int, block: int) -> TileTable:
    """As many tiles as any group sizes may need, cdiv(num_rows, block) + X - 1; unused tiles come
    last and have no rows.
    """
    ends = jnp.cumsum(group_sizes)
    starts = ends - group_sizes
    first_blocks = starts // block
    num_blocks = jnp.where(group_sizes > 0, (ends - 1) // block - first_blocks + 1, 0)
    tile_ends = jnp.cumsum(num_blocks)
    tiles = jnp.arange(pl.cdiv(num_rows, block) + len(group_sizes) - 1, dtype=jnp.int32)
    groups = jnp.minimum(jnp.searchsorted(tile_ends, tiles, side="right"), len(group_sizes) - 1)
    blocks = jnp.minimum(
        first_blocks[groups] + tiles - (tile_ends - num_blocks)[groups],
        pl.cdiv(num_rows, block) - 1,
    )
    begin = jnp.maximum(starts[groups], blocks * block)
    end = jnp.minimum(ends[groups], (blocks + 1) * block)
    counts = jnp.where(tiles < tile_ends[-1], end - begin, 0)
    columns = (groups, blocks, begin - blocks * block, counts)
    return TileTable(*(column.astype(jnp.int32) for column in columns))


@functools.partial(
    jax.jit, static_argnames=("transposed", "tile", "dtype")
)  # traced once for all layers
def grouped_matmul(
    x: Array,
    weights: Array,
    group_sizes: Array,
    transposed: bool = False,
    tile: TileConfig = DEFAULT_TILES,
    dtype: DTypeLike | None = None,
) -> Array:
    """x [N, K] times weights [X, K, M], or [X, M, K] if `transposed` -> [N, M] in `dtype`, by
    default that of x. wgmma contracts fp8 along the last dimension of both operands only, so fp8
    weights must be transposed."""
    (num_rows, depth), num_columns = x.shape, weights.shape[1 if transposed else 2]
    block_k = SWIZZLE_BYTES // x.dtype.itemsize
    table = make_tile_table(group_sizes, num_rows, tile.rows)
    column_tiles, row_tiles = pl.cdiv(num_columns, tile.columns), len(table.groups)

    def body(
        groups: Ref,
        blocks: Ref,
        first_rows: Ref,
        counts: Ref,
        x_ref: Ref,
        weights_ref: Ref,
        out_ref: Ref,
    ) -> None:
        warpgroup, half = jax.lax.axis_index("wg"), tile.columns // COMPUTE_WARPGROUPS
        own_columns = pl.ds(warpgroup * half, half)

        def multiply(_: tuple[Array, ...], x_smem: Ref, weight_smem: Ref, accumulator: Any) -> Any:
            weight_half = (
                plgpu.transpose_ref(weight_smem.at[own_columns], (1, 0))
                if transposed
                else weight_smem.at[:, own_columns]
            )
            plgpu.wgmma(accumulator, x_smem, weight_half)
            plgpu.wgmma_wait(0)  # its operands may be overwritten from now on
            return accumulator

        def run_tile(index: Array, run: Callable) -> None:
            row, column = plgpu.planar_snake(index, (row_tiles, column_tiles), 1, tile.snake_width)
            block = blocks[row]

            def store(staging: Any, offset: int) -> None:
                columns = pl.ds(column * tile.columns + warpgroup * half + offset, STORE_COLUMNS)
                store_rows(
                    staging,
                    out_ref,
                    block * tile.rows,
                    columns,
                    first_rows[row],
                    counts[row],
                    tile.rows,
                )

            index_maps = (
                (lambda k: (block, k)),
                (lambda k: (column, k) if transposed else (k, column)),
            )
            operands = (x_ref, weights_ref.at[groups[row]])
            run(multiply, store, depth // block_k, index_maps, operands)

        block_shapes = (
            (tile.rows, block_k),
            (tile.columns, block_k) if transposed else (block_k, tile.columns),
        )
        run_tiles(
            run_tile,
            column_tiles * row_tiles,
            block_shapes,
            (x_ref, weights_ref.at[0]),
            tile,
            out.dtype,
        )

    out = jax.ShapeDtypeStruct((num_rows, num_columns), dtype or x.dtype)
    return persistent_kernel(body, out, "grouped_matmul")(*table, x, weights)


@functools.partial(jax.jit, static_argnames="tile")
def weight_gradient(
    x: Array, dy: Array, group_sizes: Array, tile: TileConfig = WEIGHT_GRADIENT_TILES
) -> Array:
    """dw [X, K, M]: for each group, the sum over its rows of x [N, K], transposed, times dy
    [N, M].
    """
    depth, num_columns = x.shape[1], dy.shape[1]
    row_tiles, column_tiles = pl.cdiv(depth, tile.rows), pl.cdiv(num_columns, tile.columns)
    ends = jnp.cumsum(group_sizes).astype(jnp.int32)
    starts = ends - group_sizes.astype(jnp.int32)
    first_steps = starts // BLOCK_K
    steps = jnp.where(group_sizes > 0, (ends + BLOCK_K - 1) // BLOCK_K - first_steps, 0)

    def body(
        starts: Ref,
        ends: Ref,
        first_steps: Ref,
        steps: Ref,
        x_ref: Ref,
        dy_ref: Ref,
        out_ref: Ref,
    ) -> None:
        warpgroup, half = jax.lax.axis_index("wg"), tile.columns // COMPUTE_WARPGROUPS
        own_columns = pl.ds(warpgroup * half, half)

        def run_tile(index: Array, run: Callable) -> None:
            group = jax.lax.div(index, row_tiles * column_tiles)
            group_tile = jax.lax.rem(index, row_tiles * column_tiles)
            row, column = plgpu.planar_snake(
                group_tile, (row_tiles, column_tiles), 1, tile.snake_width
            )
            first_step, num_steps = first_steps[group], steps[group]
            start, end = starts[group], ends[group]

            def multiply(
                step: tuple[Array, ...], x_smem: Ref, dy_smem: Ref, accumulator: Any
            ) -> Any:
                first_row = (first_step + step[0]) * BLOCK_K

                # Rows of other groups, and of none, which may be NaN.
                @pl.when((first_row < start) | (first_row + BLOCK_K > end))
                def _() -> None:
                    for ref in (dy_smem.at[:, own_columns], x_smem):
                        rows = first_row + jax.lax.broadcasted_iota(jnp.int32, ref.shape, 0)
                        rows = plgpu.layout_cast(rows, plgpu.Layout.WGMMA)
                        ref[...] = jnp.where((rows >= start) & (rows < end), ref[...], 0)
                    plgpu.commit_smem()

                plgpu.wgmma(
                    accumulator, plgpu.transpose_ref(x_smem, (1, 0)), dy_smem.at[:, own_columns]
                )
                plgpu.wgmma_wait(0)  # its operands may be overwritten from now on
                return accumulator

            def store(staging: Any, offset: int) -> None:
                columns = pl.ds(column * tile.columns + warpgroup * half + offset, STORE_COLUMNS)
                plgpu.copy_smem_to_gmem(
                    staging, out_ref.at[group, pl.ds(row * tile.rows, tile.rows), columns]
                )

            index_maps = (lambda k: (first_step + k, row)), (lambda k: (first_step + k, column))
            run(multiply, store, num_steps, index_maps, (x_ref, dy_ref))

        block_shapes = (BLOCK_K, tile.rows), (BLOCK_K, tile.columns)
        run_tiles(
            run_tile,
            len(group_sizes) * row_tiles * column_tiles,
            block_shapes,
            (x_ref, dy_ref),
            tile,
            out.dtype,
        )

    out = jax.ShapeDtypeStruct((len(group_sizes), depth, num_columns), x.dtype)
    run = persistent_kernel(body, out, "grouped_matmul_weight_gradient")
    return run(starts, ends, first_steps, steps, x, dy)


def run_tiles(
    run_tile: Callable,
    num_tiles: int,
    block_shapes: tuple,
    operands_like: tuple,
    tile: TileConfig,
    dtype: DTypeLike,
) -> None:
    """Call run_tile(index, run) for this program's share of `num_tiles` tiles.

    run(multiply, store, steps, index_maps, operands) copies blocks of the two operands, those that
    `index_maps` give for a step, and accumulates their products in the compute warpgroups, each its
    half of the columns. These then call store(staging, offset) for each STORE_COLUMNS columns of
    their half, with the result in shared memory, in `dtype`.
    """
    half = tile.columns // COMPUTE_WARPGROUPS
    transforms = (
        plgpu.TilingTransform((8, SWIZZLE_BYTES // operands_like[0].dtype.itemsize)),
        plgpu.SwizzleTransform(SWIZZLE_BYTES),
    )

    def pipeline(
        multiply: Callable, context: Callable, steps: Array | int, index_maps: Sequence[Callable]
    ) -> Any:
        specs = [
            plgpu.BlockSpec(block, index_map, transforms=transforms)
            for block, index_map in zip(block_shapes, index_maps, strict=True)
        ]
        return plgpu.emit_pipeline_warp_specialized(
            multiply,
            grid=(steps,),
            memory_registers=MEMORY_REGISTERS,
            in_specs=specs,
            wg_axis="wg",
            num_compute_wgs=COMPUTE_WARPGROUPS,
            max_concurrent_steps=tile.stages,
            compute_context=context,
        )

    def nothing(*_: object) -> None: ...

    # All pipelines use the same buffers; this one only says how large they are.
    template = pipeline(nothing, nothing, tile.stages, ((lambda k: (k, 0)), (lambda k: (k, 0))))

    @functools.partial(
        pl.run_scoped,
        allocations=template.get_allocations(*operands_like),
        staging=plgpu.SMEM((COMPUTE_WARPGROUPS, tile.rows, STORE_COLUMNS), dtype),
        collective_axes="wg",
    )
    def _(allocations: Tree, staging: Ref) -> None:
        warpgroup = jax.lax.axis_index("wg")

        def run(
            multiply: Callable,
            store: Callable,
            steps: Array | int,
            index_maps: Sequence[Callable],
            operands: tuple,
        ) -> None:
            def context(evaluate: Callable) -> None:
                @functools.partial(
                    pl.run_scoped, accumulator=plgpu.ACC((tile.rows, half), jnp.float32)
                )
                def _(accumulator: Any) -> None:
                    evaluate(accumulator)
                    result = accumulator[...].astype(staging.dtype)
                    for offset in range(0, half, STORE_COLUMNS):
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        staging[warpgroup] = result[:, offset : offset + STORE_COLUMNS]
                        plgpu.commit_smem()
                        store(staging.at[warpgroup], offset)

            pipeline(multiply, context, steps, index_maps)(*operands, allocations=allocations)

        @plgpu.nd_loop((num_tiles,), collective_axes="sm")
        def _(info: Any) -> None:
            run_tile(info.index[0], run)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def store_rows(
    staging: Ref, out: Ref, first: Array, columns: Any, begin: Array, count: Array, max_rows: int
) -> None:
    """Copy rows `begin` to `begin + count` of `staging` to `out`, whose block starts at `first`.
    The size of a copy is static, so there is one copy for each power of two."""
    size = max_rows
    while size:

        @pl.when(count & size != 0)
        def _(size: int = size, begin: Array = begin) -> None:
            plgpu.copy_smem_to_gmem(
                staging.at[pl.ds(begin, size)], out.at[pl.ds(first + begin, size), columns]
            )

        begin = begin + (count & size)
        size //= 2


def num_multiprocessors() -> int:
    """The number of SMs of the GPU; that of an H200 if there is none, as in ahead-of-time
    compilation."""
    return getattr(jax.local_devices()[0], "core_count", None) or 132


def persistent_kernel(body: Callable, out: jax.ShapeDtypeStruct, name: str) -> Callable:
    return plgpu.kernel(
        body,
        out_type=out,
        grid=(num_multiprocessors(),),
        grid_names=("sm",),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name=name,
    )
