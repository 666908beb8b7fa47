"""Grouped matmul over rows that are sorted by group, and the permutation of rows into that order.

    grouped_matmul    y[n] = x[n] w[g(n)],   g(n): the group (expert) of row n
    permute           tokens [T, E] -> rows [N, E], sorted by group
    unpermute         rows [N, E] -> [T, k, E], the row of each assignment

The rows of group 0 come first, then those of group 1 and so on. Rows after the last group belong
to no group and get no gradient. No shape depends on the routing.

Shapes: T tokens, k assignments of a token, N rows of the sorted buffer, X groups (experts), E
inputs, M outputs.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from maxtext.common.hardware import target_capability
from maxtext.common.log import log_once
from maxtext.common.types import Tree


def grouped_matmul(
    x: Array, weights: Array, group_sizes: Array, platform: str | None = None
) -> Array:
    """x [N, E] sorted by group, weights [X, E, M], group_sizes [X] of int32 -> [N, M].

    Accumulates in float32 and returns the dtype of x, which the weights must share: a float32
    result would also make the backward matmuls float32.

    `platform` is that of the only device; None if there are several, or any will do. With a
    platform, the output and dx are undefined after the last group, and callers must not read them.
    With None they are zeros.
    """
    hopper = is_hopper(platform) and hopper_supports(x, weights)
    if platform == "gpu":
        implementation = "the kernel for Hopper GPUs" if hopper else "ragged_dot"
        log_once(f"{len(weights)} experts are multiplied by {implementation}")
    if hopper:
        return hopper_matmul(x, weights, group_sizes)
    in_group = (jnp.arange(x.shape[0]) < jnp.sum(group_sizes))[:, None]
    # Platforms differ in what they return after the last group. The inner mask is for the gradient.
    y = jax.lax.ragged_dot(jnp.where(in_group, x, 0), weights, group_sizes)
    return jnp.where(in_group, y, 0)


def is_hopper(platform: str | None) -> bool:
    return platform == "gpu" and target_capability() == "9.0"


def hopper_supports(x: Array, weights: Array | jax.ShapeDtypeStruct) -> bool:
    """Whether `grouped_matmul_hopper` supports these shapes: its copies need aligned sizes. It is
    untested with less than one block of rows, as decoding has them.
    """
    from maxtext.kernels import grouped_matmul_hopper  # Mosaic GPU takes long to import

    num_rows = x.shape[0]
    supported = x.dtype == weights.dtype == jnp.bfloat16
    supported = supported and num_rows % 8 == 0
    supported = supported and num_rows >= grouped_matmul_hopper.DEFAULT_TILES.rows
    return supported and not any(dim % grouped_matmul_hopper.BLOCK_K for dim in weights.shape[1:])


@jax.custom_vjp
def hopper_matmul(x: Array, weights: Array, group_sizes: Array) -> Array:
    from maxtext.kernels import grouped_matmul_hopper

    return grouped_matmul_hopper.grouped_matmul(x, weights, group_sizes)


def hopper_matmul_backward(
    residuals: tuple[Array, Array, Array], dy: Array
) -> tuple[Array, Array, Tree]:
    from maxtext.kernels import grouped_matmul_hopper

    x, weights, group_sizes = residuals
    dx = grouped_matmul_hopper.grouped_matmul(dy, weights, group_sizes, transposed=True)
    dw = grouped_matmul_hopper.weight_gradient(x, dy, group_sizes)
    return dx, dw, zero_cotangent(group_sizes)


hopper_matmul.defvjp(lambda *inputs: (hopper_matmul(*inputs), inputs), hopper_matmul_backward)


class GroupPermutation(NamedTuple):
    """The order of assignments (token, choice) sorted by group.

    assignments [N]: the assignment in each row; assignment a belongs to token a // k.
    row_indices [T, k]: the row of each assignment; N or more if it has no row or no group.
    group_ids [N]: the group of each row, X after the last group.
    group_sizes [X]: the number of rows of each group.
    """

    assignments: Array
    row_indices: Array
    group_ids: Array
    group_sizes: Array


def sort_by_group(
    group_ids: Array, num_groups: int, num_rows: int | None = None
) -> GroupPermutation:
    """The permutation that sorts group_ids [T, k]; the id `num_groups` means no group.

    The sort is stable. With fewer rows than T·k, the last assignments in sorted order get no row.
    """
    flat = group_ids.reshape(-1)
    num_rows = flat.size if num_rows is None else min(num_rows, flat.size)
    order = jnp.argsort(flat, stable=True)
    inverse = jnp.argsort(order)
    row_indices = jnp.where(flat < num_groups, inverse, flat.size)
    sorted_ids = flat[order]
    groups = jnp.arange(num_groups, dtype=flat.dtype)
    ends = jnp.searchsorted(sorted_ids, groups, side="right").astype(jnp.int32)
    return GroupPermutation(
        assignments=order[:num_rows],
        row_indices=row_indices.reshape(group_ids.shape),
        group_ids=sorted_ids[:num_rows],
        group_sizes=jnp.diff(jnp.minimum(ends, num_rows), prepend=0),
    )


def permute(tokens: Array, permutation: GroupPermutation) -> Array:
    """tokens [T, E] -> rows [N, E], zeros for a row in no group."""
    token_indices = permutation.assignments // permutation.row_indices.shape[1]
    return zero_ungrouped_rows(jnp.take(tokens, token_indices, axis=0, mode="clip"), permutation)


def zero_ungrouped_rows(rows: Array, permutation: GroupPermutation) -> Array:
    in_group = permutation.group_ids < len(permutation.group_sizes)
    return jnp.where(in_group[:, None], rows, 0)


def unpermute(rows: Array, permutation: GroupPermutation) -> Array:
    """rows [N, E] -> [T, k, E], zeros for an assignment without a row."""
    return jnp.take(rows, permutation.row_indices, axis=0, mode="fill", fill_value=0)


def zero_cotangent(integers: Tree) -> Tree:
    """The cotangent of integer arrays: zeros of float0."""
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, jax.dtypes.float0), integers)


def permute_backward(permutation: GroupPermutation, drows: Array) -> tuple[Array, Tree]:
    return jnp.sum(unpermute(drows, permutation), axis=1), zero_cotangent(permutation)


def unpermute_backward(permutation: GroupPermutation, dy: Array) -> tuple[Array, Tree]:
    flat = dy.reshape(-1, dy.shape[-1])
    drows = jnp.take(flat, permutation.assignments, axis=0, mode="clip")
    return zero_ungrouped_rows(drows, permutation), zero_cotangent(permutation)


# The same functions with gathers as gradients: each is the transpose of the other, up to the sum
# over a token's assignments. Autodiff does not know that and emits scatter-adds, which are slow
# and, on GPUs, not deterministic.
permute_gather_vjp = jax.custom_vjp(permute)
permute_gather_vjp.defvjp(
    lambda tokens, permutation: (permute(tokens, permutation), permutation), permute_backward
)
unpermute_gather_vjp = jax.custom_vjp(unpermute)
unpermute_gather_vjp.defvjp(
    lambda rows, permutation: (unpermute(rows, permutation), permutation), unpermute_backward
)
