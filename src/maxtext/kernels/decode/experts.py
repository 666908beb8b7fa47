"""Matmuls of few rows with the experts that they chose, as in decoding, where time is spent on
reading weights: only those of chosen experts are read, each once. Pallas kernels for NVIDIA GPUs,
lowered by Triton.

    y[a] = x[a // C] w[expert_ids[a]],   C = A / R

Shapes: R rows, A assignments (row, expert), X experts, K inputs, N outputs.

A program computes some columns of one expert, for all of its assignments: it finds them among
`expert_ids` itself, so that no kernel has to sort them before. With fewer assignments than experts,
there are programs for each assignment, and those of the first one with an expert do the work.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike

from maxtext.kernels.decode.tiles import Tiles

MIN_ROWS = 16  # of a tensor core matmul: fewer are padded
MAX_ASSIGNMENTS = 1024  # with more, grouped matmuls are faster
FEW_ASSIGNMENTS = 32
MIN_TILE = 32


@dataclass(frozen=True)
class ExpertMatrix:
    """A weight [X, K, N] of floats, or of integers or float8 with a scale [X, N] of the outputs,
    and a bias [X, N]."""

    weight: Array
    scale: Array | None = None
    bias: Array | None = None

    @property
    def arrays(self) -> list[Array]:
        return [array for array in (self.weight, self.scale, self.bias) if array is not None]


Finish = Callable[[Sequence[Array]], Array]  # of the products with each weight, in float32


def supports(
    assignments: int, shape: Sequence[int], dtype: DTypeLike, weight_dtype: DTypeLike
) -> bool:
    """Whether the kernel supports this number of assignments and a weight of `shape` [X, K, N]."""
    aligned = not any(size % MIN_TILE for size in shape[1:])
    return (
        assignments <= MAX_ASSIGNMENTS
        and aligned
        and math.prod(shape) <= 2**31
        and jnp.dtype(dtype) == jnp.bfloat16
        and (jnp.dtype(weight_dtype) == jnp.bfloat16 or jnp.dtype(weight_dtype).itemsize == 1)
    )


def expert_matmul(
    x: Array,
    expert_ids: Array,
    matrices: Sequence[ExpertMatrix],
    finish: Finish,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> Array:
    """[A, N] in the dtype of x: `finish` of the products of x [R, K] with the matrices of each
    assignment's expert. All matrices have the same shape. Where expert_ids [A] is X or more, there
    is no expert, and the result is undefined.
    """
    experts, depth, columns = matrices[0].weight.shape
    assignments = expert_ids.size
    tiles = tiles or default_tiles(assignments, len(matrices))
    block_columns, block_depth = math.gcd(tiles.columns, columns), math.gcd(tiles.depth, depth)
    arrays = [x, expert_ids.astype(jnp.int32), *(a for m in matrices for a in m.arrays)]

    def whole(array: Array) -> pl.BlockSpec:
        return pl.BlockSpec(array.shape, lambda g, n: (0,) * array.ndim)

    return pl.pallas_call(
        functools.partial(
            expert_program,
            has_scale=matrices[0].scale is not None,
            has_bias=matrices[0].bias is not None,
            count=len(matrices),
            finish=finish,
            block_columns=block_columns,
            block_depth=block_depth,
        ),
        grid=(min(assignments, experts), columns // block_columns),
        in_specs=[whole(array) for array in arrays],
        out_specs=pl.BlockSpec((assignments, columns), lambda g, n: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((assignments, columns), x.dtype),
        interpret=interpret,
        name="decode_expert_matmul",
        compiler_params=tiles.compiler_params,
    )(*arrays)


def default_tiles(assignments: int, matrices: int) -> Tiles:
    """The fastest on an H200: few assignments have few programs, which are narrow."""
    if assignments > FEW_ASSIGNMENTS:
        return Tiles(columns=128, depth=64, warps=4, stages=4)
    return Tiles(columns=64, depth=64, warps=8 if matrices > 1 else 4, stages=4)


def expert_program(
    x_ref: Ref,
    ids_ref: Ref,
    *refs: Ref,
    has_scale: bool,
    has_bias: bool,
    count: int,
    finish: Finish,
    block_columns: int,
    block_depth: int,
) -> None:
    """The columns of one expert, for all of its assignments."""
    *arrays, out_ref = refs
    size = len(arrays) // count
    matrices = [arrays[i * size : (i + 1) * size] for i in range(count)]
    experts, depth, _ = matrices[0][0].shape
    assignments, per_row = out_ref.shape[0], out_ref.shape[0] // x_ref.shape[0]
    group = pl.program_id(0)
    index = jnp.arange(pl.next_power_of_2(assignments))
    ids = triton.load(ids_ref.at[index], mask=index < assignments, other=experts)
    by_expert = assignments > experts
    expert = group if by_expert else ids_ref[group]
    matches = (ids == expert).astype(jnp.int32)
    num_rows = jnp.where(expert < experts, matches.sum(), 0)
    if not by_expert:
        num_earlier = jnp.where(index < group, matches, 0).sum()
        num_rows = jnp.where(num_earlier == 0, num_rows, 0)
    order = matches * jnp.cumsum(matches)  # from 1 on; 0 for other assignments
    first_column = pl.program_id(1) * block_columns
    columns = pl.ds(first_column, block_columns)

    def run_rows(step: Array, carry: None) -> None:
        # The last row is repeated.
        row = jnp.minimum(step * MIN_ROWS + jnp.arange(MIN_ROWS), num_rows - 1)
        assignment = jnp.where(order[None, :] == row[:, None] + 1, index[None, :], 0).sum(axis=1)

        def add(step: Array, totals: list[Array]) -> list[Array]:
            inputs = step * block_depth + jnp.arange(block_depth)
            x = x_ref[(assignment // per_row)[:, None], inputs[None, :]]
            at = pl.ds(step * block_depth, block_depth)
            return [
                total + triton.dot(x, weight_ref[expert, at, columns].astype(x.dtype))
                for total, (weight_ref, *_) in zip(totals, matrices, strict=True)
            ]

        totals = [jnp.zeros((MIN_ROWS, block_columns), jnp.float32) for _ in matrices]
        products = jax.lax.fori_loop(0, depth // block_depth, add, totals)
        for i, (_, *more) in enumerate(matrices):
            if has_scale:
                products[i] *= more[0][expert, columns].astype(jnp.float32)[None]
            if has_bias:
                products[i] += more[-1][expert, columns].astype(jnp.float32)[None]
        column = first_column + jnp.arange(block_columns)
        out_ref[assignment[:, None], column[None, :]] = finish(products).astype(out_ref.dtype)

    jax.lax.fori_loop(0, pl.cdiv(num_rows, MIN_ROWS), run_rows, None)
