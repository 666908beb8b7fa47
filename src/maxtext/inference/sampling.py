"""From scores over the vocabulary to the next token.

Shapes: B rows, V vocabulary. Each row has its own wishes, as arrays, so one program serves any mix
of them; what the most demanding row needs (`Kind`) is fixed in a program, since sorting the
vocabulary costs. A row's token does not depend on the kind of the program that draws it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from numbers import Integral, Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.common.errors import UserError
from maxtext.configs.types import MaxTextConfig

MOST_TEMPERATURE = 1e30  # fits into float32
LEAST_SHARE = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class Sampling:
    """`temperature` 0 takes the likeliest token. Otherwise a token is drawn from the softmax of the
    scores over the temperature: of the `top_k` likeliest (0: all), and of those the fewest that
    hold `top_p` of the probability. Tokens that tie with the last one that is in are in, too."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        for name, kinds in (("temperature", Real), ("top_k", Integral), ("top_p", Real)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kinds):
                what = "whole number" if kinds is Integral else "number"
                raise UserError(f"{name} must be a {what}, not {str(value)[:60]!r}")
        if not 0 <= self.temperature <= MOST_TEMPERATURE:
            shown = str(self.temperature)[:60]
            raise UserError(f"temperature={shown} must be a number from 0 to {MOST_TEMPERATURE:g}")
        if self.top_k < 0:
            raise UserError(
                f"top_k={str(self.top_k)[:60]} must be at least 0; 0 leaves all tokens in"
            )
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={str(self.top_p)[:60]} must be above 0 and at most 1")
        if self.temperature == 0 and (self.top_k or self.top_p < 1):
            raise UserError(
                "top_k and top_p choose what is drawn from, and temperature=0 draws nothing: raise it"
            )

    @classmethod
    def of(cls, config: MaxTextConfig) -> "Sampling":
        """What the decode_sampling_* keys say."""
        strategy = config.decode_sampling_strategy.value
        if strategy == "greedy":
            return cls()
        top_k = config.decode_sampling_top_k if strategy in ("topk", "composite") else 0
        top_p = (
            float(config.decode_sampling_nucleus_p) if strategy in ("nucleus", "composite") else 1.0
        )
        return cls(config.decode_sampling_temperature, top_k, top_p)

    @property
    def kind(self) -> "Kind":
        if self.temperature == 0:
            return Kind.GREEDY
        return Kind.TRUNCATED if self.top_k or self.top_p < 1 else Kind.WEIGHTED


GREEDILY = Sampling()
MOST = 2**31 - 1  # more tokens than any vocabulary has


class Kind(IntEnum):
    GREEDY = 0
    WEIGHTED = 1
    TRUNCATED = 2


def kind_of(samplings: Iterable[Sampling]) -> Kind:
    return max((sampling.kind for sampling in samplings), default=Kind.GREEDY)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """The wishes of each row, [B]."""

    temperature: Any
    top_k: Any
    top_p: Any

    @classmethod
    def of(cls, samplings: Sequence[Sampling]) -> "Rows":
        return cls(
            np.array([each.temperature for each in samplings], np.float32),
            np.array([min(each.top_k, MOST) for each in samplings], np.int32),
            # Not rounded to 0, which would leave no token in.
            np.array([max(each.top_p, LEAST_SHARE) for each in samplings], np.float32),
        )


def draw(logits: jax.Array, keys: jax.Array, rows: Rows, kind: Kind) -> jax.Array:
    """logits [B, V], a key a row -> tokens [B]."""
    logits = logits.astype(jnp.float32)
    likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if kind == Kind.GREEDY:
        return likeliest
    drawing = rows.temperature > 0
    # From the likeliest downwards, so that no temperature makes them infinite.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / jnp.where(
        drawing, rows.temperature, 1.0
    )[:, None]
    if kind == Kind.TRUNCATED:
        logits = jnp.where(logits < least_kept(logits, rows), -jnp.inf, logits)
    drawn = jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
    return jnp.where(drawing, drawn, likeliest)


def least_kept(logits: jax.Array, rows: Rows) -> jax.Array:
    """[B, 1], the score of the last token that top_k, and then top_p, leave in."""
    size = logits.shape[-1]
    ordered = jnp.sort(logits, axis=-1, descending=True)
    last = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, size), size)[:, None] - 1
    least = jnp.take_along_axis(ordered, last, axis=-1)
    shares = jax.nn.softmax(jnp.where(ordered < least, -jnp.inf, ordered), axis=-1)
    before = jnp.cumsum(shares, axis=-1) - shares
    # The likeliest always is in. All of the probability is all tokens, however the sum is rounded.
    inside = (before < rows.top_p[:, None]) | (rows.top_p[:, None] >= 1)
    return jnp.maximum(least, jnp.min(jnp.where(inside, ordered, jnp.inf), axis=-1, keepdims=True))
