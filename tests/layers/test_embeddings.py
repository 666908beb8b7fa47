"""Look-ups against numpy indexing, and the fixed positions against their formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.common import hash_rng
from maxtext.layers.embeddings import Embedding, Positions, sinusoids
from maxtext.layers.parameters import Initializer, Template

TABLE = np.random.default_rng(0).normal(size=(11, 6)).astype(np.float32)
IDS = np.array([[0, 3, 10, 3], [7, 7, 1, 2]], np.int32)


def embedding(one_hot, dtype="float32"):
    initializer = Initializer(hash_rng.key_from_seed(0), "float32")
    return Template.of(lambda: Embedding(initializer, 11, 6, dtype, one_hot))


@pytest.mark.parametrize("one_hot", [False, True], ids=["gather", "one-hot"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_look_up(one_hot, dtype):
    x = embedding(one_hot, dtype).bind({"embedding": TABLE})(jnp.asarray(IDS))
    assert x.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(x, jnp.asarray(TABLE[IDS], dtype))


@pytest.mark.parametrize("one_hot", [False, True], ids=["gather", "one-hot"])
def test_gradient_adds_up_over_repeated_tokens(one_hot):
    back = np.random.default_rng(1).normal(size=(2, 4, 6)).astype(np.float32)
    template = embedding(one_hot)
    gradient = jax.grad(
        lambda table: jnp.vdot(template.bind({"embedding": table})(jnp.asarray(IDS)), back)
    )(TABLE)
    expected = np.zeros_like(TABLE)
    np.add.at(expected, IDS, back)
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_learned_positions():
    template = Template.of(
        lambda: Positions(Initializer(hash_rng.key_from_seed(0), "float32"), 11, 6, "float32")
    )
    np.testing.assert_array_equal(template.bind({"embedding": TABLE})(jnp.asarray(IDS)), TABLE[IDS])


@pytest.mark.parametrize("size", [8, 64])
def test_sinusoids(size):
    """sin and cos of position / 10000^(i / (n - 1)), i = 0 … n - 1, n half the width."""
    positions = np.array([[0, 1, 2, 50], [3, 0, 0, 1]])
    actual = np.asarray(sinusoids(jnp.asarray(positions), size, "float32"))
    for index in np.ndindex(positions.shape):
        for place in range(size // 2):
            angle = positions[index] / 10_000 ** (place / (size // 2 - 1))
            assert actual[index][place] == pytest.approx(np.sin(angle), abs=2e-5)
            assert actual[index][place + size // 2] == pytest.approx(np.cos(angle), abs=2e-5)
    assert sinusoids(jnp.asarray(positions), size, "bfloat16").dtype == jnp.bfloat16
