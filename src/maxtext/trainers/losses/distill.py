"""Losses that train a student on the logits of a teacher, and the schedules of their weights.

Shapes: B batch, T tokens, V vocabulary, K entries of the vocabulary, L layers, D features.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from maxtext.trainers.losses.common import (
    Scalar,
    check_choice,
    constant,
    divisor,
    float32,
    logps,
    masked,
    masked_sum,
)

MIN_NORM = 1e-6
MIN_LOG_PROB = -1e30


def distill(
    student: ArrayLike,
    teacher: ArrayLike,
    targets: Array,
    mask: ArrayLike,
    *,
    alpha: Scalar = 0.5,
    temperature: Scalar = 1.0,
    indices: Array | None = None,
    beta: Scalar = 0.0,
    student_features: ArrayLike | None = None,
    teacher_features: ArrayLike | None = None,
    feature_loss: str = "cosine",
    tokens: ArrayLike | None = None,
) -> tuple[Array, dict[str, Array]]:
    """loss = α·soft + (1−α)·hard + β·feature, means over the tokens in the mask.

    - soft = T²·KL(softmax(teacher/T) ‖ softmax(student/T)), T = `temperature`
    - hard = −log softmax(student)[targets]
    - feature: mean over the layers of 1 − cosine, or of the mean square over D (`feature_loss`
      "l2")

    `student` and `teacher` [B, T, V] are logits; `targets` and `mask` are [B, T]. With `indices`
    [B, T, K], `teacher` [B, T, K] has only the logits at these indices of the vocabulary, and both
    sides of the KL are softmaxes over the K entries. Features are [L, B, T, D]; a nonzero `beta`
    needs them. The teacher gets no gradient. The means divide by Σ mask, or by `tokens` if given.

    Returns (loss, metrics). Metrics: `soft_loss`, `hard_loss`, `kl` at T, `kl_temperature_1`,
    `tokens` = Σ mask; `feature_loss` with features; `teacher_loss`, the teacher's hard loss,
    without `indices`. Raises ValueError for a nonzero `beta` without features.
    """
    mask = float32(mask)
    num_tokens = divisor(mask.sum() if tokens is None else tokens)
    student, teacher = masked(student, mask[..., None]), masked(constant(teacher), mask[..., None])
    entries = student if indices is None else jnp.take_along_axis(student, indices, axis=-1)

    def mean(x: Array) -> Array:
        return masked_sum(x, mask) / num_tokens

    kl = mean(kl_of_logits(teacher, entries, temperature))
    soft, hard = jnp.square(float32(temperature)) * kl, -mean(logps(student, targets))
    loss = alpha * soft + (1.0 - alpha) * hard
    metrics = {
        "soft_loss": soft,
        "hard_loss": hard,
        "kl": kl,
        "kl_temperature_1": mean(kl_of_logits(teacher, constant(entries), 1.0)),
        "tokens": mask.sum(),
    }
    if indices is None:
        metrics["teacher_loss"] = -mean(logps(teacher, targets))
    if student_features is not None and teacher_features is not None:
        feature = mean(feature_distances(student_features, teacher_features, mask, feature_loss))
        metrics["feature_loss"] = feature
        loss += beta * feature
    elif not (isinstance(beta, int | float) and beta == 0):
        raise ValueError("beta weighs features: give student_features and teacher_features")
    return loss, metrics


def log_softmax(logits: Array, temperature: Scalar) -> Array:
    """log softmax(logits / temperature), at least −1e30, so that differences are defined even where
    logits are −inf.
    """
    return jnp.maximum(jax.nn.log_softmax(logits / temperature, axis=-1), MIN_LOG_PROB)


def kl_divergence(p_log: Array, q_log: Array) -> Array:
    """KL(p ‖ q) = Σ p (log p − log q) over the last axis, of finite log p and log q."""
    return jnp.sum(jnp.exp(p_log) * (p_log - q_log), axis=-1)


def kl_of_logits(p: Array, q: Array, temperature: Scalar) -> Array:
    return kl_divergence(log_softmax(p, temperature), log_softmax(q, temperature))


def feature_distances(student: ArrayLike, teacher: ArrayLike, mask: Array, kind: str) -> Array:
    """The distance of the features [L, B, T, D] at each token [B, T], averaged over the layers.

    Norms are at least 1e-6 in the cosine.
    """
    student, teacher = masked(student, mask[..., None]), masked(constant(teacher), mask[..., None])
    if student.shape != teacher.shape:
        raise ValueError(f"features of shapes {student.shape} and {teacher.shape} differ")
    check_choice("feature_loss", kind, ("cosine", "l2"))
    if kind == "l2":
        return jnp.mean(jnp.square(student - teacher), axis=(0, -1))
    product = jnp.sum(student * teacher, axis=-1)
    return jnp.mean(1.0 - product / (feature_norm(student) * feature_norm(teacher)), axis=0)


def feature_norm(x: Array) -> Array:
    # The floor is inside of the root, whose gradient at 0 is infinite.
    return jnp.sqrt(jnp.maximum(jnp.sum(jnp.square(x), axis=-1), MIN_NORM**2))


def divergence(
    student: ArrayLike,
    teacher: ArrayLike,
    mask: ArrayLike,
    *,
    beta: float = 0.0,
    temperature: Scalar = 1.0,
    tokens: ArrayLike | None = None,
) -> Array:
    """The generalized Jensen-Shannon divergence β·KL(t ‖ m) + (1−β)·KL(s ‖ m), m = β·t + (1−β)·s
    (GKD, arXiv:2306.13649), averaged over the tokens in the mask.

    t and s are the softmaxes of teacher / `temperature` and student / `temperature`, both logits
    [B, T, V]; there is no factor T². β = 0 is the forward KL(t ‖ s), and β = 1 the reverse
    KL(s ‖ t). `beta` is a Python number from 0 to 1; another one raises ValueError. The teacher
    gets no gradient. The mean divides by Σ mask, or by `tokens` if given.
    """
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta={beta} is not in [0, 1]")
    mask = float32(mask)
    s_log = log_softmax(masked(student, mask[..., None]), temperature)
    t_log = log_softmax(masked(constant(teacher), mask[..., None]), temperature)
    if beta == 0.0:
        distance = kl_divergence(t_log, s_log)
    elif beta == 1.0:
        distance = kl_divergence(s_log, t_log)
    else:
        m_log = jnp.logaddexp(t_log + math.log(beta), s_log + math.log1p(-beta))
        distance = beta * kl_divergence(t_log, m_log) + (1 - beta) * kl_divergence(s_log, m_log)
    return masked_sum(distance, mask) / divisor(mask.sum() if tokens is None else tokens)


def anneal(step: ArrayLike, steps: int, start: float, end: float | None, kind: str) -> Array:
    """The weight of a loss at `step`. With a = `start`, b = `end` and p = min(step/steps, 1), it is
    a for kind "constant", a + (b−a)p for "linear", and b + (a−b)(1 + cos πp)/2 for "cosine".
    Without `end`, it is constant.
    """
    check_choice("kind", kind, ("constant", "linear", "cosine"))
    if kind == "constant" or end is None:
        return float32(start)
    progress = jnp.minimum(float32(step) / max(steps, 1), 1.0)
    if kind == "linear":
        return start + (end - start) * progress
    return end + (start - end) * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
