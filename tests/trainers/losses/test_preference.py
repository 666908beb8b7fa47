"""Losses over pairs of completions, against their formulas in torch."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from maxtext import losses
from maxtext.trainers.losses.preference import log1mexp
from tests.trainers.losses.compare import assert_same_loss, jax_loss

DRAW = np.random.default_rng(1)
CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED = DRAW.normal(-12, 3, (4, 5)).astype(np.float32).round(3)
REFERENCE = (REF_CHOSEN, REF_REJECTED)
CHOSEN_LENGTHS, REJECTED_LENGTHS = np.array([3, 9, 5, 1, 7]), np.array([4, 2, 6, 8, 5])
LENGTHS = {"chosen_lengths": CHOSEN_LENGTHS, "rejected_lengths": REJECTED_LENGTHS}
BETA, SMOOTHING, GAMMA = 0.3, 0.15, 0.8


def smoothed(margin):
    return -(1 - SMOOTHING) * logsigmoid(margin) - SMOOTHING * logsigmoid(-margin)


def torch_kto(c, r):
    chosen_kl, rejected_kl = r.mean().clamp(min=0).detach(), c.mean().clamp(min=0).detach()
    chosen = 1 - torch.sigmoid(BETA * (c - chosen_kl))
    rejected = 1 - torch.sigmoid(BETA * (rejected_kl - r))
    return torch.cat([chosen, rejected])


# The loss of each pair from the log-ratios c and r of policy and reference, and further options.
FORMULAS = {
    "sigmoid": (lambda c, r: smoothed(BETA * (c - r)), {"label_smoothing": SMOOTHING}),
    "hinge": (lambda c, r: torch.relu(1 - BETA * (c - r)), {}),
    "ipo": (
        lambda c, r: (
            (c / torch.tensor(CHOSEN_LENGTHS) - r / torch.tensor(REJECTED_LENGTHS) - 1 / (2 * BETA))
            ** 2
        ),
        LENGTHS,
    ),
    "robust": (
        lambda c, r: (
            (
                -(1 - SMOOTHING) * logsigmoid(BETA * (c - r))
                + SMOOTHING * logsigmoid(-BETA * (c - r))
            )
            / (1 - 2 * SMOOTHING)
        ),
        {"label_smoothing": SMOOTHING},
    ),
    "kto": (torch_kto, {}),
    "apo_zero": (lambda c, r: 1 - torch.sigmoid(BETA * c) + torch.sigmoid(BETA * r), {}),
    "apo_down": (lambda c, r: torch.sigmoid(BETA * c) + 1 - torch.sigmoid(BETA * (c - r)), {}),
}


@pytest.mark.parametrize("loss_type", FORMULAS)
def test_loss_and_gradient_match_formula(loss_type):
    formula, options = FORMULAS[loss_type]
    assert_same_loss(
        lambda c, r: losses.dpo(c, r, *REFERENCE, beta=BETA, loss_type=loss_type, **options),
        lambda c, r: formula(c - torch.tensor(REF_CHOSEN), r - torch.tensor(REF_REJECTED)).mean(),
        CHOSEN,
        REJECTED,
    )


def test_simpo_matches_formula():
    def formula(c, r):
        means = c / torch.tensor(CHOSEN_LENGTHS) - r / torch.tensor(REJECTED_LENGTHS)
        return smoothed(BETA * means - GAMMA).mean()

    options = dict(beta=BETA, gamma=GAMMA, label_smoothing=SMOOTHING, **LENGTHS)
    assert_same_loss(
        lambda c, r: losses.dpo(c, r, loss_type="simpo", **options), formula, CHOSEN, REJECTED
    )
    metrics = losses.dpo(CHOSEN, REJECTED, loss_type="simpo", **options)[1]
    np.testing.assert_allclose(
        metrics["rewards/chosen"], BETA * np.mean(CHOSEN / CHOSEN_LENGTHS), rtol=1e-5
    )


def test_dpo_without_reference_matches_formula():
    assert_same_loss(
        lambda c, r: losses.dpo(c, r, beta=BETA),
        lambda c, r: -logsigmoid(BETA * (c - r)).mean(),
        CHOSEN,
        REJECTED,
    )


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [("sigmoid", math.log(2)), ("hinge", 1.0), ("kto", 0.5), ("apo_zero", 1.0), ("ipo", 25.0)],
)
def test_loss_of_a_policy_that_equals_the_reference(loss_type, expected):
    loss, metrics = losses.dpo(*REFERENCE, *REFERENCE, loss_type=loss_type, **LENGTHS)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert metrics["rewards/margins"] == metrics["rewards/accuracies"] == 0


def test_dpo_metrics():
    metrics = losses.dpo(
        np.array([-1.0, -4.0]),
        np.array([-3.0, -2.0]),
        np.array([-2.0, -2.0]),
        np.zeros(2),
        beta=0.5,
    )[1]
    assert {name: float(value) for name, value in metrics.items()} == {
        "logps/chosen": -2.5,
        "logps/rejected": -2.5,
        "rewards/chosen": -0.25,  # log-ratios 1 and -2
        "rewards/rejected": -1.25,  # log-ratios -3 and -2
        "rewards/margins": 1.0,
        "rewards/accuracies": 0.5,  # 1 > -3, but -2 = -2
    }


def test_dpo_of_extreme_log_probabilities_is_finite():
    chosen, rejected = np.array([0.0, -1e4, 0.0]), np.array([-1e4, 0.0, 0.0])
    loss, gradients, _ = jax_loss(lambda c, r: losses.dpo(c, r, beta=0.1), chosen, rejected)
    np.testing.assert_allclose(loss, (0 + 1000 + math.log(2)) / 3, rtol=1e-6)
    np.testing.assert_allclose(gradients[0], np.array([0, -0.1, -0.05]) / 3, rtol=1e-6)
    np.testing.assert_allclose(gradients[1], np.array([0, 0.1, 0.05]) / 3, rtol=1e-6)


@pytest.mark.parametrize("loss_type", FORMULAS)
def test_padding_pairs_do_not_count(loss_type):
    options = {"beta": BETA, "loss_type": loss_type} | FORMULAS[loss_type][1]
    padded = [np.append(array, np.nan) for array in (CHOSEN, REJECTED, *REFERENCE)]
    lengths = {name: np.append(value, 0) for name, value in LENGTHS.items() if name in options}
    mask = np.array([1, 1, 1, 1, 1, 0])
    loss, gradients, metrics = jax_loss(
        lambda c, r: losses.dpo(c, r, *padded[2:], mask=mask, **options | lengths), *padded[:2]
    )
    expected, expected_metrics = losses.dpo(CHOSEN, REJECTED, *REFERENCE, **options)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for name, value in expected_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    for gradient in gradients:
        assert np.isfinite(gradient).all()
        assert gradient[-1] == 0


def test_dpo_of_microbatches_sums_to_the_batch():
    def run(some, **rows):
        arrays = (array[some] for array in (CHOSEN, REJECTED, *REFERENCE))
        loss, metrics = losses.dpo(*arrays, beta=BETA, **rows)
        return {"loss": loss, **metrics}

    whole = run(slice(None))
    parts = [run(slice(0, 2), num_pairs=5), run(slice(2, 5), num_pairs=5)]
    for name, value in whole.items():
        np.testing.assert_allclose(parts[0][name] + parts[1][name], value, rtol=2e-5, err_msg=name)


def test_pairs_without_any_row_give_zero():
    for loss, gradients, _ in (
        jax_loss(lambda c, r: losses.dpo(c, r, mask=np.zeros(5)), CHOSEN, REJECTED),
        jax_loss(lambda c, r: losses.orpo(c, r, 0.0, mask=np.zeros(5)), CHOSEN, REJECTED),
    ):
        assert loss == 0
        np.testing.assert_array_equal(gradients, 0)


def test_bfloat16_inputs_are_computed_in_float32():
    rounded = [jnp.asarray(array, jnp.bfloat16) for array in (CHOSEN, REJECTED, *REFERENCE)]
    loss, metrics = losses.dpo(*rounded, beta=BETA)
    c, r, ref_c, ref_r = (torch.tensor(np.asarray(array, np.float64)) for array in rounded)
    expected = -logsigmoid(BETA * ((c - ref_c) - (r - ref_r))).mean()
    assert loss.dtype == metrics["logps/chosen"].dtype == jnp.float32
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("not one of sigmoid, hinge", {"loss_type": "sigmoidal"}),
        ("given together", {"ref_chosen": REF_CHOSEN}),
        ("needs chosen_lengths", {"loss_type": "ipo"}),
        ("has no reference", {"loss_type": "simpo", "ref_chosen": 0, "ref_rejected": 0} | LENGTHS),
        ("has no label_smoothing", {"loss_type": "hinge", "label_smoothing": 0.1}),
        ("not below 0.5", {"loss_type": "robust", "label_smoothing": 0.5}),
        (r"not in \[0, 1\]", {"label_smoothing": -0.1}),
    ],
)
def test_rejects_contradicting_options(message, options):
    with pytest.raises(ValueError, match=message):
        losses.dpo(CHOSEN, REJECTED, **options)


# ORPO: means of log-probabilities.

CHOSEN_MEANS, REJECTED_MEANS = -DRAW.random((2, 5)).astype(np.float32) * 3 - 0.02


def torch_orpo(c, r, nll):
    odds = (c - r) - (torch.log(-torch.expm1(c)) - torch.log(-torch.expm1(r)))
    return nll + 0.2 * smoothed(odds).mean()


def test_orpo_matches_formula():
    assert_same_loss(
        lambda c, r, nll: losses.orpo(c, r, nll, weight=0.2, label_smoothing=SMOOTHING),
        torch_orpo,
        CHOSEN_MEANS,
        REJECTED_MEANS,
        1.25,
    )


def test_orpo_metrics():
    half, quarter = math.log(0.5), math.log(0.25)  # odds 1 and 1/3
    loss, metrics = losses.orpo(np.array([half]), np.array([quarter]), 2.0, weight=0.1)
    expected = {
        "nll_loss": 2.0,
        "log_odds_chosen": math.log(3),
        "log_odds_ratio": math.log(0.75),
        "logps/chosen": half,
        "logps/rejected": quarter,
        "rewards/chosen": 0.1 * half,
        "rewards/rejected": 0.1 * quarter,
        "rewards/margins": 0.1 * (half - quarter),
        "rewards/accuracies": 1.0,
    }
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(loss, 2.0 - 0.1 * math.log(0.75), rtol=1e-6)


def test_orpo_of_extreme_log_probabilities_is_finite():
    chosen, rejected = np.array([0.0, -1e4, -1e-9]), np.array([-1e4, 0.0, -1e-9])
    loss, gradients, metrics = jax_loss(
        lambda c, r: losses.orpo(c, r, 0.0, weight=1.0), chosen, rejected
    )
    log_odds = 1e4 - math.log(1e-7)  # of a probability of 1 - 1e-7 against exp(-1e4)
    np.testing.assert_allclose(loss, (0 + log_odds + math.log(2)) / 3, rtol=1e-5)
    assert np.isfinite(gradients).all()
    assert all(np.isfinite(value) for value in metrics.values())


def test_orpo_of_microbatches_sums_to_the_batch():
    mask = np.array([1, 1, 0, 1, 1])  # the third pair is padding
    padded = np.where(mask == 1, CHOSEN_MEANS, np.nan)
    whole = losses.orpo(padded, REJECTED_MEANS, 1.0, mask=mask)[0]
    some = slice(0, 3), slice(3, 5)
    parts = [
        losses.orpo(padded[at], REJECTED_MEANS[at], 0.5, mask=mask[at], num_pairs=4)[0]
        for at in some
    ]
    np.testing.assert_allclose(sum(parts), whole, rtol=1e-6)


def test_log1mexp_is_accurate_near_zero_and_far_from_it():
    x = np.array([-1e-7, -1e-3, -0.5, -0.69, -0.7, -3.0, -15.0, -1e4], np.float32)
    exact = np.log(-np.expm1(x.astype(np.float64)))
    np.testing.assert_allclose(log1mexp(jnp.asarray(x)), exact, rtol=1e-6)
    assert np.isfinite(jax.vmap(jax.grad(log1mexp))(jnp.asarray(x))).all()
