"""Cross-entropy of rows of logits by Triton, forward and backward, each reading the logits once.

    log_sums           largest = max(logits);   log_sum = log Σ exp(logits - largest)
                       target_logit = logits[target] - largest
    logits_backward    dlogits = softmax(logits) · factor + onehot(target) · target_factor

Shapes: T tokens, V vocabulary.

A program keeps a running maximum and sum in each of its lanes and reduces over lanes at the end.
dlogits may have any dtype, for example fp8 for an fp8 head.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

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
