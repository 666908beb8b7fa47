"""Sampling: from logits over the vocabulary to the next token.

Shapes: B rows, V vocabulary, E stop ids. Every row has its own parameters, held in arrays, so one
compiled program serves any mix of requests. `SamplingMode` is the exception: it is static, because
sorting the vocabulary is expensive, and the most demanding row of a batch decides it. A row's token
does not depend on the mode of the program that samples it.
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

MAX_TEMPERATURE = 1e30  # representable in float32
MIN_TOP_P = float(np.finfo(np.float32).tiny)
MAX_TOP_K = 2**31 - 1  # larger than any vocabulary
MAX_STOP_IDS = 8  # checked on the device; the host checks the others


class SamplingMode(IntEnum):
    """What a compiled program has to do, in increasing order of cost."""

    GREEDY = 0
    CATEGORICAL = 1
    TRUNCATED = 2


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are sampled, and when generation stops.

    `temperature` 0 is greedy. Otherwise a token is sampled from softmax(logits / temperature),
    restricted to the `top_k` most likely tokens (0: all) and then to the smallest set that holds
    `top_p` of the remaining probability. Tokens that tie with the last token of a set belong to it.

    A token depends on `seed`, its position and its own sequence only. Generation stops after
    `max_new_tokens`, with a token in `stop_token_ids`, with the model's end-of-sequence token
    unless `ignore_eos`, or before the first text in `stop`. `log_probs` also returns the
    log-probability of every token under the unmodified logits.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 64
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    log_probs: bool = False

    def __post_init__(self) -> None:
        for name, kinds in (("temperature", Real), ("top_k", Integral), ("top_p", Real)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kinds):
                expected = "whole number" if kinds is Integral else "number"
                raise UserError(f"{name} must be a {expected}, not {str(value)[:60]!r}")
        if not 0 <= self.temperature <= MAX_TEMPERATURE:
            value = str(self.temperature)[:60]
            raise UserError(f"temperature={value} must be a number from 0 to {MAX_TEMPERATURE:g}")
        if self.top_k < 0:
            raise UserError(
                f"top_k={str(self.top_k)[:60]} must be at least 0; 0 disables the restriction"
            )
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={str(self.top_p)[:60]} must be above 0 and at most 1")
        if self.temperature == 0 and (self.top_k or self.top_p < 1):
            raise UserError(
                "top_k and top_p restrict sampling, but temperature=0 is greedy: "
                "set temperature above 0"
            )

    @classmethod
    def from_config(cls, config: MaxTextConfig, **overrides: Any) -> "SamplingParams":
        """The parameters that the decode_sampling_* keys describe; `overrides` are other fields."""
        strategy = config.decode_sampling_strategy.value
        if strategy == "greedy":
            return cls(**overrides)
        top_k = config.decode_sampling_top_k if strategy in ("topk", "composite") else 0
        top_p = (
            float(config.decode_sampling_nucleus_p) if strategy in ("nucleus", "composite") else 1.0
        )
        temperature = config.decode_sampling_temperature
        return cls(temperature=temperature, top_k=top_k, top_p=top_p, **overrides)

    @property
    def mode(self) -> SamplingMode:
        if self.temperature == 0:
            return SamplingMode.GREEDY
        truncated = self.top_k or self.top_p < 1
        return SamplingMode.TRUNCATED if truncated else SamplingMode.CATEGORICAL


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

    @classmethod
    def from_params(
        cls, params: Sequence[SamplingParams], last_positions: Sequence[int] | None = None
    ) -> "BatchedSamplingParams":
        stop_ids = np.full((len(params), MAX_STOP_IDS), -1, np.int32)
        for row, request in zip(stop_ids, params, strict=True):
            ids = request.stop_token_ids[:MAX_STOP_IDS]
            row[: len(ids)] = ids
        return cls(
            temperature=np.array([request.temperature for request in params], np.float32),
            top_k=np.array([min(request.top_k, MAX_TOP_K) for request in params], np.int32),
            # float32 must not round a tiny top_p to 0, which would exclude every token.
            top_p=np.array([max(request.top_p, MIN_TOP_P) for request in params], np.float32),
            seed=np.array([request.seed % 2**32 for request in params], np.uint32),
            last_position=np.array(last_positions or [0] * len(params), np.int32),
            stop_ids=stop_ids,
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
        )


def sample(
    logits: jax.Array, keys: jax.Array, params: BatchedSamplingParams, mode: SamplingMode
) -> jax.Array:
    """Sample one token a row: logits [B, V] and a PRNG key a row -> token ids [B]."""
    logits = logits.astype(jnp.float32)
    greedy_tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if mode == SamplingMode.GREEDY:
        return greedy_tokens
    is_random = params.temperature > 0
    temperature = jnp.where(is_random, params.temperature, 1.0)[:, None]
    # The largest logit becomes 0, so that no temperature makes a logit infinite.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    if mode == SamplingMode.TRUNCATED:
        logits = jnp.where(logits < truncation_threshold(logits, params), -jnp.inf, logits)
    random_tokens = jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
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
