"""Functions of tokens, a part of each row at a time, against NumPy over whole rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.trainers.model_losses import map_tiles, sum_tiles

ROWS, LENGTH, WIDTH = 2, 6, 3
X = np.random.default_rng(0).normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
MASK = (np.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % 3 != 0).astype(np.float32)


@pytest.mark.parametrize("tiles", [1, 2, 3])
def test_tokens_keep_their_rows_and_positions(tiles):
    doubled, norms = map_tiles(lambda x: (2 * x, jnp.sum(x**2, axis=-1)), tiles, X)
    np.testing.assert_array_equal(doubled, 2 * X)
    np.testing.assert_allclose(norms, np.sum(X**2, axis=-1), rtol=1e-6)


@pytest.mark.parametrize("tiles", [1, 2, 3])
def test_sums_and_their_gradients_are_over_all_tokens(tiles):
    def total(x):
        sums = sum_tiles(
            lambda x, mask: {"squares": jnp.sum(x**2 * mask[..., None]), "count": jnp.sum(mask)},
            tiles,
            x,
            MASK,
        )
        return sums["squares"], sums["count"]

    (squares, count), gradient = jax.value_and_grad(total, has_aux=True)(X)
    assert count == MASK.sum()
    np.testing.assert_allclose(squares, np.sum(X**2 * MASK[..., None]), rtol=1e-6)
    np.testing.assert_allclose(gradient, 2 * X * MASK[..., None], rtol=1e-6)
