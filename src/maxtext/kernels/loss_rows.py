"""Cross-entropy of rows of logits, and its gradient, by kernels for NVIDIA GPUs, by Triton.

A program reads its row once: each of its lanes has the largest logit that it has seen, and a sum relative to it, and
only at the end they are put together. The gradient is written in any dtype: of a head in fp8, in eight bits.

Shapes: T tokens, V vocabulary.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from maxtext.kernels.rows import TILE, down_to_power, ours, parts, run_by_rows

LANES = 2048
TOGETHER = 4  # logits that a lane sees before its sum is made relative to another one
AT_ONCE = 4096  # logits of a row, going back
LOWEST = float(jnp.finfo(jnp.float32).min)


def supports(tokens: int, vocabulary: int, platform: str | None) -> bool:
    """Whether these kernels do it: they have whole tiles, and offsets of 32 bits."""
    return ours(platform) and not tokens % TILE and not vocabulary % TILE and tokens * vocabulary < 2**31


def sums(
    logits: Array, targets: Array, factor: Array | None = None, interpret: bool = False
) -> tuple[Array, Array, Array]:
    """Of logits [T, V], times factor [T]: the largest of each row, the logarithm of the sum of what they are powers of,
    relative to it, and the one of the target, relative to it, too."""

    def program(logits: Any, targets: Any, *refs: Any) -> None:
        *factors, largest, logarithm, chosen = refs
        at = targets[...]
        width = logits.shape[1]
        lanes = min(LANES, down_to_power(width))

        def some(start: int) -> Array:
            seen = max(start + lanes - width, 0)  # of the last ones, as all lanes must be within the row
            x = times(logits[:, pl.ds(start - seen, lanes)], factors)
            return jnp.where(jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) < seen, LOWEST, x) if seen else x

        tops, totals = jnp.full((len(at), lanes), LOWEST), jnp.zeros((len(at), lanes))
        for start in range(0, width, TOGETHER * lanes):
            found = [some(each) for each in range(start, min(start + TOGETHER * lanes, width), lanes)]
            higher = functools.reduce(jnp.maximum, found, tops)
            powers = [jnp.exp(each - higher) for each in found]
            totals = functools.reduce(operator.add, powers, totals * jnp.exp(tops - higher))
            tops = higher
        top = jnp.max(tops, axis=1)
        largest[...] = top
        logarithm[...] = jnp.log(jnp.sum(totals * jnp.exp(tops - top[:, None]), axis=1))
        there = (at >= 0) & (at < width)  # a target that is none has no part in the loss
        one = logits[jnp.arange(len(at)), jnp.where(there, at, 0)].astype(jnp.float32)
        chosen[...] = jnp.where(there, functools.reduce(lambda x, factor: x * factor[...], factors, one) - top, 0.0)

    factors = [] if factor is None else [factor]
    largest, logarithm, chosen = run_by_rows(program, [logits, targets, *factors], [], [], 3, interpret, "loss_sums")
    return largest, logarithm, chosen


def back(
    logits: Array, targets: Array, largest: Array, logarithm: Array, of_chosen: Array, of_powers: Array, dtype: Any,
    factor: Array | None = None, interpret: bool = False,
) -> Array:  # fmt: skip
    """Of what `sums` gave for each token: its part [T] of all tokens, and of the one that is the target."""

    def program(
        logits: Any, targets: Any, largest: Any, logarithm: Any, of_chosen: Any, of_powers: Any, *refs: Any
    ) -> None:
        *factors, out = refs
        at, top, rest = (each[...][:, None] for each in (targets, largest, logarithm))
        one, all_of_them = (each[...][:, None] for each in (of_chosen, of_powers))
        for place in parts(logits.shape[1], AT_ONCE):
            probability = jnp.exp(times(logits[:, place], factors) - top - rest)
            numbers = jax.lax.broadcasted_iota(jnp.int32, probability.shape, 1) + place.start
            out[:, place] = (probability * all_of_them + jnp.where(numbers == at, one, 0.0)).astype(dtype)

    factors = [] if factor is None else [factor]
    of_rows = [targets, largest, logarithm, of_chosen, of_powers, *factors]
    out = jax.ShapeDtypeStruct(logits.shape, dtype)
    return run_by_rows(program, [logits, *of_rows], [], [out], 0, interpret, "loss_back")[0]


def times(x: Array, factors: list[Any]) -> Array:
    return functools.reduce(lambda x, factor: x * factor[...][:, None], factors, x.astype(jnp.float32))
