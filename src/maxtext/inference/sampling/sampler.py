"""Sampling: from logits over the vocabulary to the next token.

Shapes: B rows, V vocabulary, E stop ids. Every row has its own parameters, held in arrays, so one
compiled program serves any mix of requests. `SamplingMode` is the exception: it is static, because
sorting the vocabulary is expensive, and the most demanding row of a batch decides it. A row's token
does not depend on the mode of the program that samples it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.common import hash_rng
from maxtext.inference.sampling.params import SamplingMode, SamplingParams

MIN_TOP_P = float(np.finfo(np.float32).tiny)
MAX_TOP_K = 2**31 - 1  # larger than any vocabulary
MAX_STOP_IDS = 8  # checked on the device; the host checks the others


def batch_mode(params: Iterable[SamplingParams]) -> SamplingMode:
    """The mode that serves all of these requests."""
    return max((request.mode for request in params), default=SamplingMode.GREEDY)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BatchedSamplingParams:
    """The sampling parameters of B rows, as arrays."""

    temperature: Any  # [B] float32
    top_k: Any  # [B] int32
    top_p: Any  # [B] float32
    seed: Any  # [B] uint32
    last_position: Any  # [B] int32, the position of the last token that may be sampled
    stop_ids: Any  # [B, E] int32, padded with -1
    min_p: Any  # [B] float32
    presence_penalty: Any  # [B] float32
    frequency_penalty: Any  # [B] float32
    repetition_penalty: Any  # [B] float32
    min_position: Any  # [B] int32, the position of the first token that may end the sequence
    has_processors: Any  # [B] bool, whether the logits of the row are processed

    @classmethod
    def from_params(
        cls,
        params: Sequence[SamplingParams],
        last_positions: Sequence[int] | None = None,
        min_positions: Sequence[int] | None = None,
    ) -> "BatchedSamplingParams":
        stop_ids = np.full((len(params), MAX_STOP_IDS), -1, np.int32)
        for row, request in zip(stop_ids, params, strict=True):
            ids = request.stop_token_ids[:MAX_STOP_IDS]
            row[: len(ids)] = ids

        def column(name: str) -> np.ndarray:
            return np.array([getattr(request, name) for request in params], np.float32)

        return cls(
            temperature=column("temperature"),
            top_k=np.array([min(request.top_k, MAX_TOP_K) for request in params], np.int32),
            # float32 must not round a tiny top_p to 0, which would exclude every token.
            top_p=np.maximum(column("top_p"), MIN_TOP_P),
            seed=np.array([fold_seed(request.seed) for request in params], np.uint32),
            last_position=np.array(last_positions or [0] * len(params), np.int32),
            stop_ids=stop_ids,
            min_p=column("min_p"),
            presence_penalty=column("presence_penalty"),
            frequency_penalty=column("frequency_penalty"),
            repetition_penalty=column("repetition_penalty"),
            min_position=np.array(min_positions or [0] * len(params), np.int32),
            has_processors=np.array([request.has_processors for request in params], bool),
        )

    @classmethod
    def zeros(cls, rows: int) -> "BatchedSamplingParams":
        """Device arrays for rows without a request."""
        ints = jnp.zeros(rows, jnp.int32)
        floats = jnp.zeros(rows, jnp.float32)
        return cls(
            temperature=floats,
            top_k=ints,
            top_p=floats,
            seed=ints.astype(jnp.uint32),
            last_position=ints,
            stop_ids=jnp.full((rows, MAX_STOP_IDS), -1, jnp.int32),
            min_p=floats,
            presence_penalty=floats,
            frequency_penalty=floats,
            repetition_penalty=floats + 1,
            min_position=ints,
            has_processors=jnp.zeros(rows, bool),
        )


def fold_seed(seed: int) -> int:
    """A seed of 32 bits for any seed of 64: itself if it fits."""
    if 0 <= seed < 2**32:
        return seed
    return derive_seed(seed % 2**64)


def derive_seed(*entropy: int) -> int:
    """A seed of 32 bits that depends on all of these numbers."""
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def token_keys(seeds: jax.Array, positions: jax.Array) -> jax.Array:
    """The random key of each row [B, 2], from its seed and the position of the token."""

    def token_key(seed: jax.Array, position: jax.Array) -> jax.Array:
        return hash_rng.fold_in(jnp.stack([seed, ~seed]), position)

    return jax.vmap(token_key)(seeds, positions)


def sample(
    logits: jax.Array, keys: jax.Array, params: BatchedSamplingParams, mode: SamplingMode
) -> jax.Array:
    """Sample one token a row: logits [B, V] and `token_keys` -> token ids [B]."""
    logits = logits.astype(jnp.float32)
    greedy_tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if mode == SamplingMode.GREEDY:
        return greedy_tokens
    is_random = params.temperature > 0
    temperature = jnp.where(is_random, params.temperature, 1.0)[:, None]
    # The largest logit becomes 0, so that no temperature makes a logit infinite.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    min_p_threshold = jnp.log(params.min_p)[:, None]
    if mode == SamplingMode.TRUNCATED:
        logits = jnp.where(logits < truncation_threshold(logits, params), -jnp.inf, logits)
    logits = jnp.where(logits < min_p_threshold, -jnp.inf, logits)
    noise = jax.vmap(lambda key: hash_rng.gumbel(key, logits.shape[1:]))(keys)
    random_tokens = jnp.argmax(logits + noise, axis=-1).astype(jnp.int32)
    return jnp.where(is_random, random_tokens, greedy_tokens)


def truncation_threshold(logits: jax.Array, params: BatchedSamplingParams) -> jax.Array:
    """[B, 1], the smallest logit that top_k, and then top_p, leaves in."""
    vocab_size = logits.shape[-1]
    descending = jnp.sort(logits, axis=-1, descending=True)
    last = jnp.where(params.top_k > 0, jnp.minimum(params.top_k, vocab_size), vocab_size)
    threshold = jnp.take_along_axis(descending, last[:, None] - 1, axis=-1)
    probs = jax.nn.softmax(jnp.where(descending < threshold, -jnp.inf, descending), axis=-1)
    preceding = jnp.cumsum(probs, axis=-1) - probs
    # The most likely token is always in. top_p=1 keeps all tokens, however the sum is rounded.
    in_nucleus = (preceding < params.top_p[:, None]) | (params.top_p[:, None] >= 1)
    nucleus_min = jnp.min(jnp.where(in_nucleus, descending, jnp.inf), axis=-1, keepdims=True)
    return jnp.maximum(threshold, nucleus_min)
