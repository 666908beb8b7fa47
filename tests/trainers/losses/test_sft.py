"""Log-probabilities and the loss of supervised fine-tuning, against torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from maxtext import losses
from tests.trainers.losses.compare import assert_same_loss, jax_loss

DRAW = np.random.default_rng(0)
LOGITS = DRAW.normal(size=(2, 5, 11)).astype(np.float32) * 3
TARGETS = DRAW.integers(0, 11, (2, 5))
MASK = np.array([[1, 1, 0, 1, 0], [0, 1, 1, 1, 1]])


def torch_logps(logits, temperature):
    return torch.log_softmax(logits / temperature, -1).gather(-1, torch.tensor(TARGETS)[..., None])[
        ..., 0
    ]


def test_logps_match_torch():
    weights = DRAW.normal(size=(2, 5))
    assert_same_loss(
        lambda logits: (jnp.sum(losses.logps(logits, TARGETS, 0.7) * weights), {}),
        lambda logits: (torch_logps(logits, 0.7) * torch.tensor(weights)).sum(),
        LOGITS,
    )


def test_logps_of_bfloat16_logits_are_float32():
    rounded = jnp.asarray(LOGITS, jnp.bfloat16)
    found = losses.logps(rounded, TARGETS)
    assert found.dtype == jnp.float32
    exact = torch_logps(torch.tensor(np.asarray(rounded, np.float64)), 1.0)
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-6)


def test_logps_of_extreme_logits_are_exact():
    logits = np.array([[[1e4, -1e4], [1e4, -1e4]]], np.float32)
    np.testing.assert_array_equal(losses.logps(logits, np.array([[0, 1]])), [[0.0, -2e4]])


def test_sft_matches_torch_cross_entropy():
    labels = torch.where(torch.tensor(MASK) == 1, torch.tensor(TARGETS), -100)
    assert_same_loss(
        lambda logits: losses.sft(losses.logps(logits, TARGETS), MASK),
        lambda logits: torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels),
        LOGITS,
    )


def test_sft_of_microbatches_sums_to_the_batch():
    logps = -DRAW.random((2, 5)).astype(np.float32)
    whole, metrics = losses.sft(logps, MASK)
    parts = [losses.sft(logps[[row]], MASK[[row]], tokens=metrics["tokens"])[0] for row in (0, 1)]
    assert metrics["tokens"] == 7
    np.testing.assert_allclose(sum(parts), whole, rtol=1e-6)
    np.testing.assert_allclose(whole, -(logps * MASK).sum() / 7, rtol=1e-6)


def test_sft_without_learned_tokens_is_zero():
    loss, (gradient,), metrics = jax_loss(
        lambda logps: losses.sft(logps, np.zeros((2, 5))), np.full((2, 5), -1e4)
    )
    assert loss == 0
    assert metrics["tokens"] == 0
    np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_sft_ignores_masked_values_that_are_not_finite(value):
    logps = np.where(MASK == 1, -1.5, value)
    loss, (gradient,), _ = jax_loss(lambda logps: losses.sft(logps, MASK), logps)
    assert loss == 1.5
    np.testing.assert_allclose(gradient, -MASK / 7, rtol=1e-6)


def test_sft_compiles():
    logps = np.full((2, 5), -2.0, np.float32)
    assert jax.jit(losses.sft)(logps, MASK)[0] == 2.0
