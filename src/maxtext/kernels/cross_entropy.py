"""Cross-entropy over a vocabulary, in float32, and its Triton kernels.

    loss = logsumexp(logits) - logits[target]

`tiled_cross_entropy` computes logits tile by tile, so that those of all tokens never exist at once.

On one NVIDIA GPU, `cross_entropy` runs `triton_cross_entropy`, a Triton kernel over rows of logits
in each direction. Each kernel reads the logits once. A program of `log_sums` keeps a running
maximum and sum in each of its lanes and reduces over lanes at the end. dlogits may have any dtype,
for example fp8 for an fp8 head.

    log_sums           largest = max(logits);   log_sum = log Σ exp(logits - largest)
                       target_logit = logits[target] - largest
    logits_backward    dlogits = softmax(logits) · factor + onehot(target) · target_factor

Shapes: B batch, S sequence, E embed_dim, V vocabulary, T tokens.
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from maxtext.common.types import Tree
from maxtext.kernels.triton.rowwise import (
    TILE,
    column_tiles,
    floor_power_of_two,
    rowwise_call,
    supports_triton,
)

MAX_LANES = 2048
LOGITS_PER_UPDATE = 4  # logits that a lane reads before it rescales its sum
BACKWARD_COLUMNS = 4096  # logits of a row at a time
LOWEST = float(jnp.finfo(jnp.float32).min)


def supports(tokens: int, vocabulary: int, platform: str | None) -> bool:
    """Whether T and V are multiples of a tile, and offsets fit into 32 bits."""
    return (
        supports_triton(platform)
        and not tokens % TILE
        and not vocabulary % TILE
        and tokens * vocabulary < 2**31
    )


def log_sums(
    logits: Array, targets: Array, row_factor: Array | None = None, interpret: bool = False
) -> tuple[Array, Array, Array]:
    """(largest, log_sum, target_logit), each [T], of logits [T, V] times row_factor [T];
    target_logit is 0 if the target is outside of the vocabulary."""

    def program(logits: Ref, targets: Ref, *refs: Ref) -> None:
        *factors, largest, log_sum, target_logit = refs
        target = targets[...]
        vocabulary = logits.shape[1]
        lanes = min(MAX_LANES, floor_power_of_two(vocabulary))

        def read(start: int) -> Array:
            # The last read starts earlier, to end within the row.
            overlap = max(start + lanes - vocabulary, 0)
            x = scaled(logits[:, pl.ds(start - overlap, lanes)], factors)
            if not overlap:
                return x
            return jnp.where(jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) < overlap, LOWEST, x)

        maxima = jnp.full((len(target), lanes), LOWEST)
        sums = jnp.zeros((len(target), lanes))
        stride = LOGITS_PER_UPDATE * lanes
        for start in range(0, vocabulary, stride):
            tiles = [read(at) for at in range(start, min(start + stride, vocabulary), lanes)]
            higher = functools.reduce(jnp.maximum, tiles, maxima)
            exponentials = [jnp.exp(tile - higher) for tile in tiles]
            sums = functools.reduce(operator.add, exponentials, sums * jnp.exp(maxima - higher))
            maxima = higher
        top = jnp.max(maxima, axis=1)
        largest[...] = top
        log_sum[...] = jnp.log(jnp.sum(sums * jnp.exp(maxima - top[:, None]), axis=1))
        valid = (target >= 0) & (target < vocabulary)
        logit = logits[jnp.arange(len(target)), jnp.where(valid, target, 0)].astype(jnp.float32)
        logit = functools.reduce(lambda x, factor: x * factor[...], factors, logit)
        target_logit[...] = jnp.where(valid, logit - top, 0.0)

    factors = [] if row_factor is None else [row_factor]
    largest, log_sum, target_logit = rowwise_call(
        program,
        [logits, targets, *factors],
        [],
        [],
        3,
        interpret=interpret,
        name="cross_entropy_log_sums",
    )
    return largest, log_sum, target_logit


def logits_backward(
    logits: Array,
    targets: Array,
    largest: Array,
    log_sum: Array,
    target_factor: Array,
    factor: Array,
    dtype: DTypeLike,
    row_factor: Array | None = None,
    interpret: bool = False,
) -> Array:
    """dlogits [T, V] in `dtype`: probabilities times factor [T], plus target_factor [T] at the
    target. `largest` and `log_sum` are those of `log_sums`."""

    def program(
        logits: Ref,
        targets: Ref,
        largest: Ref,
        log_sum: Ref,
        target_factor: Ref,
        factor: Ref,
        *refs: Ref,
    ) -> None:
        *row_factors, out = refs
        target, top, rest = (ref[...][:, None] for ref in (targets, largest, log_sum))
        at_target, everywhere = (ref[...][:, None] for ref in (target_factor, factor))
        for columns in column_tiles(logits.shape[1], BACKWARD_COLUMNS):
            probability = jnp.exp(scaled(logits[:, columns], row_factors) - top - rest)
            token = jax.lax.broadcasted_iota(jnp.int32, probability.shape, 1) + columns.start
            out[:, columns] = (
                probability * everywhere + jnp.where(token == target, at_target, 0.0)
            ).astype(dtype)

    row_factors = [] if row_factor is None else [row_factor]
    vectors = [targets, largest, log_sum, target_factor, factor, *row_factors]
    out = jax.ShapeDtypeStruct(logits.shape, dtype)
    [dlogits] = rowwise_call(
        program,
        [logits, *vectors],
        [],
        [out],
        0,
        interpret=interpret,
        name="cross_entropy_backward",
    )
    return dlogits


def scaled(x: Array, factors: list[Any]) -> Array:
    return functools.reduce(
        lambda x, factor: x * factor[...][:, None], factors, x.astype(jnp.float32)
    )


def cross_entropy(
    logits: Array, targets: Array, platform: str | None = None
) -> tuple[Array, Array]:
    """(negative log-likelihood, log of the partition sum) of each token; logits [..., V], targets
    [...].

    `platform` is that of the only device; None if there are several, or any will do.
    """
    if supports(math.prod(targets.shape), logits.shape[-1], platform):
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
    largest, log_sum, target_logit = log_sums(logits, targets)
    return (log_sum - target_logit, log_sum + largest), (logits, targets, largest, log_sum)


def triton_backward(residuals: Tree, cotangents: tuple[Array, Array]) -> tuple[Array, None]:
    logits, targets, largest, log_sum = residuals
    dloss, dpartition = cotangents
    factors = -dloss, dloss + dpartition
    return logits_backward(logits, targets, largest, log_sum, *factors, logits.dtype), None


triton_cross_entropy.defvjp(triton_forward, triton_backward)
