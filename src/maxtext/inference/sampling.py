"""From scores over the vocabulary to the next token."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from maxtext.common.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """`temperature` 0 takes the likeliest token. Otherwise a token is drawn from the softmax of the scores over the
    temperature: of the `top_k` likeliest (0: all), and of those the fewest that hold `top_p` of the probability."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise UserError(f"temperature={self.temperature} must be at least 0")
        if self.top_k < 0:
            raise UserError(f"top_k={self.top_k} must be at least 0; 0 leaves all tokens in")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} must be above 0 and at most 1")
        if self.temperature == 0 and (self.top_k or self.top_p < 1):
            raise UserError("top_k and top_p choose what is drawn from, and temperature=0 draws nothing: raise it")


def draw(logits: jax.Array, keys: jax.Array, sampling: Sampling) -> jax.Array:
    """logits [B, V], a key a row -> tokens [B]."""
    logits = logits.astype(jnp.float32)
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / sampling.temperature
    if sampling.top_k:
        least = jax.lax.top_k(logits, min(sampling.top_k, logits.shape[-1]))[0][..., -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sampling.top_p < 1:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        before = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1) - jax.nn.softmax(ordered, axis=-1)
        kept = jnp.where(before < sampling.top_p, ordered, jnp.inf)  # the likeliest always is
        logits = jnp.where(logits < jnp.min(kept, axis=-1, keepdims=True), -jnp.inf, logits)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
