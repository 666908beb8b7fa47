"""Clipping against torch.nn.utils.clip_grad_norm_."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from maxtext.optimizers import clip_by_global_norm


def some_gradients(scale=1.0):
    rng = np.random.default_rng(0)
    return {"a": [scale * rng.normal(size=(3, 4))], "b": {"c": scale * rng.normal(size=7)}}


def leaves(tree):
    return [tree["a"][0], tree["b"]["c"]]


def in_jax(tree, dtype=jnp.float32):
    return {"a": [jnp.asarray(tree["a"][0], dtype)], "b": {"c": jnp.asarray(tree["b"]["c"], dtype)}}


@pytest.mark.parametrize(
    ("scale", "threshold"), [(1.0, 1.0), (1.0, 0.03), (1e-3, 0.7), (50.0, 2.5)]
)
def test_clipping_equals_torch(scale, threshold):
    gradients = some_gradients(scale)
    parameters = []
    for gradient in leaves(gradients):
        parameters.append(torch.zeros(gradient.shape, dtype=torch.float64, requires_grad=True))
        parameters[-1].grad = torch.tensor(gradient)
    raw = float(torch.nn.utils.clip_grad_norm_(parameters, threshold))
    after = float(torch.sqrt(sum((parameter.grad**2).sum() for parameter in parameters)))

    clipped, raw_norm, norm_after = clip_by_global_norm(in_jax(gradients), threshold)
    # torch divides by norm + 1e-6, hence the tolerance.
    for actual, parameter in zip(leaves(clipped), parameters, strict=True):
        np.testing.assert_allclose(actual, parameter.grad.numpy(), rtol=3e-6)
    assert float(raw_norm) == pytest.approx(raw, rel=1e-6)
    assert float(norm_after) == pytest.approx(after, rel=3e-6)


def test_threshold_zero_disables_clipping():
    gradients = in_jax(some_gradients(100.0))
    clipped, raw_norm, norm_after = clip_by_global_norm(gradients, 0)
    for actual, given in zip(leaves(clipped), leaves(gradients), strict=True):
        np.testing.assert_array_equal(actual, given)
    assert float(raw_norm) == float(norm_after) > 100


def test_bfloat16_gradients_are_summed_in_float32():
    # 70,000 ones: a bfloat16 sum would stop at 256.
    clipped, raw_norm, norm_after = clip_by_global_norm(
        {"w": jnp.ones((70_000,), jnp.bfloat16)}, 1.0
    )
    assert raw_norm.dtype == norm_after.dtype == jnp.float32
    assert float(raw_norm) == pytest.approx(70_000**0.5, rel=1e-6)
    assert float(norm_after) == pytest.approx(1.0, rel=1e-6)
    assert clipped["w"].dtype == jnp.bfloat16


def test_zero_gradients_have_no_nan():
    clipped, raw_norm, norm_after = clip_by_global_norm({"w": jnp.zeros(3)}, 1.0)
    assert float(raw_norm) == float(norm_after) == 0.0
    np.testing.assert_array_equal(clipped["w"], np.zeros(3))


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_nonfinite_norm_stays_nonfinite(bad):
    _, raw_norm, norm_after = clip_by_global_norm({"w": jnp.asarray([1.0, bad])}, 1.0)
    assert not np.isfinite(raw_norm)
    assert not np.isfinite(norm_after)
