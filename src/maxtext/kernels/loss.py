"""Cross-entropy over a vocabulary, in float32; whole, or in tiles so that the logits of all tokens never exist at once.

On one NVIDIA GPU by kernels that read the logits once forward, and once going back (`loss_rows`).

Shapes: B batch, S sequence, E embedding, V vocabulary.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from maxtext.kernels import loss_rows


def cross_entropy(logits: Array, targets: Array, platform: str | None = None) -> tuple[Array, Array]:
    """(negative log-likelihood, log of the partition sum) of each token; logits [..., V], targets [...]. `platform`: of
    the one device that computes it; None: there are several, or any."""
    if loss_rows.supports(math.prod(targets.shape), logits.shape[-1], platform):
        losses, partition = by_kernels(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
        return losses.reshape(targets.shape), partition.reshape(targets.shape)
    logits = logits.astype(jnp.float32)
    # Relative to the largest logit, so that the difference of two large numbers is never taken.
    largest = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    shifted = logits - largest
    partition = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))
    # A masked sum instead of a gather: it stays local where the vocabulary is split over devices.
    chosen = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == targets[..., None]
    return partition - jnp.sum(jnp.where(chosen, shifted, 0.0), axis=-1), partition + largest[..., 0]


def tiled_cross_entropy(
    score: Callable[[Array], Array], hidden: Array, targets: Array, tiles: int, platform: str | None = None
) -> tuple[Array, Array]:
    """As cross_entropy(score(hidden), targets), hidden [B, S, E], a tile of S/tiles tokens a row at a time.

    The backward pass scores each tile again instead of keeping its logits.
    """
    if tiles == 1:
        return cross_entropy(score(hidden), targets, platform)
    batch, length, size = hidden.shape

    @jax.checkpoint
    def tile(part: tuple[Array, Array]) -> tuple[Array, Array]:
        return cross_entropy(score(part[0]), part[1], platform)

    parts = (
        hidden.reshape(batch, tiles, length // tiles, size).swapaxes(0, 1),
        targets.reshape(batch, tiles, length // tiles).swapaxes(0, 1),
    )
    losses, partition = jax.lax.map(tile, parts)
    return losses.swapaxes(0, 1).reshape(batch, length), partition.swapaxes(0, 1).reshape(batch, length)


@jax.custom_vjp
def by_kernels(logits: Array, targets: Array) -> tuple[Array, Array]:
    """`cross_entropy` of logits [T, V] by kernels."""
    return by_kernels_forward(logits, targets)[0]


def by_kernels_forward(logits: Array, targets: Array) -> tuple[tuple[Array, Array], Any]:
    largest, logarithm, chosen = loss_rows.sums(logits, targets)
    return (logarithm - chosen, logarithm + largest), (logits, targets, largest, logarithm)


def by_kernels_backward(kept: Any, gradients: tuple[Array, Array]) -> tuple[Array, None]:
    logits, targets, largest, logarithm = kept
    of_loss, of_partition = gradients
    parts = -of_loss, of_loss + of_partition
    return loss_rows.back(logits, targets, largest, logarithm, *parts, logits.dtype), None


by_kernels.defvjp(by_kernels_forward, by_kernels_backward)
