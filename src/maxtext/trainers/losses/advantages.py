"""Advantages of completions over the other completions of the same prompt.

Notation: R reward, A advantage. Shapes: B rows (completions), G completions of a prompt, which are
consecutive rows.
"""

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from maxtext.trainers.losses.common import check_choice, constant, divisor, float32

SCALES = ("group", "batch", "none", "leave_one_out")


def advantages(
    rewards: ArrayLike, num_generations: int, *, scale: str = "group", epsilon: float = 1e-6
) -> Array:
    """A = (R − μ) / (s + epsilon), with the mean μ and the sample deviation s (n−1) of the group.

    rewards [B] give advantages [B]; each `num_generations` consecutive rows are a group.

    With scale "batch", s is the deviation of all rewards; with "none", A = R − μ (Dr. GRPO); with
    "leave_one_out", A = R − mean of the others in the group (RLOO). A completion whose reward is
    nan is not scored: it is left out of μ and s, and its A is 0. Groups of equal rewards have A = 0
    exactly. Raises ValueError if B is not a multiple of `num_generations`, or this is below 2.
    """
    check_choice("scale", scale, SCALES)
    rewards = constant(rewards)
    if num_generations < 2 or rewards.size % num_generations:
        raise ValueError(
            f"{rewards.size} rewards are not groups of num_generations={num_generations}, "
            "at least 2"
        )
    groups = rewards.reshape(-1, num_generations)
    is_scored = ~jnp.isnan(groups)
    num_scored = jnp.sum(is_scored, axis=1, keepdims=True)
    centered = jnp.where(is_scored, groups - group_mean(groups, is_scored, axis=1), 0.0)
    lowest = jnp.min(jnp.where(is_scored, groups, jnp.inf), axis=1, keepdims=True)
    highest = jnp.max(jnp.where(is_scored, groups, -jnp.inf), axis=1, keepdims=True)
    # The mean of equal rewards is rounded; dividing its error by a tiny s would be noise.
    centered = jnp.where(highest > lowest, centered, 0.0)
    if scale == "group":
        centered /= sample_deviation(groups, is_scored, axis=1) + epsilon
    elif scale == "batch":
        centered /= sample_deviation(groups, is_scored, axis=None) + epsilon
    elif scale == "leave_one_out":
        centered *= num_scored / divisor(num_scored - 1)
    return centered.reshape(rewards.shape)


def group_mean(groups: Array, is_scored: Array, axis: int | None) -> Array:
    total = jnp.sum(jnp.where(is_scored, groups, 0.0), axis, keepdims=True)
    return total / divisor(jnp.sum(is_scored, axis, keepdims=True))


def sample_deviation(groups: Array, is_scored: Array, axis: int | None) -> Array:
    deviations = jnp.where(is_scored, groups - group_mean(groups, is_scored, axis), 0.0)
    degrees = divisor(jnp.sum(is_scored, axis, keepdims=True) - 1)
    return jnp.sqrt(jnp.sum(jnp.square(deviations), axis, keepdims=True) / degrees)


def degenerate_groups(
    advantages: ArrayLike, num_generations: int, *, tolerance: float = 1e-8
) -> Array:
    """Bools [B / G] for advantages [B]: true for a group with |A| ≤ tolerance for all of its
    completions, which has no policy gradient. With degenerate_group_masking, the trainer sets the
    mask of such a group to 0.
    """
    groups = float32(advantages).reshape(-1, num_generations)
    return jnp.all(jnp.abs(groups) <= tolerance, axis=1)
