"""Grouped matmul and the sort by group against numpy loops; gradients against numpy and
autodiff.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.kernels.grouped_matmul import (
    grouped_matmul,
    permute,
    permute_gather_vjp,
    sort_by_group,
    unpermute,
    unpermute_gather_vjp,
)
from tests.support.grouped_matmul import SIZES, draw, reference

ROWS, INPUTS, OUTPUTS = 12, 5, 7


def output_and_gradients(x, weights, group_sizes, dy):
    y, vjp = jax.vjp(
        lambda x, w: grouped_matmul(x, w, jnp.array(group_sizes, jnp.int32)), x, weights
    )
    return y, *vjp(dy)


@pytest.mark.parametrize("group_sizes", SIZES.values(), ids=list(SIZES))
def test_output_and_gradients_match_a_loop_over_groups(group_sizes):
    x, weights, dy = draw((ROWS, INPUTS), (4, INPUTS, OUTPUTS), (ROWS, OUTPUTS))
    actual = output_and_gradients(x, weights, group_sizes, dy)
    for array, expected in zip(actual, reference(x, weights, group_sizes, dy), strict=True):
        np.testing.assert_allclose(array, expected, atol=1e-5)


def test_rows_after_the_last_group_have_no_effect():
    """Not even infinities and NaN there, in either direction."""
    group_sizes = (2, 3, 0, 4)
    x, weights, dy = draw((ROWS, INPUTS), (4, INPUTS, OUTPUTS), (ROWS, OUTPUTS))
    x[9:], dy[9:] = np.inf, np.nan
    actual = output_and_gradients(x, weights, group_sizes, dy)
    x[9:], dy[9:] = 0, 0
    for array, expected in zip(actual, reference(x, weights, group_sizes, dy), strict=True):
        np.testing.assert_allclose(array, expected, atol=1e-5)


@pytest.mark.slow
def test_bfloat16_accumulates_in_float32():
    """Thousands of products: sums in bfloat16 would be off by far more than one rounding of the
    result.
    """
    x, weights, dy = (
        jnp.asarray(array, jnp.bfloat16) for array in draw((4096, 2048), (2, 2048, 2), (4096, 2))
    )
    group_sizes = (4000, 96)
    actual = output_and_gradients(x, weights, group_sizes, dy)
    for array, expected in zip(actual, reference(x, weights, group_sizes, dy), strict=True):
        assert array.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(array, np.float64), expected, rtol=2**-8, atol=2**-10)


# The groups of two assignments of five tokens; 3 means no group.
GROUPS = np.array([[2, 0], [1, 2], [3, 3], [0, 2], [2, 1]])


def sorted_pairs(num_rows):
    """(group, assignment) of each row, in order."""
    pairs = sorted((group, assignment) for assignment, group in enumerate(GROUPS.reshape(-1)))
    return pairs[:num_rows]


@pytest.mark.parametrize("num_rows", [None, 99, 10, 8, 5, 1])
def test_sort_by_group_matches_a_python_sort(num_rows):
    permutation = sort_by_group(jnp.array(GROUPS), 3, num_rows)
    pairs = sorted_pairs(min(num_rows or 10, 10))
    np.testing.assert_array_equal(permutation.assignments, [index for _, index in pairs])
    np.testing.assert_array_equal(permutation.group_ids, [group for group, _ in pairs])
    np.testing.assert_array_equal(
        permutation.group_sizes, [sum(group == g for g, _ in pairs) for group in range(3)]
    )
    assert permutation.group_sizes.dtype == jnp.int32
    row_indices = np.asarray(permutation.row_indices).reshape(-1)
    rows = {assignment: row for row, (group, assignment) in enumerate(pairs) if group < 3}
    for assignment in range(GROUPS.size):
        if assignment in rows:
            assert row_indices[assignment] == rows[assignment]
        else:
            assert row_indices[assignment] >= len(pairs)


@pytest.mark.parametrize("custom", [True, False], ids=["gather_vjp", "autodiff"])
@pytest.mark.parametrize("num_rows", [10, 6])
def test_permute_and_unpermute_match_numpy_matrices(custom, num_rows):
    """Both are linear, so matrices give values and gradients alike."""
    forward, inverse = (
        (permute_gather_vjp, unpermute_gather_vjp) if custom else (permute, unpermute)
    )
    permutation = sort_by_group(jnp.array(GROUPS), 3, num_rows)
    tokens, rows = draw((5, INPUTS), (num_rows, INPUTS))
    permute_matrix = np.zeros((num_rows, 5), np.float32)
    unpermute_matrix = np.zeros((10, num_rows), np.float32)
    for row, (group, assignment) in enumerate(sorted_pairs(num_rows)):
        permute_matrix[row, assignment // 2] = unpermute_matrix[assignment, row] = group < 3
    y, vjp = jax.vjp(lambda tokens: forward(tokens, permutation), tokens)
    np.testing.assert_array_equal(y, permute_matrix @ tokens)
    np.testing.assert_allclose(vjp(rows)[0], permute_matrix.T @ rows, rtol=1e-6)
    y, vjp = jax.vjp(lambda rows: inverse(rows, permutation), rows)
    np.testing.assert_array_equal(y, (unpermute_matrix @ rows).reshape(5, 2, INPUTS))
    (dy,) = draw((5, 2, INPUTS), seed=1)
    np.testing.assert_allclose(vjp(dy)[0], unpermute_matrix.T @ dy.reshape(10, INPUTS), rtol=1e-6)


def test_gather_vjp_has_no_scatter():
    permutation = sort_by_group(jnp.array(GROUPS), 3)

    def program(forward, inverse):
        def loss(tokens):
            return jnp.sum(jnp.sin(inverse(jnp.sin(forward(tokens, permutation)), permutation)))

        return str(jax.make_jaxpr(jax.grad(loss))(jnp.ones((5, INPUTS))))

    assert "scatter" in program(permute, unpermute)
    assert "scatter" not in program(permute_gather_vjp, unpermute_gather_vjp)
