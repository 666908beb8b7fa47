"""Losses over pairs of a chosen and a rejected completion.

Notation: c, r log-probabilities of the chosen and the rejected completion, summed over their
tokens; c°, r° those of the reference; h_c = c − c° and h_r = r − r°; Δ = β(h_c − h_r); ε label
smoothing; |c|, |r| numbers of tokens; σ the logistic function. Shapes: B pairs.
"""

from collections.abc import Callable
from dataclasses import dataclass

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
    masked,
    masked_sum,
)

LARGEST_MEAN_LOGP = -1e-7  # log(1 - exp(x)) is -inf at 0


@dataclass(frozen=True)
class Pairs:
    """The inputs of a loss over pairs; arrays are [B]."""

    chosen_logratio: Array  # h_c
    rejected_logratio: Array  # h_r
    chosen_mean: Array  # h_c / |c|
    rejected_mean: Array  # h_r / |r|
    mask: Array  # 0 for padding
    beta: Scalar
    label_smoothing: float
    gamma: Scalar

    @property
    def margin(self) -> Array:
        """Δ"""
        return self.beta * (self.chosen_logratio - self.rejected_logratio)


def smoothed_log_sigmoid(margin: Array, label_smoothing: float) -> Array:
    """(1−ε) log σ(margin) + ε log σ(−margin)"""
    positive, negative = jax.nn.log_sigmoid(margin), jax.nn.log_sigmoid(-margin)
    return (1.0 - label_smoothing) * positive + label_smoothing * negative


def sigmoid(pairs: Pairs) -> Array:
    """DPO (arXiv:2305.18290): −(1−ε) log σ(Δ) − ε log σ(−Δ)"""
    return -smoothed_log_sigmoid(pairs.margin, pairs.label_smoothing)


def hinge(pairs: Pairs) -> Array:
    """SLiC (arXiv:2305.10425): max(0, 1 − Δ)"""
    return jax.nn.relu(1.0 - pairs.margin)


def ipo(pairs: Pairs) -> Array:
    """IPO (arXiv:2310.12036): (h_c/|c| − h_r/|r| − 1/(2β))²"""
    return jnp.square(pairs.chosen_mean - pairs.rejected_mean - 0.5 / pairs.beta)


def robust(pairs: Pairs) -> Array:
    """Robust DPO (arXiv:2403.00409): [−(1−ε) log σ(Δ) + ε log σ(−Δ)] / (1 − 2ε)"""
    flip_rate = pairs.label_smoothing
    positive, negative = jax.nn.log_sigmoid(pairs.margin), jax.nn.log_sigmoid(-pairs.margin)
    return (flip_rate * negative - (1.0 - flip_rate) * positive) / (1.0 - 2.0 * flip_rate)


def simpo(pairs: Pairs) -> Array:
    """SimPO (arXiv:2405.14734): DPO's loss of the margin β(c/|c| − r/|r|) − γ"""
    margin = pairs.beta * (pairs.chosen_mean - pairs.rejected_mean) - pairs.gamma
    return -smoothed_log_sigmoid(margin, pairs.label_smoothing)


def kto(pairs: Pairs) -> Array:
    """KTO (arXiv:2402.01306) over pairs: ½[σ(β(z_c − h_c)) + σ(β(h_r − z_r))].

    z estimates KL(policy ‖ reference) without a gradient, each from the other completions of these
    pairs: z_c = max(0, mean h_r), z_r = max(0, mean h_c).
    """
    num_pairs = divisor(pairs.mask.sum())
    chosen_kl = jnp.maximum(
        masked_sum(constant(pairs.rejected_logratio), pairs.mask) / num_pairs, 0.0
    )
    rejected_kl = jnp.maximum(
        masked_sum(constant(pairs.chosen_logratio), pairs.mask) / num_pairs, 0.0
    )
    chosen_loss = jax.nn.sigmoid(pairs.beta * (chosen_kl - pairs.chosen_logratio))
    rejected_loss = jax.nn.sigmoid(pairs.beta * (pairs.rejected_logratio - rejected_kl))
    return 0.5 * (chosen_loss + rejected_loss)


def apo_zero(pairs: Pairs) -> Array:
    """APO-zero (arXiv:2408.06266): σ(−β h_c) + σ(β h_r)"""
    return jax.nn.sigmoid(-pairs.beta * pairs.chosen_logratio) + jax.nn.sigmoid(
        pairs.beta * pairs.rejected_logratio
    )


def apo_down(pairs: Pairs) -> Array:
    """APO-down (arXiv:2408.06266): σ(β h_c) + σ(−Δ)"""
    return jax.nn.sigmoid(pairs.beta * pairs.chosen_logratio) + jax.nn.sigmoid(-pairs.margin)


LOSS_TYPES: dict[str, Callable[[Pairs], Array]] = {
    "sigmoid": sigmoid,
    "hinge": hinge,
    "ipo": ipo,
    "robust": robust,
    "simpo": simpo,
    "kto": kto,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
}
LENGTH_NORMALIZED = ("ipo", "simpo")
SMOOTHED = ("sigmoid", "robust", "simpo")


def dpo(
    chosen: ArrayLike,
    rejected: ArrayLike,
    ref_chosen: ArrayLike | None = None,
    ref_rejected: ArrayLike | None = None,
    *,
    beta: Scalar = 0.1,
    label_smoothing: float = 0.0,
    loss_type: str = "sigmoid",
    gamma: Scalar = 0.5,
    chosen_lengths: ArrayLike | None = None,
    rejected_lengths: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    num_pairs: ArrayLike | None = None,
) -> tuple[Array, dict[str, Array]]:
    """loss = −mean[(1−ε) log σ(Δ) + ε log σ(−Δ)], Δ = β((c−c°) − (r−r°)).

    All arrays are [B]. `chosen` c, `rejected` r and their reference values c°, r° are *sums* of
    log-probabilities over the tokens of a completion, for every `loss_type`. Without a reference,
    c° = r° = 0.

    `loss_type` chooses another loss of a pair, a function of `LOSS_TYPES`:

    - ipo and simpo divide the sums by `chosen_lengths` and `rejected_lengths`, the numbers of
      tokens; they raise ValueError without them.
    - simpo has no reference; `gamma` is its target margin.
    - kto estimates its KL from the pairs of this call, so the losses of microbatches do not sum to
      the loss of the batch.
    - `label_smoothing` ε acts in sigmoid and simpo, and in robust, where it is the rate of flipped
      labels.

    `mask` is 0 for rows of padding. The mean divides by the number of pairs, or by `num_pairs` if
    given.

    Returns (loss, metrics). Metrics: `rewards/chosen` = β mean(c−c°), `rewards/rejected` =
    β mean(r−r°), `rewards/margins`, their difference, `rewards/accuracies`, the fraction of pairs
    whose chosen completion has the higher reward, `logps/chosen` = mean c, and `logps/rejected` =
    mean r. The rewards of simpo are β mean(c/|c|) and β mean(r/|r|).
    """
    has_lengths = chosen_lengths is not None and rejected_lengths is not None
    check_options(loss_type, label_smoothing, ref_chosen, ref_rejected, has_lengths)
    chosen, rejected = float32(chosen), float32(rejected)
    mask = jnp.ones_like(chosen) if mask is None else float32(mask)
    chosen, rejected = masked(chosen, mask), masked(rejected, mask)
    chosen_logratio, rejected_logratio = chosen, rejected
    if ref_chosen is not None and ref_rejected is not None:
        chosen_logratio = chosen - masked(constant(ref_chosen), mask)
        rejected_logratio = rejected - masked(constant(ref_rejected), mask)
    pairs = Pairs(
        chosen_logratio=chosen_logratio,
        rejected_logratio=rejected_logratio,
        chosen_mean=chosen_logratio / divisor(1 if chosen_lengths is None else chosen_lengths),
        rejected_mean=rejected_logratio
        / divisor(1 if rejected_lengths is None else rejected_lengths),
        mask=mask,
        beta=beta,
        label_smoothing=label_smoothing,
        gamma=gamma,
    )
    count = divisor(mask.sum() if num_pairs is None else num_pairs)

    def mean(x: Array) -> Array:
        return masked_sum(x, mask) / count

    metrics = {"logps/chosen": mean(chosen), "logps/rejected": mean(rejected)}
    rewards = (chosen_logratio, rejected_logratio)
    if loss_type == "simpo":
        rewards = (pairs.chosen_mean, pairs.rejected_mean)
    metrics |= reward_metrics(beta * rewards[0], beta * rewards[1], mean)
    return mean(LOSS_TYPES[loss_type](pairs)), metrics


def check_options(
    loss_type: str,
    label_smoothing: float,
    ref_chosen: ArrayLike | None,
    ref_rejected: ArrayLike | None,
    has_lengths: bool,
) -> None:
    check_choice("loss_type", loss_type, LOSS_TYPES)
    if (ref_chosen is None) != (ref_rejected is None):
        raise ValueError("ref_chosen and ref_rejected must be given together")
    if loss_type in LENGTH_NORMALIZED and not has_lengths:
        raise ValueError(f"loss_type={loss_type!r} needs chosen_lengths and rejected_lengths")
    if loss_type == "simpo" and ref_chosen is not None:
        raise ValueError("loss_type='simpo' has no reference: omit ref_chosen and ref_rejected")
    if label_smoothing and loss_type not in SMOOTHED:
        raise ValueError(f"loss_type={loss_type!r} has no label_smoothing")
    check_label_smoothing(label_smoothing)
    if loss_type == "robust" and label_smoothing >= 0.5:
        raise ValueError(
            f"label_smoothing={label_smoothing} of loss_type='robust' is not below 0.5"
        )


def check_label_smoothing(label_smoothing: float) -> None:
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing={label_smoothing} is not in [0, 1]")


def reward_metrics(
    chosen: Array, rejected: Array, mean: Callable[[Array], Array]
) -> dict[str, Array]:
    return {
        "rewards/chosen": mean(chosen),
        "rewards/rejected": mean(rejected),
        "rewards/margins": mean(chosen - rejected),
        "rewards/accuracies": mean(float32(chosen > rejected)),
    }


def log1mexp(x: Array) -> Array:
    """log(1 − exp(x)) of x < 0, accurate for x near 0 and for very negative x."""
    is_near_zero = x > -0.6931472  # log 2; both branches are finite with finite gradients
    near = jnp.log(-jnp.expm1(jnp.where(is_near_zero, x, -0.5)))
    far = jnp.log1p(-jnp.exp(jnp.where(is_near_zero, -1.0, x)))
    return jnp.where(is_near_zero, near, far)


def orpo(
    chosen: ArrayLike,
    rejected: ArrayLike,
    nll: ArrayLike,
    *,
    weight: Scalar = 0.1,
    label_smoothing: float = 0.0,
    mask: ArrayLike | None = None,
    num_pairs: ArrayLike | None = None,
) -> tuple[Array, dict[str, Array]]:
    """loss = nll − λ mean[(1−ε) log σ(o) + ε log σ(−o)], the log odds ratio
    o = (c̄ − r̄) − [log(1−e^c̄) − log(1−e^r̄)] (ORPO, arXiv:2403.07691).

    `chosen` c̄ and `rejected` r̄ [B] are *means* of log-probabilities over the tokens of a
    completion, clipped to at most −1e-7. `nll` is a scalar: the mean negative log-likelihood of the
    tokens of prompt and chosen completion. λ is `weight`, and ε `label_smoothing`.

    `mask` is 0 for rows of padding. The mean divides by the number of pairs, or by `num_pairs` if
    given; `nll` must then be this microbatch's share of the batch's mean.

    Returns (loss, metrics). Metrics: those of `dpo`, with the rewards λ c̄ and λ r̄, and `nll_loss`,
    `log_odds_ratio` = mean log σ(o), and `log_odds_chosen` = mean o.
    """
    check_label_smoothing(label_smoothing)
    chosen, rejected = float32(chosen), float32(rejected)
    mask = jnp.ones_like(chosen) if mask is None else float32(mask)
    chosen = jnp.minimum(jnp.where(mask != 0, chosen, -1.0), LARGEST_MEAN_LOGP)
    rejected = jnp.minimum(jnp.where(mask != 0, rejected, -1.0), LARGEST_MEAN_LOGP)
    log_odds = (chosen - rejected) - (log1mexp(chosen) - log1mexp(rejected))
    count = divisor(mask.sum() if num_pairs is None else num_pairs)

    def mean(x: Array) -> Array:
        return masked_sum(x, mask) / count

    nll = float32(nll)
    loss = nll - weight * mean(smoothed_log_sigmoid(log_odds, label_smoothing))
    metrics = {
        "nll_loss": nll,
        "log_odds_ratio": mean(jax.nn.log_sigmoid(log_odds)),
        "log_odds_chosen": mean(log_odds),
        "logps/chosen": mean(chosen),
        "logps/rejected": mean(rejected),
    }
    return loss, metrics | reward_metrics(weight * chosen, weight * rejected, mean)
