"""Grouped products on NVIDIA's Hopper GPUs: forward, and the gradient of kernels. Pallas kernels,
by Mosaic GPU.

Shapes: N rows, X groups, K numbers that are added up, M columns, T tiles of rows.

Rows of a group follow one another, and groups begin anywhere. So a block of rows may belong to
several groups; it is multiplied once for each of them, and only the rows of that group are stored
(or, for the gradient, added up). Which block and which group a tile has is looked up in a table
that is made before (`Tiles`), so finding them costs the same with 8 groups and with 800. One
program runs on each multiprocessor and takes one tile after the other; one warpgroup fetches, two
multiply, each its half of the columns. Numbers have 16 bits, or, but for the gradient of kernels,
eight.

What lies behind the last group is not written: callers must not read it.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

WORKERS = 2  # warpgroups that multiply
LINE = 128  # bytes of a line that is swizzled
DEPTH = LINE // 2  # numbers of 16 bits that are added up in a step
STORED = 64  # columns that are stored at a time
KEPT = 40  # registers of the warpgroup that fetches


class Shape(NamedTuple):
    """Of the tiles: `rows` and `columns` of a result, `stages` on their way at a time, `width` of
    the columns' blocks that are finished before the next ones begin, so that what they read is
    still near."""

    rows: int = 128
    columns: int = 256
    stages: int = 4
    width: int = 16


USUAL, OF_KERNELS = Shape(), Shape(width=4)  # the fastest on an H200


class Tiles(NamedTuple):
    """For each tile: its group, its block of rows, the first of its rows in that block, and how
    many it has.
    """

    groups: Array
    blocks: Array
    firsts: Array
    counts: Array


def tiles_of(sizes: Array, rows: int, block: int) -> Tiles:
    """All that can be needed, cdiv(rows, block) + X - 1; those behind the last have no rows."""
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    first_blocks = starts // block
    blocks = jnp.where(sizes > 0, (ends - 1) // block - first_blocks + 1, 0)
    until = jnp.cumsum(blocks)
    numbers = jnp.arange(pl.cdiv(rows, block) + len(sizes) - 1, dtype=jnp.int32)
    groups = jnp.minimum(jnp.searchsorted(until, numbers, side="right"), len(sizes) - 1)
    at = jnp.minimum(
        first_blocks[groups] + numbers - (until - blocks)[groups], pl.cdiv(rows, block) - 1
    )
    begin = jnp.maximum(starts[groups], at * block)
    end = jnp.minimum(ends[groups], (at + 1) * block)
    counts = jnp.where(numbers < until[-1], end - begin, 0)
    return Tiles(*(part.astype(jnp.int32) for part in (groups, at, begin - at * block, counts)))


@functools.partial(
    jax.jit, static_argnames=("transposed", "shape", "dtype")
)  # traced once for all layers
def product(
    rows: Array,
    kernels: Array,
    sizes: Array,
    transposed: bool = False,
    shape: Shape = USUAL,
    dtype: Any = None,
) -> Array:
    """rows [N, K] times kernels [X, K, M], or [X, M, K] if `transposed` -> [N, M] in `dtype`, or
    that of the rows. Numbers of eight bits are added up along the last dimension of both alone, so
    kernels must be transposed."""
    (count, depth), width = rows.shape, kernels.shape[1 if transposed else 2]
    step = LINE // rows.dtype.itemsize
    tiles = tiles_of(sizes, count, shape.rows)
    across, down = pl.cdiv(width, shape.columns), len(tiles.groups)

    def body(
        groups: Any,
        blocks: Any,
        firsts: Any,
        counts: Any,
        rows_ref: Any,
        kernels_ref: Any,
        out_ref: Any,
    ) -> None:
        worker, half = jax.lax.axis_index("worker"), shape.columns // WORKERS
        mine = pl.ds(worker * half, half)

        def multiply(_: Any, some_rows: Any, kernel: Any, total: Any) -> Any:
            part = (
                plgpu.transpose_ref(kernel.at[mine], (1, 0)) if transposed else kernel.at[:, mine]
            )
            plgpu.wgmma(total, some_rows, part)
            plgpu.wgmma_wait(0)  # what it read may be overwritten from now on
            return total

        def tile(index: Array, run: Callable) -> None:
            at, column = plgpu.planar_snake(index, (down, across), 1, shape.width)
            block = blocks[at]

            def store(staging: Any, part: int) -> None:
                columns = pl.ds(column * shape.columns + worker * half + part, STORED)
                store_rows(
                    staging,
                    out_ref,
                    block * shape.rows,
                    columns,
                    firsts[at],
                    counts[at],
                    shape.rows,
                )

            places = (lambda k: (block, k)), (lambda k: (column, k) if transposed else (k, column))
            run(multiply, store, depth // step, places, (rows_ref, kernels_ref.at[groups[at]]))

        blocks_read = (
            (shape.rows, step),
            (shape.columns, step) if transposed else (step, shape.columns),
        )
        on_tiles(tile, across * down, blocks_read, (rows_ref, kernels_ref.at[0]), shape, out.dtype)

    out = jax.ShapeDtypeStruct((count, width), dtype or rows.dtype)
    return kernel_of(body, out, "grouped_product")(*tiles, rows, kernels)


@functools.partial(jax.jit, static_argnames="shape")
def kernels_gradient(
    rows: Array, cotangents: Array, sizes: Array, shape: Shape = OF_KERNELS
) -> Array:
    """For each group the sum over its rows [N, K], transposed, times their cotangents [N, M] -> [X,
    K, M].
    """
    depth, width = rows.shape[1], cotangents.shape[1]
    down, across = pl.cdiv(depth, shape.rows), pl.cdiv(width, shape.columns)
    ends = jnp.cumsum(sizes).astype(jnp.int32)
    starts = ends - sizes.astype(jnp.int32)
    first_steps = starts // DEPTH
    steps = jnp.where(sizes > 0, (ends + DEPTH - 1) // DEPTH - first_steps, 0)

    def body(
        starts: Any,
        ends: Any,
        first_steps: Any,
        steps: Any,
        rows_ref: Any,
        cotangents_ref: Any,
        out_ref: Any,
    ):
        worker, half = jax.lax.axis_index("worker"), shape.columns // WORKERS
        mine = pl.ds(worker * half, half)

        def tile(index: Array, run: Callable) -> None:
            group, at = jax.lax.div(index, down * across), jax.lax.rem(index, down * across)
            line, column = plgpu.planar_snake(at, (down, across), 1, shape.width)
            first, many = first_steps[group], steps[group]
            start, end = starts[group], ends[group]

            def multiply(step: Any, some_rows: Any, cotangent: Any, total: Any) -> Any:
                at = (first + step[0]) * DEPTH

                @pl.when((at < start) | (at + DEPTH > end))
                def _() -> None:  # other groups' rows, and nobody's, which may not even be numbers
                    for ref in (cotangent.at[:, mine], some_rows):
                        places = at + jax.lax.broadcasted_iota(jnp.int32, ref.shape, 0)
                        places = plgpu.layout_cast(places, plgpu.Layout.WGMMA)
                        ref[...] = jnp.where((places >= start) & (places < end), ref[...], 0)
                    plgpu.commit_smem()

                plgpu.wgmma(total, plgpu.transpose_ref(some_rows, (1, 0)), cotangent.at[:, mine])
                plgpu.wgmma_wait(0)  # what it read may be overwritten from now on
                return total

            def store(staging: Any, part: int) -> None:
                columns = pl.ds(column * shape.columns + worker * half + part, STORED)
                plgpu.copy_smem_to_gmem(
                    staging, out_ref.at[group, pl.ds(line * shape.rows, shape.rows), columns]
                )

            places = (lambda k: (first + k, line)), (lambda k: (first + k, column))
            run(multiply, store, many, places, (rows_ref, cotangents_ref))

        blocks_read = (DEPTH, shape.rows), (DEPTH, shape.columns)
        on_tiles(
            tile,
            len(sizes) * down * across,
            blocks_read,
            (rows_ref, cotangents_ref),
            shape,
            out.dtype,
        )

    out = jax.ShapeDtypeStruct((len(sizes), depth, width), rows.dtype)
    run = kernel_of(body, out, "grouped_kernels_gradient")
    return run(starts, ends, first_steps, steps, rows, cotangents)


def on_tiles(
    tile: Callable, count: int, blocks: tuple, like: tuple, shape: Shape, dtype: Any
) -> None:
    """Calls tile(index, run) for this program's share of `count` tiles.

    run(multiply, store, steps, places, operands) fetches blocks of the two operands, those at
    `places` of a step, and adds up their products in the warpgroups that multiply, each its half of
    the columns. Then these call store(staging, part) for each STORED columns of their half, with
    the result in shared memory, in `dtype`.
    """
    half = shape.columns // WORKERS
    transforms = (
        plgpu.TilingTransform((8, LINE // like[0].dtype.itemsize)),
        plgpu.SwizzleTransform(LINE),
    )

    def pipeline(multiply: Callable, context: Callable, steps: Any, places: Any) -> Any:
        specs = [
            plgpu.BlockSpec(block, place, transforms=transforms)
            for block, place in zip(blocks, places, strict=True)
        ]
        return plgpu.emit_pipeline_warp_specialized(
            multiply, grid=(steps,), memory_registers=KEPT, in_specs=specs, wg_axis="worker", num_compute_wgs=WORKERS,
            max_concurrent_steps=shape.stages, compute_context=context,
        )  # fmt: skip

    def nothing(*_: Any) -> None: ...

    some = pipeline(nothing, nothing, shape.stages, ((lambda k: (k, 0)), (lambda k: (k, 0))))

    @functools.partial(
        pl.run_scoped,
        allocations=some.get_allocations(*like),
        staging=plgpu.SMEM((WORKERS, shape.rows, STORED), dtype),
        collective_axes="worker",
    )
    def _(allocations: Any, staging: Any) -> None:
        worker = jax.lax.axis_index("worker")

        def run(
            multiply: Callable, store: Callable, steps: Any, places: Any, operands: tuple
        ) -> None:
            def context(evaluate: Callable) -> None:
                @functools.partial(pl.run_scoped, total=plgpu.ACC((shape.rows, half), jnp.float32))
                def _(total: Any) -> None:
                    evaluate(total)
                    result = total[...].astype(staging.dtype)
                    for part in range(0, half, STORED):
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        staging[worker] = result[:, part : part + STORED]
                        plgpu.commit_smem()
                        store(staging.at[worker], part)

            pipeline(multiply, context, steps, places)(*operands, allocations=allocations)

        @plgpu.nd_loop((count,), collective_axes="core")
        def _(info: Any) -> None:
            tile(info.index[0], run)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def store_rows(
    staging: Any, out: Any, first: Array, columns: Any, begin: Array, count: Array, most: int
) -> None:
    """Rows `begin` to `begin + count` of `staging` to those of `out` from `first` on. How much one
    copy takes is known when compiling, so there is one for each power of two."""
    size = most
    while size:

        @pl.when(count & size != 0)
        def _(size: int = size, begin: Array = begin) -> None:
            plgpu.copy_smem_to_gmem(
                staging.at[pl.ds(begin, size)], out.at[pl.ds(first + begin, size), columns]
            )

        begin = begin + (count & size)
        size //= 2


def cores() -> int:
    """Multiprocessors of the GPU; those of an H200 where there is none, as when a program is only
    made.
    """
    return getattr(jax.local_devices()[0], "core_count", None) or 132


def kernel_of(body: Callable, out: Any, name: str) -> Callable:
    return plgpu.kernel(
        body, out_type=out, grid=(cores(),), grid_names=("core",), num_threads=WORKERS + 1, thread_name="worker",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup), kernel_name=name,
    )  # fmt: skip
