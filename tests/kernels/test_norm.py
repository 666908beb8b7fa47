"""Norms against closed forms in numpy, and the kernel that goes back against autodiff."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.common.errors import ConfigError
from maxtext.kernels import norm

EPSILON = 1e-5
ON_GPU = jax.default_backend() == "gpu"


def problem(lines, width, dtype=jnp.float32):
    random = np.random.default_rng(0)
    x, gradient, added = (jnp.asarray(random.normal(size=(lines, width)) * 3, dtype) for _ in range(3))
    return x, jnp.asarray(random.normal(size=width), jnp.float32), gradient, added


def simply(x, scale):
    """By the definition, differentiated by JAX."""
    x = x.astype(jnp.float32)
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + EPSILON) * scale


@pytest.fixture
def kernel(monkeypatch):
    """As on a GPU, and where there is none, interpreted."""
    for name in ("normed_rows", "back"):
        monkeypatch.setattr(norm, name, partial(getattr(norm, name), interpret=not ON_GPU))
    return "gpu"


@pytest.mark.parametrize("platform", [None, "gpu"])
@pytest.mark.parametrize("width", [128, 384, 2048])
def test_beside(kernel, width, platform):
    x, scale, gradient, added = problem(256, width)

    def ours(x, scale):
        return norm.beside(x, scale, EPSILON, jnp.float32, platform)

    results, pull = jax.vjp(ours, x, scale)
    expected, pull_simply = jax.vjp(lambda x, scale: (x, simply(x, scale)), x, scale)
    for found, right in zip(
        (*results, *pull((added, gradient))), (*expected, *pull_simply((added, gradient))), strict=True
    ):
        np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-5 * np.abs(right).max())


def test_both_ways_back_are_the_same_in_bfloat16(kernel):
    """But for the last digit, since one rounds the gradient before it is added."""
    x, scale, gradient, added = problem(128, 256, jnp.bfloat16)

    def back(platform):
        _, pull = jax.vjp(lambda x, scale: norm.beside(x, scale, EPSILON, jnp.bfloat16, platform), x, scale)
        return pull((added, gradient))

    (of_x, of_scale), (expected, expected_of_scale) = back(kernel), back(None)
    assert of_x.dtype == jnp.bfloat16
    np.testing.assert_allclose(of_x.astype(np.float32), expected.astype(np.float32), rtol=2**-7, atol=0.05)
    np.testing.assert_allclose(of_scale, expected_of_scale, rtol=1e-4, atol=1e-4)


def test_a_factor_for_each_row(kernel):
    x, scale, gradient, added = problem(128, 256)
    inverse = 1 / np.sqrt(np.mean(np.square(x), axis=1) + EPSILON)
    factor = jnp.asarray(2.0 ** np.random.default_rng(1).integers(-4, 5, 128), jnp.float32)
    found = norm.back(x, gradient, added, jnp.asarray(inverse), scale, factor)
    expected = norm.back(x, gradient * factor[:, None], added, jnp.asarray(inverse), scale)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_largest_of_each_row(kernel):
    x, scale, gradient, added = problem(128, 384)
    found, _, largest = norm.back(x, gradient, added, jnp.ones(128), scale)
    np.testing.assert_allclose(largest, np.abs(found).max(axis=1), rtol=1e-6)


@pytest.mark.parametrize(
    ("shape", "platform", "able"),
    [((2, 64, 128), "gpu", True), ((2, 64, 128), None, False), ((3, 64, 128), "gpu", False),
     ((2, 64, 96), "gpu", False), ((128, 65536), "gpu", False), ((2**20, 2048), "gpu", False)],
)  # fmt: skip
def test_what_the_kernel_takes(shape, platform, able, monkeypatch):
    assert norm.supports(shape, platform) is able
    monkeypatch.setenv("MAXTEXT_KERNELS", "plain")
    assert not norm.supports(shape, platform)
    monkeypatch.setenv("MAXTEXT_KERNELS", "fast")
    with pytest.raises(ConfigError, match="MAXTEXT_KERNELS=fast .* say plain"):
        norm.supports(shape, platform)


def test_it_can_be_lowered_for_gpus():
    x, scale = jax.ShapeDtypeStruct((256, 1408), "bfloat16"), jax.ShapeDtypeStruct((1408,), "float32")

    def program(x, scale):
        y, pull = jax.vjp(lambda x, scale: norm.beside(x, scale, EPSILON, jnp.bfloat16, "gpu"), x, scale)
        return pull(y)

    text = jax.jit(program).trace(x, scale).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == 2
