"""Rows that share their first tokens, folded into one row."""

import jax
import numpy as np

from maxtext.layers.inputs import SharedPrefix

PREFIX = SharedPrefix(rows=2, length=2, row_length=4)
ROWS = np.array([[1, 2, 3, 4], [1, 2, 5, 6], [7, 8, 9, 10], [7, 8, 11, 12]])
FOLDED = np.array([[1, 2, 3, 4, 5, 6, 0, 0], [7, 8, 9, 10, 11, 12, 0, 0]])  # a multiple of 8


def test_shared_tokens_are_there_once():
    np.testing.assert_array_equal(PREFIX.fold(ROWS), FOLDED)
    np.testing.assert_array_equal(PREFIX.unfold(FOLDED), ROWS)
    np.testing.assert_array_equal(PREFIX.others(FOLDED), ROWS[:, 2:])


def test_gradients_of_shared_tokens_are_summed_over_the_rows():
    x = np.random.default_rng(0).standard_normal((2, 8, 3)).astype(np.float32)
    scale = np.arange(48, dtype=np.float32).reshape(4, 4, 3)
    gradient = jax.grad(lambda x: (PREFIX.unfold(x) * scale).sum())(x)
    np.testing.assert_allclose(gradient[:, :2], scale.reshape(2, 2, 4, 3)[:, :, :2].sum(1))
    np.testing.assert_allclose(PREFIX.others(gradient), scale[:, 2:])
    np.testing.assert_array_equal(gradient[:, 6:], 0)
