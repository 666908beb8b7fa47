"""Row-wise Triton kernels: each program reads complete rows of a matrix, in tiles of power-of-two
width.

Shapes: T rows, C columns.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from maxtext.common.hardware import is_nvidia, target_capability

TILE = 128  # T and C must be multiples of it
MAX_COLUMNS = 32768  # of a row that fits into the registers of a program
MIN_ELEMENTS = 4096  # of a program: several short rows, or one long row


def supports_triton(platform: str | None, minimum: tuple[int, int] = (8, 0)) -> bool:
    """Whether `platform` is an NVIDIA GPU of at least this compute capability."""
    return platform == "gpu" and is_nvidia(target_capability(), minimum)


def rowwise_call(
    program: Callable[..., None],
    matrices: Sequence[jax.Array],
    vectors: Sequence[jax.Array],
    outs: Sequence[jax.ShapeDtypeStruct],
    row_outs: int,
    *,
    interpret: bool,
    name: str,
) -> list[jax.Array]:
    """Run `program(*matrix_refs, *vector_refs, *out_refs, *row_out_refs)` over blocks of rows.

    A block has the same rows of all `matrices` ([T, ...]), of `outs`, and of `row_outs` further
    outputs, [T] in float32; and all elements of `vectors` ([C]).
    """
    num_rows = len(matrices[0])
    columns = max(sum(x.size // num_rows for x in arrays) for arrays in (matrices, outs))
    block_rows, num_warps = rows_and_warps(columns)

    def rows_of(x: jax.Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
        return pl.BlockSpec((block_rows, *x.shape[1:]), lambda i: (i, *[0] * (x.ndim - 1)))

    return pl.pallas_call(
        program,
        out_shape=[*outs, *[jax.ShapeDtypeStruct((num_rows,), jnp.float32)] * row_outs],
        grid=(num_rows // block_rows,),
        in_specs=[
            *map(rows_of, matrices),
            *(pl.BlockSpec(x.shape, lambda i: (0,)) for x in vectors),
        ],
        out_specs=[*map(rows_of, outs), *[pl.BlockSpec((block_rows,), lambda i: (i,))] * row_outs],
        compiler_params=triton.CompilerParams(num_warps=num_warps),
        interpret=interpret,
        name=name,
    )(*matrices, *vectors)


def rows_and_warps(columns: int) -> tuple[int, int]:
    """The number of rows and of warps of a program, for rows of `columns`."""
    rows = max(1, MIN_ELEMENTS // floor_power_of_two(columns))
    return rows, min(16, max(4, floor_power_of_two(rows * columns // 1536)))


def column_tiles(columns: int, max_width: int = MAX_COLUMNS) -> list[Any]:
    """Slices that cover a row: powers of two, as Triton requires, the widest first."""
    tiles, start = [], 0
    while start < columns:
        width = min(floor_power_of_two(columns - start), max_width)
        tiles.append(pl.ds(start, width))
        start += width
    return tiles


def floor_power_of_two(x: int) -> int:
    """The largest power of two that is not above x."""
    return 1 << (max(x, 1).bit_length() - 1)
