"""Cross-entropy over a vocabulary, in float32; whole, or in tiles so that the logits of all tokens never exist at once.

Shapes: B batch, S sequence, E embedding, V vocabulary.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array


def cross_entropy(logits: Array, targets: Array) -> tuple[Array, Array]:
    """(negative log-likelihood, log of the partition sum) of each token; logits [..., V], targets [...]."""
    logits = logits.astype(jnp.float32)
    # Relative to the largest logit, so that the difference of two large numbers is never taken.
    largest = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    shifted = logits - largest
    partition = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))
    # A masked sum instead of a gather: it stays local where the vocabulary is split over devices.
    chosen = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == targets[..., None]
    return partition - jnp.sum(jnp.where(chosen, shifted, 0.0), axis=-1), partition + largest[..., 0]


def tiled_cross_entropy(
    score: Callable[[Array], Array], hidden: Array, targets: Array, tiles: int
) -> tuple[Array, Array]:
    """As cross_entropy(score(hidden), targets), hidden [B, S, E], a tile of S/tiles tokens a row at a time.

    The backward pass scores each tile again instead of keeping its logits.
    """
    if tiles == 1:
        return cross_entropy(score(hidden), targets)
    batch, length, size = hidden.shape

    @jax.checkpoint
    def tile(part: tuple[Array, Array]) -> tuple[Array, Array]:
        return cross_entropy(score(part[0]), part[1])

    parts = (
        hidden.reshape(batch, tiles, length // tiles, size).swapaxes(0, 1),
        targets.reshape(batch, tiles, length // tiles).swapaxes(0, 1),
    )
    losses, partition = jax.lax.map(tile, parts)
    return losses.swapaxes(0, 1).reshape(batch, length), partition.swapaxes(0, 1).reshape(batch, length)
