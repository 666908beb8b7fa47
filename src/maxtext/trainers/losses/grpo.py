"""The losses of GRPO, GSPO and their relatives.

Notation: A advantage, ρ ratio of the probabilities of the policy and the sampler, m the mask of
tokens that are trained on, sg stops the gradient. Shapes: B rows (completions), T tokens.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from maxtext.trainers.losses.common import (
    Scalar,
    check_choice,
    constant,
    divisor,
    float32,
    masked,
    masked_sum,
)

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8 is finite in float32, also times an advantage
MAX_LOG_RATIO_SEQUENCE_TOKEN = 10.0


def sampler_weights(
    logps: ArrayLike,
    sampler_logps: ArrayLike,
    mask: ArrayLike,
    *,
    level: str = "token",
    mode: str = "truncate",
    maximum: float = 2.0,
) -> Array:
    """w = sg(min(exp(logps − sampler_logps), maximum)): the `weights` of `grpo`. They correct for a
    sampler whose log-probabilities differ from the trainer's with the same model weights.

    All arrays are [B, T], and so is the result. At level "sequence", the exponent is summed over
    the tokens of a row that are trained on, and the result is [B, 1]. With mode "mask", weights
    above the maximum become 0. Raises ValueError for another level or mode.
    """
    check_choice("level", level, ("token", "sequence"))
    check_choice("mode", mode, ("truncate", "mask"))
    mask = float32(mask)
    difference = masked(constant(logps), mask) - masked(constant(sampler_logps), mask)
    if level == "sequence":
        difference = jnp.sum(difference, axis=1, keepdims=True)
    weights = jnp.exp(jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    if mode == "mask":
        return jnp.where(weights <= maximum, weights, 0.0)
    return jnp.minimum(weights, maximum)


def token_ratio(logps: Array, old_logps: Array, mask: Array) -> Array:
    """ρ_t = exp(clip(logps_t − old_t, ±20)): [B, T]"""
    return jnp.exp(jnp.clip(logps - old_logps, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def mean_log_ratio(logps: Array, old_logps: Array, mask: Array) -> Array:
    total = jnp.sum((logps - old_logps) * mask, axis=1, keepdims=True)
    return total / divisor(jnp.sum(mask, axis=1, keepdims=True))


def sequence_ratio(logps: Array, old_logps: Array, mask: Array) -> Array:
    """ρ = exp(Σ m(logps − old) / Σ m), the exponent clipped to ±20: [B, 1]"""
    log_ratio = mean_log_ratio(logps, old_logps, mask)
    return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def sequence_token_ratio(logps: Array, old_logps: Array, mask: Array) -> Array:
    """ρ_t = exp(min(logps_t − sg(logps_t) + sg(mean of logps − old), 10)): [B, T], the value of the
    sequence's ratio with the gradient of the token
    """
    log_ratio = constant(mean_log_ratio(logps, old_logps, mask))
    return jnp.exp(jnp.minimum(logps - constant(logps) + log_ratio, MAX_LOG_RATIO_SEQUENCE_TOKEN))


def k1(log_ratio: Array) -> Array:
    return -log_ratio


def k2(log_ratio: Array) -> Array:
    return 0.5 * jnp.square(log_ratio)


def k3(log_ratio: Array) -> Array:
    # Clipped from above alone: a very negative log-ratio gives a large but finite KL.
    log_ratio = jnp.minimum(log_ratio, MAX_LOG_RATIO)
    return jnp.expm1(log_ratio) - log_ratio


RATIOS: dict[str, Callable[[Array, Array, Array], Array]] = {
    "token": token_ratio,
    "sequence": sequence_ratio,
    "sequence_token": sequence_token_ratio,
}
KL_ESTIMATORS: dict[str, Callable[[Array], Array]] = {"k1": k1, "k2": k2, "k3": k3}
REDUCTIONS = ("grpo", "bnpo", "dapo", "dr_grpo", "sum")


def grpo(
    logps: ArrayLike,
    old_logps: ArrayLike | None,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    ref_logps: ArrayLike | None = None,
    beta: Scalar = 0.0,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    dual_clip: float | None = None,
    level: str = "token",
    kl: str = "k3",
    kl_correction: bool = False,
    reduce: str = "grpo",
    max_length: int | None = None,
    rows: ArrayLike | None = None,
    tokens: ArrayLike | None = None,
    weights: ArrayLike | None = None,
) -> tuple[Array, dict[str, Array]]:
    """loss = reduce(x), x = −w·min(min(ρ, δ)·A, clip(ρ, 1−ε, 1+ε_high)·A) + β·KL.

    logps, old_logps, ref_logps and mask are [B, T], and advantages [B] or [B, T]. Only `logps` has
    a gradient.

    - ρ: `token_ratio`, `sequence_ratio` (GSPO) or `sequence_token_ratio`, for `level` "token",
      "sequence" or "sequence_token". `old_logps` are the log-probabilities of the policy that
      sampled; None: sg(logps), so that ρ = 1.
    - δ: `dual_clip`; None: no bound. ε_high: `epsilon_high`; None: ε.
    - KL to the reference, d = ref_logps − logps: k3 e^d − d − 1 (d at most 20), k1 −d, k2 d²/2.
      `kl_correction` multiplies it by ρ. A nonzero `beta` needs `ref_logps`.
    - w: `weights` [B, T], [B, 1] or [B], see `sampler_weights`; None: 1.

    `reduce`, with L = `max_length`, the largest number of tokens in a completion:

    - grpo: Σ_rows(Σ m·x / Σ m) / rows
    - bnpo: Σ m·x / Σ m
    - dapo: Σ m·x / tokens
    - dr_grpo: Σ m·x / (rows·L)
    - sum: Σ m·x / rows

    `rows` is the number of rows with a nonzero mask, and `tokens` is Σ m; by default, both are
    those of these arrays. If they count the whole batch, the losses of its microbatches sum to the
    loss of the batch, except with bnpo.

    Returns (loss, metrics). Metrics: `clip_ratio/low` and `clip_ratio/high`, the fractions of
    tokens whose ratio is clipped (of rows at level "sequence"); `kl`, the mean over tokens, if
    `ref_logps` are given. Raises ValueError for an unknown option, a nonzero `beta` without
    `ref_logps`, dr_grpo without `max_length`, and a `dual_clip` that is not above 1 + ε_high.
    """
    check_choice("level", level, RATIOS)
    check_choice("kl", kl, KL_ESTIMATORS)
    check_choice("reduce", reduce, REDUCTIONS)
    mask = float32(mask)
    logps = masked(logps, mask)
    old_logps = constant(logps) if old_logps is None else masked(constant(old_logps), mask)
    num_tokens = divisor(mask.sum() if tokens is None else tokens)
    num_rows = divisor(jnp.sum(jnp.any(mask != 0, axis=1)) if rows is None else rows)
    ratio = RATIOS[level](logps, old_logps, mask)
    policy_loss, is_low, is_high = clipped_policy_loss(
        ratio, per_token(advantages), epsilon, epsilon_high, dual_clip
    )
    if weights is not None:
        policy_loss *= per_token(weights)

    metrics = {
        "clip_ratio/low": mean_clipped(is_low, mask, num_rows, num_tokens),
        "clip_ratio/high": mean_clipped(is_high, mask, num_rows, num_tokens),
    }
    token_loss = jnp.broadcast_to(policy_loss, mask.shape)
    if ref_logps is not None:
        divergence = KL_ESTIMATORS[kl](masked(constant(ref_logps), mask) - logps)
        if kl_correction:
            divergence *= ratio
        token_loss += beta * divergence
        metrics["kl"] = masked_sum(divergence, mask) / num_tokens
    elif not (isinstance(beta, int | float) and beta == 0):
        raise ValueError("beta weighs the KL to a reference: give ref_logps")
    return reduce_tokens(token_loss, mask, reduce, num_rows, num_tokens, max_length), metrics


def per_token(x: ArrayLike) -> Array:
    """[B] as [B, 1], and [B, T] unchanged; without a gradient."""
    values = constant(x)
    return values[:, None] if values.ndim == 1 else values


def clipped_policy_loss(
    ratio: Array,
    advantages: Array,
    epsilon: float,
    epsilon_high: float | None,
    dual_clip: float | None,
) -> tuple[Array, Array, Array]:
    """(loss, is_low, is_high): −min(min(ρ, δ)A, clip(ρ, 1−ε, 1+ε_high)A), 1 where the lower bound
    clips, and 1 where the upper bound does. The lower bound clips only where A < 0, the upper only
    where A > 0.
    """
    low, high = 1.0 - epsilon, 1.0 + (epsilon if epsilon_high is None else epsilon_high)
    if dual_clip is not None and dual_clip <= high:
        raise ValueError(f"dual_clip={dual_clip} is not above the upper bound {high} of the ratio")
    bounded = ratio if dual_clip is None else jnp.minimum(ratio, dual_clip)
    loss = -jnp.minimum(bounded * advantages, jnp.clip(ratio, low, high) * advantages)
    return (
        loss,
        float32((ratio < low) & (advantages < 0)),
        float32((ratio > high) & (advantages > 0)),
    )


def mean_clipped(is_clipped: Array, mask: Array, num_rows: Array, num_tokens: Array) -> Array:
    """The mean over rows of [B, 1], over tokens of [B, T]."""
    if is_clipped.shape != mask.shape:
        has_tokens = float32(jnp.any(mask != 0, axis=1, keepdims=True))
        return masked_sum(is_clipped, has_tokens) / num_rows
    return masked_sum(is_clipped, mask) / num_tokens


def reduce_tokens(
    x: Array, mask: Array, reduce: str, num_rows: Array, num_tokens: Array, max_length: int | None
) -> Array:
    """The scalar loss of x [B, T]; see `grpo`."""
    row_sums, row_tokens = masked_sum(x, mask, axis=1), jnp.sum(mask, axis=1)
    if reduce == "grpo":
        return jnp.sum(row_sums / divisor(row_tokens)) / num_rows
    if reduce == "sum":
        return jnp.sum(row_sums) / num_rows
    if reduce == "bnpo":
        return jnp.sum(row_sums) / divisor(jnp.sum(row_tokens))
    if reduce == "dapo":
        return jnp.sum(row_sums) / num_tokens
    if max_length is None:
        raise ValueError("reduce='dr_grpo' needs max_length")
    return jnp.sum(row_sums) / (num_rows * max_length)
