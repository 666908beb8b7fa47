"""Moments of the normal distribution, and independence of neighbours and keys."""

import jax
import numpy as np
import pytest
from scipy import stats

from maxtext.common import hash_rng


@pytest.mark.parametrize(
    "shape", [(1 << 18,), (512, 512), (64, 64, 64), (1 << 18, 1), (1, 1 << 18)]
)
def test_standard_normal(shape):
    x = np.asarray(hash_rng.normal(hash_rng.key_from_seed(3), shape)).astype(np.float64)
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
    x = np.asarray(hash_rng.normal(hash_rng.key_from_seed(0), (1 << 18,), truncation=2.0))
    assert np.abs(x).max() <= 2
    assert stats.kstest(x, stats.truncnorm(-2, 2).cdf).pvalue > 1e-4


def test_gumbel():
    x = np.asarray(hash_rng.gumbel(hash_rng.key_from_seed(5), (1 << 20,)))
    assert stats.kstest(x, "gumbel_r").pvalue > 1e-4
    # The largest of n values exceeds their expected maximum, log n, about as often as it should.
    largest = x.reshape(1 << 10, -1).max(axis=1) - np.log(1 << 10)
    assert stats.kstest(largest, "gumbel_r").pvalue > 1e-4


@pytest.mark.parametrize("bits", [0, 1, 2**31, 2**32 - 129, 2**32 - 1])
def test_gumbel_is_finite(monkeypatch, bits):
    monkeypatch.setattr(hash_rng, "mix_bits", lambda _: np.array([bits], np.uint32))
    x = float(hash_rng.gumbel(np.zeros(2, np.uint32), (1,))[0])
    share = min((bits + 0.5) / 2**32, 1 - 2**-24)
    np.testing.assert_allclose(x, -np.log(-np.log1p(-share)), rtol=1e-5)


def test_noise_of_one_key_is_no_shifted_copy_of_another():
    """Although the bits of these keys are."""
    size, golden = 1 << 14, int(hash_rng.GOLDEN)
    keys = np.array([[100 ^ 7, 7], [(100 + golden) % 2**32 ^ 8, 8]], np.uint32)
    first, second = (np.asarray(hash_rng.random_bits(key, (size,))) for key in keys)
    assert (first[1:] == second[:-1]).all()
    first, second = (np.asarray(hash_rng.gumbel(key, (size,))) for key in keys)
    for shift in (0, 1, 2):
        correlation = np.corrcoef(first[shift:], second[: size - shift])[0, 1]
        assert abs(correlation) < 5 / np.sqrt(size)


def test_keys_are_distinct_and_uncorrelated():
    key = hash_rng.key_from_seed(0)
    keys = [hash_rng.key_from_seed(1), hash_rng.key_from_seed(1 << 32)] + [
        hash_rng.fold_in(key, number) for number in range(20)
    ]
    keys += [
        hash_rng.fold_in(hash_rng.fold_in(key, 1), 2),
        hash_rng.fold_in(hash_rng.fold_in(key, 2), 1),
    ]
    assert len({tuple(np.asarray(key).tolist()) for key in keys}) == len(keys)
    samples = np.stack([np.asarray(hash_rng.normal(key, (1 << 14,))) for key in keys])
    correlation = np.corrcoef(samples) - np.eye(len(keys))
    assert np.abs(correlation).max() < 5 / np.sqrt(1 << 14)


def test_bits_are_balanced():
    bits = np.asarray(hash_rng.random_bits(hash_rng.key_from_seed(7), (1 << 10, 1 << 8)))
    for position in range(32):
        assert abs(((bits >> position) & 1).mean() - 0.5) < 5 * 0.5 / np.sqrt(bits.size)


def test_interval_excludes_its_ends():
    extremes = np.array([0, 1, 2**32 - 1, 2**31, 2**31 - 1], np.uint32)
    x = np.asarray(hash_rng.open_interval(extremes))
    assert np.all(np.abs(x) < 1)
    assert x[0] == -x[2]
    assert x[3] == -x[4] > 0


def test_vmap_and_jit_give_the_same_numbers():
    keys = np.stack(
        [np.asarray(hash_rng.fold_in(hash_rng.key_from_seed(0), number)) for number in range(3)]
    )
    batched = jax.jit(jax.vmap(lambda key: hash_rng.normal(key, (5, 7))))(keys)
    for key, expected in zip(keys, batched, strict=True):
        np.testing.assert_array_equal(hash_rng.normal(key, (5, 7)), expected)
