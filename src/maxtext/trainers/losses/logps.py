"""Log-probabilities of target tokens, and entropies of the distributions over tokens.

Shapes: B batch, T tokens, V vocabulary.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from maxtext.kernels.cross_entropy import cross_entropy
from maxtext.trainers.losses.common import Scalar, float32


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
