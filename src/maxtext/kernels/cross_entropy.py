"""Cross-entropy over a vocabulary, in float32.

    loss = logsumexp(logits) - logits[target]

`tiled_cross_entropy` computes logits tile by tile, so that those of all tokens never exist at once.
On one NVIDIA GPU, Triton kernels read the logits once in each direction
(`triton/cross_entropy.py`).

Shapes: B batch, S sequence, E embed_dim, V vocabulary, T tokens.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from maxtext.common.types import Tree
from maxtext.kernels.triton import cross_entropy as triton_kernels


def cross_entropy(
    logits: Array, targets: Array, platform: str | None = None
) -> tuple[Array, Array]:
    """(negative log-likelihood, log of the partition sum) of each token; logits [..., V], targets
    [...].

    `platform` is that of the only device; None if there are several, or any will do.
    """
    if triton_kernels.supports(math.prod(targets.shape), logits.shape[-1], platform):
        losses, partition = triton_cross_entropy(
            logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
        )
        return losses.reshape(targets.shape), partition.reshape(targets.shape)
    logits = logits.astype(jnp.float32)
    # Relative to the largest logit, so that the difference of two large numbers is never taken.
    largest = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    shifted = logits - largest
    partition = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))
    # A masked sum instead of a gather: it stays local if the vocabulary is sharded.
    is_target = (
        jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == targets[..., None]
    )
    target_logit = jnp.sum(jnp.where(is_target, shifted, 0.0), axis=-1)
    return partition - target_logit, partition + largest[..., 0]


def tiled_cross_entropy(
    head: Callable[[Array], Array],
    hidden: Array,
    targets: Array,
    tiles: int,
    platform: str | None = None,
) -> tuple[Array, Array]:
    """cross_entropy(head(hidden), targets) of hidden [B, S, E], S/tiles tokens of each row at a
    time.

    The backward pass recomputes the logits of each tile.
    """
    if tiles == 1:
        return cross_entropy(head(hidden), targets, platform)
    batch, length, embed_dim = hidden.shape

    @jax.checkpoint
    def tile(part: tuple[Array, Array]) -> tuple[Array, Array]:
        return cross_entropy(head(part[0]), part[1], platform)

    parts = (
        hidden.reshape(batch, tiles, length // tiles, embed_dim).swapaxes(0, 1),
        targets.reshape(batch, tiles, length // tiles).swapaxes(0, 1),
    )
    losses, partition = jax.lax.map(tile, parts)
    return losses.swapaxes(0, 1).reshape(batch, length), partition.swapaxes(0, 1).reshape(
        batch, length
    )


@jax.custom_vjp
def triton_cross_entropy(logits: Array, targets: Array) -> tuple[Array, Array]:
    """`cross_entropy` of logits [T, V] by Triton kernels."""
    return triton_forward(logits, targets)[0]


def triton_forward(logits: Array, targets: Array) -> tuple[tuple[Array, Array], Tree]:
    largest, log_sum, target_logit = triton_kernels.log_sums(logits, targets)
    return (log_sum - target_logit, log_sum + largest), (logits, targets, largest, log_sum)


def triton_backward(residuals: Tree, cotangents: tuple[Array, Array]) -> tuple[Array, None]:
    logits, targets, largest, log_sum = residuals
    dloss, dpartition = cotangents
    factors = -dloss, dloss + dpartition
    return triton_kernels.logits_backward(
        logits, targets, largest, log_sum, *factors, logits.dtype
    ), None


triton_cross_entropy.defvjp(triton_forward, triton_backward)
