"""Distillation and divergences, against their formulas in torch."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from maxtext import losses
from tests.trainers.losses.compare import assert_same_loss, jax_loss, torch_loss

DRAW = np.random.default_rng(3)
STUDENT, TEACHER = DRAW.normal(0, 2, (2, 2, 5, 13)).astype(np.float32)
TARGETS = DRAW.integers(0, 13, (2, 5))
MASK = np.array([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]])
STUDENT_FEATURES, TEACHER_FEATURES = DRAW.normal(size=(2, 3, 2, 5, 4)).astype(np.float32)
BEST = np.argsort(-TEACHER, axis=-1)[..., :4]
BEST_LOGITS = np.take_along_axis(TEACHER, BEST, axis=-1)


def masked_mean(x):
    return (x * torch.tensor(MASK)).sum() / MASK.sum()


def cross_entropy(logits):
    log_probs = torch.log_softmax(logits, -1)
    return -masked_mean(log_probs.gather(-1, torch.tensor(TARGETS)[..., None])[..., 0])


def torch_kl(teacher, student, temperature):
    q, p = (
        torch.log_softmax(student / temperature, -1),
        torch.log_softmax(teacher / temperature, -1),
    )
    return masked_mean((p.exp() * (p - q)).sum(-1))


def torch_distill(student, indices=None):
    teacher, places = torch.tensor(TEACHER, dtype=torch.float64), student
    if indices is not None:
        teacher, places = (x.gather(-1, torch.tensor(indices)) for x in (teacher, student))
    return 0.7 * 4 * torch_kl(teacher, places, 2.0) + 0.3 * cross_entropy(student)


def test_distill_matches_formula():
    assert_same_loss(
        lambda student: losses.distill(student, TEACHER, TARGETS, MASK, alpha=0.7, temperature=2.0),
        torch_distill,
        STUDENT,
    )


def test_distill_over_places_of_the_vocabulary_matches_formula():
    assert_same_loss(
        lambda student: losses.distill(
            student, BEST_LOGITS, TARGETS, MASK, alpha=0.7, temperature=2.0, indices=BEST
        ),
        lambda student: torch_distill(student, BEST),
        STUDENT,
    )


def test_distill_metrics():
    metrics = losses.distill(STUDENT, TEACHER, TARGETS, MASK, alpha=0.7, temperature=2.0)[1]
    student, teacher = torch.tensor(STUDENT), torch.tensor(TEACHER)
    expected = {
        "soft_loss": 4 * torch_kl(teacher, student, 2.0),
        "hard_loss": cross_entropy(student),
        "teacher_loss": cross_entropy(teacher),
        "kl": torch_kl(teacher, student, 2.0),
        "kl_temperature_1": torch_kl(teacher, student, 1.0),
        "tokens": 7,
    }
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    offline = losses.distill(STUDENT, BEST_LOGITS, TARGETS, MASK, indices=BEST)[1]
    assert "teacher_loss" not in offline


@pytest.mark.parametrize("kind", ["cosine", "l2"])
def test_feature_loss_matches_formula(kind):
    def formula(features):
        teacher = torch.tensor(TEACHER_FEATURES, dtype=torch.float64)
        if kind == "l2":
            return masked_mean((features - teacher).square().mean((0, -1)))
        return masked_mean(1 - torch.cosine_similarity(features, teacher, dim=-1).mean(0))

    def loss(features):
        return losses.distill(
            TEACHER,
            TEACHER,
            TARGETS,
            MASK,
            alpha=1.0,
            beta=1.0,
            student_features=features,
            teacher_features=TEACHER_FEATURES,
            feature_loss=kind,
        )

    assert_same_loss(loss, formula, STUDENT_FEATURES)
    _, (gradient,), metrics = jax_loss(loss, STUDENT_FEATURES * 0)  # norms of 0
    assert np.isfinite(gradient).all()
    np.testing.assert_allclose(
        metrics["feature_loss"], torch_loss(formula, STUDENT_FEATURES * 0)[0], rtol=1e-5
    )


def test_student_of_itself_learns_the_targets_alone():
    loss, (gradient,), metrics = jax_loss(
        lambda x: losses.distill(x, TEACHER, TARGETS, MASK, alpha=1.0, temperature=3.0), TEACHER
    )
    np.testing.assert_allclose(loss, 0, atol=1e-6)
    np.testing.assert_allclose(gradient, 0, atol=1e-6)
    np.testing.assert_allclose(metrics["hard_loss"], metrics["teacher_loss"], rtol=1e-6)


def torch_divergence(student, beta):
    s = torch.softmax(student / 1.5, -1)
    t = torch.softmax(torch.tensor(TEACHER, dtype=torch.float64) / 1.5, -1)
    if beta in (0.0, 1.0):
        p, q = (t, s) if beta == 0.0 else (s, t)
        return masked_mean((p * (p / q).log()).sum(-1))
    m = beta * t + (1 - beta) * s
    forward, reverse = (t * (t / m).log()).sum(-1), (s * (s / m).log()).sum(-1)
    return masked_mean(beta * forward + (1 - beta) * reverse)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_divergence_matches_formula(beta):
    assert_same_loss(
        lambda student: (
            losses.divergence(student, TEACHER, MASK, beta=beta, temperature=1.5),
            {},
        ),
        lambda student: torch_divergence(student, beta),
        STUDENT,
    )


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_divergence_ignores_logits_of_minus_infinity(beta):
    """A padded vocabulary: neither side has probability there."""
    padding = ((0, 0), (0, 0), (0, 3))
    padded = [np.pad(x, padding, constant_values=-np.inf) for x in (STUDENT, TEACHER)]

    def run(student, teacher):
        return losses.divergence(student, teacher, MASK, beta=beta), {}

    loss, (gradient,), _ = jax_loss(lambda x: run(x, padded[1]), padded[0])
    expected_loss, (expected,), _ = jax_loss(lambda x: run(x, TEACHER), STUDENT)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    np.testing.assert_allclose(gradient[..., :13], expected, rtol=1e-5, atol=1e-8)
    np.testing.assert_array_equal(gradient[..., 13:], 0)


def test_microbatches_sum_to_the_batch():
    features = dict(beta=0.5, feature_loss="l2")

    def run(some, **tokens):
        loss, metrics = losses.distill(
            STUDENT[some],
            TEACHER[some],
            TARGETS[some],
            MASK[some],
            student_features=STUDENT_FEATURES[:, some],
            teacher_features=TEACHER_FEATURES[:, some],
            **features,
            **tokens,
        )
        divergence = losses.divergence(STUDENT[some], TEACHER[some], MASK[some], **tokens)
        return {"loss": loss, "divergence": divergence, **metrics}

    whole = run(slice(None))
    parts = [run(slice(row, row + 1), tokens=7) for row in (0, 1)]
    for name, value in whole.items():
        np.testing.assert_allclose(parts[0][name] + parts[1][name], value, rtol=1e-5, err_msg=name)


def test_masked_logits_do_not_reach_the_gradient():
    hole = np.where(MASK == 1, 0, np.nan)[..., None]
    for run in (
        lambda x, teacher: losses.distill(x, teacher, TARGETS, MASK),
        lambda x, teacher: (losses.divergence(x, teacher, MASK, beta=0.5), {}),
    ):
        expected_loss, (expected,), _ = jax_loss(lambda x, run=run: run(x, TEACHER), STUDENT)
        loss, (gradient,), _ = jax_loss(lambda x, run=run: run(x, TEACHER + hole), STUDENT + hole)
        assert loss == expected_loss
        np.testing.assert_array_equal(gradient, expected)


def test_no_learned_tokens_and_bfloat16():
    loss, (gradient,), _ = jax_loss(
        lambda x: losses.distill(x, TEACHER, TARGETS, MASK * 0), STUDENT
    )
    assert loss == 0
    np.testing.assert_array_equal(gradient, 0)
    rounded = [jnp.asarray(x, jnp.bfloat16) for x in (STUDENT, TEACHER)]
    found = losses.distill(*rounded, TARGETS, MASK)[0]
    exact = losses.distill(*(x.astype(jnp.float32) for x in rounded), TARGETS, MASK)[0]
    assert found.dtype == jnp.float32
    assert found == exact


def test_extreme_logits_give_finite_gradients():
    loss, (gradient,), _ = jax_loss(
        lambda x: losses.distill(x, TEACHER * 1e4, TARGETS, MASK, temperature=0.5), STUDENT * 1e4
    )
    assert np.isfinite(loss)
    assert np.isfinite(gradient).all()


def test_weights_may_be_traced():
    @jax.jit
    def run(step):
        alpha = losses.anneal(step, 10, 0.0, 0.7, "linear")
        temperature = losses.anneal(step, 10, 1.0, 2.0, "cosine")
        return losses.distill(
            STUDENT, TEACHER, TARGETS, MASK, alpha=alpha, temperature=temperature
        )[0]

    np.testing.assert_allclose(run(10), torch_distill(torch.tensor(STUDENT)), rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "end", "expected"),
    [
        ("constant", 4.0, [1, 1, 1, 1]),
        ("linear", None, [1, 1, 1, 1]),
        ("linear", 4.0, [1, 1.75, 4, 4]),
        ("cosine", 4.0, [1, 4 - 3 * (1 + math.sqrt(0.5)) / 2, 4, 4]),
    ],
)
def test_anneal(kind, end, expected):
    found = [losses.anneal(step, 8, 1.0, end, kind) for step in (0, 2, 8, 9)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("give student_features", {"beta": 0.1}),
        (
            "is not one of cosine",
            {"student_features": STUDENT_FEATURES, "teacher_features": TEACHER_FEATURES}
            | {"feature_loss": "l1"},
        ),
        (
            "shapes .* differ",
            {"student_features": STUDENT_FEATURES, "teacher_features": TEACHER_FEATURES[:1]},
        ),
    ],
)
def test_rejects_contradicting_options(message, options):
    with pytest.raises(ValueError, match=message):
        losses.distill(STUDENT, TEACHER, TARGETS, MASK, **options)


def test_rejects_unknown_schedules_and_weights():
    with pytest.raises(ValueError, match="is not one of constant"):
        losses.anneal(0, 1, 0.0, 1.0, "square")
    with pytest.raises(ValueError, match=r"not in \[0, 1\]"):
        losses.divergence(STUDENT, TEACHER, MASK, beta=1.5)
