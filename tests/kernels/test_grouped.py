"""Grouped products and the sorted order against numpy loops; gradients against numpy and
autodiff.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.kernels.grouped import (
    gather_rows,
    gather_rows_fast,
    grouped_product,
    return_rows,
    return_rows_fast,
    sort_by_group,
)

ROWS, INPUTS, OUTPUTS = 12, 5, 7
SIZES = {"full": (3, 0, 4, 5), "rest": (2, 3, 0, 4), "nothing": (0, 0, 0, 0), "one": (0, 12, 0, 0)}


def draw(*shapes, dtype=np.float32, seed=0):
    normal = np.random.default_rng(seed).normal
    return [normal(size=shape).astype(dtype) for shape in shapes]


def loop(rows, kernels, sizes, cotangent):
    """The product, and the gradients for rows and kernels, in float64."""
    rows, kernels, cotangent = (
        np.asarray(array, np.float64) for array in (rows, kernels, cotangent)
    )
    product, by_rows, by_kernels = (
        np.zeros_like(cotangent),
        np.zeros_like(rows),
        np.zeros_like(kernels),
    )
    start = 0
    for group, size in enumerate(sizes):
        mine = slice(start, start + size)
        product[mine] = rows[mine] @ kernels[group]
        by_rows[mine] = cotangent[mine] @ kernels[group].T
        by_kernels[group] = rows[mine].T @ cotangent[mine]
        start += size
    return product, by_rows, by_kernels


@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
def test_product_and_gradients(sizes):
    rows, kernels, cotangent = draw((ROWS, INPUTS), (4, INPUTS, OUTPUTS), (ROWS, OUTPUTS))
    product, pull = jax.vjp(
        lambda r, k: grouped_product(r, k, jnp.array(sizes, jnp.int32)), rows, kernels
    )
    for ours, theirs in zip(
        (product, *pull(cotangent)), loop(rows, kernels, sizes, cotangent), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_nothing_comes_from_behind_the_last_group():
    """Not even from infinities there, in either direction."""
    sizes = (2, 3, 0, 4)
    rows, kernels, cotangent = draw((ROWS, INPUTS), (4, INPUTS, OUTPUTS), (ROWS, OUTPUTS))
    rows[9:], cotangent[9:] = np.inf, np.nan
    product, pull = jax.vjp(
        lambda r, k: grouped_product(r, k, jnp.array(sizes, jnp.int32)), rows, kernels
    )
    rows[9:], cotangent[9:] = 0, 0
    for ours, theirs in zip(
        (product, *pull(cotangent)), loop(rows, kernels, sizes, cotangent), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_bfloat16_accumulates_in_float32():
    """Thousands of products: sums in bfloat16 would be off by far more than one rounding of the
    result.
    """
    rows, kernels, cotangent = (
        jnp.asarray(array, jnp.bfloat16) for array in draw((4096, 2048), (2, 2048, 2), (4096, 2))
    )
    sizes = (4000, 96)
    product, pull = jax.vjp(
        lambda r, k: grouped_product(r, k, jnp.array(sizes, jnp.int32)), rows, kernels
    )
    for ours, theirs in zip(
        (product, *pull(cotangent)), loop(rows, kernels, sizes, cotangent), strict=True
    ):
        assert ours.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(ours, np.float64), theirs, rtol=2**-8, atol=2**-10)


GROUPS = np.array([[2, 0], [1, 2], [3, 3], [0, 2], [2, 1]])  # of 3; the third token is in none


def by_hand(rows):
    """(group, assignment) of each row, in order."""
    pairs = sorted((group, place) for place, group in enumerate(GROUPS.reshape(-1)))
    return pairs[:rows]


@pytest.mark.parametrize("rows", [None, 99, 10, 8, 5, 1])
def test_order(rows):
    order = sort_by_group(jnp.array(GROUPS), 3, rows)
    pairs = by_hand(min(rows or 10, 10))
    np.testing.assert_array_equal(order.assignments, [place for _, place in pairs])
    np.testing.assert_array_equal(order.groups, [group for group, _ in pairs])
    np.testing.assert_array_equal(
        order.sizes, [sum(group == g for g, _ in pairs) for group in range(3)]
    )
    assert order.sizes.dtype == jnp.int32
    places = np.asarray(order.places).reshape(-1)
    for assignment in range(GROUPS.size):
        row = [row for row, (group, place) in enumerate(pairs) if place == assignment and group < 3]
        assert [places[assignment]] == row if row else places[assignment] >= len(pairs)


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "autodiff"])
@pytest.mark.parametrize("rows", [10, 6])
def test_there_and_back(fast, rows):
    """Both ways are linear, so numpy matrices give values and gradients alike."""
    there, back = (gather_rows_fast, return_rows_fast) if fast else (gather_rows, return_rows)
    order = sort_by_group(jnp.array(GROUPS), 3, rows)
    tokens, sorted_rows = draw((5, INPUTS), (rows, INPUTS))
    forth = np.zeros((rows, 5), np.float32)
    home = np.zeros((10, rows), np.float32)
    for row, (group, assignment) in enumerate(by_hand(rows)):
        forth[row, assignment // 2] = home[assignment, row] = group < 3
    y, pull = jax.vjp(lambda tokens: there(tokens, order), tokens)
    np.testing.assert_array_equal(y, forth @ tokens)
    np.testing.assert_allclose(pull(sorted_rows)[0], forth.T @ sorted_rows, rtol=1e-6)
    y, pull = jax.vjp(lambda rows: back(rows, order), sorted_rows)
    np.testing.assert_array_equal(y, (home @ sorted_rows).reshape(5, 2, INPUTS))
    (cotangent,) = draw((5, 2, INPUTS), seed=1)
    np.testing.assert_allclose(
        pull(cotangent)[0], home.T @ cotangent.reshape(10, INPUTS), rtol=1e-6
    )


def test_fast_way_has_no_scatter():
    order = sort_by_group(jnp.array(GROUPS), 3)

    def program(there, back):
        def loss(tokens):
            return jnp.sum(jnp.sin(back(jnp.sin(there(tokens, order)), order)))

        return str(jax.make_jaxpr(jax.grad(loss))(jnp.ones((5, INPUTS))))

    assert "scatter" in program(gather_rows, return_rows)
    assert "scatter" not in program(gather_rows_fast, return_rows_fast)
