"""Functions that all losses share, and `sft`, the loss of supervised fine-tuning.

`masked_sum` sums in float32. `logps` computes the log-probabilities of target tokens, and
`entropies` the entropies of the distributions over tokens. `check_choice` checks an option.

Shapes: B batch, T tokens, V vocabulary.
"""

from collections.abc import Collection

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from maxtext.kernels.cross_entropy import cross_entropy

Scalar = Array | float  # a coefficient, which may be traced


def float32(x: ArrayLike) -> Array:
    return jnp.asarray(x, jnp.float32)


def constant(x: ArrayLike) -> Array:
    """`x` in float32, without a gradient."""
    return jax.lax.stop_gradient(float32(x))


def masked(x: ArrayLike, mask: Array) -> Array:
    """`x` in float32 where `mask` is nonzero, 0 elsewhere.

    A select, not a product: a nan or inf in a masked element reaches neither the loss nor, by way
    of 0 * inf, its gradient.
    """
    return jnp.where(mask != 0, float32(x), 0.0)


def masked_sum(x: Array, mask: Array, axis: int | None = None) -> Array:
    """Σ mask·x, over all axes or one."""
    return jnp.sum(masked(x, mask) * mask, axis)


def divisor(count: ArrayLike) -> Array:
    """max(count, 1) in float32, so that the mean over nothing is 0."""
    return jnp.maximum(float32(count), 1.0)


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Raise ValueError if the value of an option is not one of its choices."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(choices)}")


def logps(logits: ArrayLike, targets: Array, temperature: Scalar = 1.0) -> Array:
    """logps[b, t] = log softmax(logits[b, t] / temperature)[targets[b, t]].

    logits [B, T, V] and targets [B, T] give [B, T]. Targets are already shifted: `targets[b, t]` is
    the token that follows position t. `temperature` is the sampling temperature, the same for the
    policy, the sampler and the reference.
    """
    return -cross_entropy(float32(logits) / temperature, targets)[0]


def entropies(logits: ArrayLike, temperature: Scalar = 1.0) -> Array:
    """−Σ p log p with p = softmax(logits[b, t] / temperature); logits [B, T, V] give [B, T]."""
    log_p = jax.nn.log_softmax(float32(logits) / temperature, axis=-1)
    p = jnp.exp(log_p)
    return -jnp.sum(jnp.where(p > 0, p * log_p, 0.0), axis=-1)


def sft(
    logps: ArrayLike, mask: ArrayLike, *, tokens: ArrayLike | None = None
) -> tuple[Array, dict[str, Array]]:
    """loss = Σ mask·(−logps) / max(N, 1), N = Σ mask, or `tokens` if given.

    logps and mask are [B, T]; the mask is 1 at tokens that are trained on. If `tokens` counts the
    whole batch, the losses of its microbatches sum to the loss of the batch.

    Returns (loss, metrics). Metrics: `tokens` = Σ mask.
    """
    mask = float32(mask)
    count = mask.sum()
    loss = -masked_sum(float32(logps), mask) / divisor(count if tokens is None else tokens)
    return loss, {"tokens": count}
