"""Moments of the normal distribution, and that neighbours, keys and places do not resemble each
other.
"""

import jax
import numpy as np
import pytest
from scipy import stats

from maxtext.common import noise


@pytest.mark.parametrize(
    "shape", [(1 << 18,), (512, 512), (64, 64, 64), (1 << 18, 1), (1, 1 << 18)]
)
def test_standard_normal(shape):
    x = np.asarray(noise.normal(noise.seed_key(3), shape)).astype(np.float64)
    n = x.size
    assert abs(x.mean()) < 5 / np.sqrt(n)
    assert abs(x.var() - 1) < 5 * np.sqrt(2 / n)
    assert abs((x**4).mean() - 3) < 5 * np.sqrt(96 / n)
    assert stats.kstest(x.ravel(), "norm").pvalue > 1e-4
    for axis, size in enumerate(shape):
        for lag in (1, 2, 16):
            if size > lag:
                pairs = np.take(x, range(size - lag), axis) * np.take(x, range(lag, size), axis)
                assert abs(pairs.mean()) < 5 / np.sqrt(pairs.size)


def test_truncated_normal():
    x = np.asarray(noise.normal(noise.seed_key(0), (1 << 18,), cut=2.0))
    assert np.abs(x).max() <= 2
    assert stats.kstest(x, stats.truncnorm(-2, 2).cdf).pvalue > 1e-4


def test_keys_differ_and_are_unrelated():
    key = noise.seed_key(0)
    keys = [noise.seed_key(1), noise.seed_key(1 << 32)] + [
        noise.fold(key, number) for number in range(20)
    ]
    keys += [noise.fold(noise.fold(key, 1), 2), noise.fold(noise.fold(key, 2), 1)]
    assert len({tuple(np.asarray(one).tolist()) for one in keys}) == len(keys)
    samples = np.stack([np.asarray(noise.normal(one, (1 << 14,))) for one in keys])
    correlation = np.corrcoef(samples) - np.eye(len(keys))
    assert np.abs(correlation).max() < 5 / np.sqrt(1 << 14)


def test_bits_are_balanced():
    bits = np.asarray(noise.random_bits(noise.seed_key(7), (1 << 10, 1 << 8)))
    for place in range(32):
        assert abs(((bits >> place) & 1).mean() - 0.5) < 5 * 0.5 / np.sqrt(bits.size)


def test_no_number_reaches_the_ends():
    extremes = np.array([0, 1, 2**32 - 1, 2**31, 2**31 - 1], np.uint32)
    x = np.asarray(noise.open_interval(extremes))
    assert np.all(np.abs(x) < 1)
    assert x[0] == -x[2]
    assert x[3] == -x[4] > 0


def test_the_same_under_vmap_and_jit():
    keys = np.stack([np.asarray(noise.fold(noise.seed_key(0), number)) for number in range(3)])
    together = jax.jit(jax.vmap(lambda key: noise.normal(key, (5, 7))))(keys)
    for key, one in zip(keys, together, strict=True):
        np.testing.assert_array_equal(noise.normal(key, (5, 7)), one)
