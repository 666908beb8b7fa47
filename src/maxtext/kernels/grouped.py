"""Products of sorted rows with one kernel a group, and the way of rows into that order and back.

Shapes: T tokens, k assignments a token, N rows of the sorted buffer, X groups (experts), E and M
row widths.

The rows of group 0 come first, then those of group 1 and so on; what lies behind the last group
belongs to nobody, and has no gradient. Shapes never depend on where tokens go.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from maxtext.common.gpu import target_capability
from maxtext.common.log import say_once


def grouped_product(
    rows: Array, kernels: Array, group_sizes: Array, platform: str | None = None
) -> Array:
    """rows [N, E] of sorted groups, kernels [X, E, M], group_sizes [X] of int32 -> [N, M].

    Accumulates in float32 and returns the dtype of the rows, which the kernels must share: asking
    for a float32 result here would make the backward products float32, too. `platform`: of the one
    device that computes it; None: there are several, or any will do. With one, what comes out
    behind the last group may be anything, as may be its gradient: callers must not read it. With
    None it is zeros.
    """
    hopper = is_hopper(platform) and hopper_has(rows, kernels)
    if platform == "gpu":
        say_once(
            f"{len(kernels)} experts are multiplied by {'the kernel for Hopper GPUs' if hopper else 'ragged_dot'}"
        )
    if hopper:
        return hopper_product(rows, kernels, group_sizes)
    mine = (jnp.arange(rows.shape[0]) < jnp.sum(group_sizes))[:, None]
    # What lies behind the last group differs between platforms; the first mask is for the gradient.
    return jnp.where(mine, jax.lax.ragged_dot(jnp.where(mine, rows, 0), kernels, group_sizes), 0)


def is_hopper(platform: str | None) -> bool:
    return platform == "gpu" and target_capability() == "9.0"


def hopper_has(rows: Array, kernels: Array | jax.ShapeDtypeStruct) -> bool:
    """Whether `grouped_hopper` can do it: its copies have bounds on sizes. With less than one block
    of rows, as in generation, it has not been tried.
    """
    from maxtext.kernels import grouped_hopper  # what it is made with takes long to import

    count = rows.shape[0]
    right = rows.dtype == kernels.dtype == jnp.bfloat16
    right = right and count % 8 == 0 and count >= grouped_hopper.USUAL.rows
    return right and not any(size % grouped_hopper.DEPTH for size in kernels.shape[1:])


@jax.custom_vjp
def hopper_product(rows: Array, kernels: Array, sizes: Array) -> Array:
    from maxtext.kernels import grouped_hopper

    return grouped_hopper.product(rows, kernels, sizes)


def hopper_backward(kept: tuple[Array, Array, Array], cotangent: Array) -> tuple[Array, Array, Any]:
    from maxtext.kernels import grouped_hopper

    rows, kernels, sizes = kept
    of_rows = grouped_hopper.product(cotangent, kernels, sizes, transposed=True)
    of_kernels = grouped_hopper.kernels_gradient(rows, cotangent, sizes)
    return of_rows, of_kernels, no_gradient(sizes)


hopper_product.defvjp(lambda *inputs: (hopper_product(*inputs), inputs), hopper_backward)


class Order(NamedTuple):
    """Where the assignments of tokens stand when they are sorted by group.

    `assignments` [N]: which one of the T·k stands in a row (assignment a is of token a // k).
    `places` [T, k]: in which row an assignment stands; N or more where it has none, or is in no
    group. `groups` [N]: the group of a row, X behind the last group. `sizes` [X]: rows of each
    group.
    """

    assignments: Array
    places: Array
    groups: Array
    sizes: Array


def sort_by_group(groups: Array, count: int, rows: int | None = None) -> Order:
    """The order of groups [T, k]; `count` of them, and the number `count` itself means: in no
    group.

    Within a group, tokens keep their order. With fewer `rows` than T·k, the last ones in this order
    have no row.
    """
    flat = groups.reshape(-1)
    rows = flat.size if rows is None else min(rows, flat.size)
    order = jnp.argsort(flat, stable=True)
    places = jnp.where(flat < count, jnp.argsort(order), flat.size)  # the inverse
    in_order = flat[order]
    ends = jnp.searchsorted(in_order, jnp.arange(count, dtype=flat.dtype), side="right").astype(
        jnp.int32
    )
    sizes = jnp.diff(jnp.minimum(ends, rows), prepend=0)
    return Order(order[:rows], places.reshape(groups.shape), in_order[:rows], sizes)


def gather_rows(tokens: Array, order: Order) -> Array:
    """tokens [T, E] -> rows [N, E], zeros for a row in no group."""
    return in_groups(
        jnp.take(tokens, order.assignments // order.places.shape[1], axis=0, mode="clip"), order
    )


def in_groups(rows: Array, order: Order) -> Array:
    return jnp.where((order.groups < len(order.sizes))[:, None], rows, 0)


def return_rows(rows: Array, order: Order) -> Array:
    """rows [N, E] -> [T, k, E], zeros for an assignment without a row."""
    return jnp.take(rows, order.places, axis=0, mode="fill", fill_value=0)


def no_gradient(integers: Any) -> Any:
    """Their cotangent."""
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, jax.dtypes.float0), integers)


def gather_rows_backward(order: Order, cotangent: Array) -> tuple[Array, Any]:
    return jnp.sum(return_rows(cotangent, order), axis=1), no_gradient(order)


def return_rows_backward(order: Order, cotangent: Array) -> tuple[Array, Any]:
    flat = cotangent.reshape(-1, cotangent.shape[-1])
    return in_groups(jnp.take(flat, order.assignments, axis=0, mode="clip"), order), no_gradient(
        order
    )


# The same with gradients that gather: each is the other's transpose, up to the sum over a token's
# assignments. Autodiff does not know that and adds row after row into place, which is slow and, on
# GPUs, not deterministic.
gather_rows_fast = jax.custom_vjp(gather_rows)
gather_rows_fast.defvjp(
    lambda tokens, order: (gather_rows(tokens, order), order), gather_rows_backward
)
return_rows_fast = jax.custom_vjp(return_rows)
return_rows_fast.defvjp(lambda rows, order: (return_rows(rows, order), order), return_rows_backward)
