"""Sampling from logits over the vocabulary, and the logits processors that precede it.

Every row has its own parameters, held in arrays, so one compiled program serves any mix of
requests. `SamplingMode` is the exception: it is static, because sorting the vocabulary is
expensive, and the most demanding row of a batch decides it. A row's token does not depend on the
mode of the program that samples it.

`process_logits` applies penalties, biases, minimum lengths and allowed tokens. Each slot has a row
of per-token state for it on the device, `ProcessorState`, which a program updates as it samples, so
decode programs of several steps need no host in between. The state exists once a request uses a
processor, and only programs for batches with such a request take it as an argument.

Shapes: N slots, B rows of a batch, V vocabulary, E stop ids.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.common import hash_rng
from maxtext.common.trees import Array
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

    temperature: Array  # [B] float32
    top_k: Array  # [B] int32
    top_p: Array  # [B] float32
    seed: Array  # [B] uint32
    last_position: Array  # [B] int32, the position of the last token that may be sampled
    stop_ids: Array  # [B, E] int32, padded with -1
    min_p: Array  # [B] float32
    presence_penalty: Array  # [B] float32
    frequency_penalty: Array  # [B] float32
    repetition_penalty: Array  # [B] float32
    min_position: Array  # [B] int32, the position of the first token that may end the sequence
    has_processors: Array  # [B] bool, whether the logits of the row are processed

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


def prompt_seed(seed: int, index: int) -> int:
    """The seed of a prompt in a list. The first prompt uses the seed itself, as if it were
    alone."""
    if index == 0:
        return seed
    return derive_seed(fold_seed(seed), index)


def token_keys(seeds: Array, positions: Array) -> jax.Array:
    """The random key of each row [B, 2], from its seed and the position of the token."""

    def token_key(seed: jax.Array, position: jax.Array) -> jax.Array:
        return hash_rng.fold_in(jnp.stack([seed, ~seed]), position)

    return jax.vmap(token_key)(jnp.asarray(seeds), jnp.asarray(positions))


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


IN_PROMPT, ENDS_SEQUENCE, EXCLUDED = 1, 2, 4  # flags of a token


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ProcessorState:
    """The state of the logits processors for every token of the vocabulary."""

    output_counts: Array  # [N, V] int32, occurrences in the completion
    flags: Array  # [N, V] uint8
    bias: Array  # [N, V] float32

    @classmethod
    def zeros(cls, num_slots: int, vocab_size: int) -> "ProcessorState":
        shape = (num_slots, vocab_size)
        return cls(
            output_counts=jnp.zeros(shape, jnp.int32),
            flags=jnp.zeros(shape, jnp.uint8),
            bias=jnp.zeros(shape, jnp.float32),
        )

    @classmethod
    def from_tokens(
        cls,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        params: SamplingParams,
        vocab_size: int,
    ) -> "ProcessorState":
        """The row [V] of a sequence, on the host."""
        flags = np.zeros(vocab_size, np.uint8)
        flags[list(prompt_ids)] |= IN_PROMPT
        flags[[token for token in params.stop_token_ids if token < vocab_size]] |= ENDS_SEQUENCE
        biased, biases, allowed = params.token_arrays
        if allowed is not None:
            is_allowed = np.zeros(vocab_size, bool)
            is_allowed[allowed] = True
            flags[~is_allowed] |= EXCLUDED
        bias = np.zeros(vocab_size, np.float32)
        bias[biased] = biases
        return cls(
            output_counts=np.bincount(
                np.asarray(output_ids, np.int64), minlength=vocab_size
            ).astype(np.int32),
            flags=flags,
            bias=bias,
        )

    def rows(self, slots: Array) -> "ProcessorState":
        return jax.tree.map(lambda x: x[slots], self)

    def set_rows(self, slots: Array | np.int32, rows: "ProcessorState") -> "ProcessorState":
        return jax.tree.map(lambda x, y: x.at[slots].set(y, mode="drop"), self, rows)

    def add_tokens(self, token_ids: jax.Array) -> "ProcessorState":
        """The rows with one more token each; a negative id is none."""
        vocab_size = self.output_counts.shape[-1]
        index = jnp.where(token_ids >= 0, token_ids, vocab_size)  # out of bounds: not counted
        rows = jnp.arange(token_ids.shape[0])
        counts = jnp.asarray(self.output_counts)
        return replace(self, output_counts=counts.at[rows, index].add(1, mode="drop"))


def process_logits(
    logits: jax.Array,
    state: ProcessorState,
    params: BatchedSamplingParams,
    positions: Array,
) -> jax.Array:
    """Logits [B, V] of the tokens at `positions` [B] -> processed logits in float32, as
    `SamplingParams` describes. `state` and `params` have the rows of the logits.
    """
    logits = logits.astype(jnp.float32)
    processed = logits + state.bias
    counts = state.output_counts
    occurs = (counts > 0) | (state.flags & IN_PROMPT > 0)
    penalty = params.repetition_penalty[:, None]
    penalized = jnp.where(processed > 0, processed / penalty, processed * penalty)
    processed = jnp.where(occurs, penalized, processed)
    processed -= params.frequency_penalty[:, None] * counts
    processed -= params.presence_penalty[:, None] * (counts > 0)
    too_early = (positions < params.min_position)[:, None]
    is_excluded = too_early & (state.flags & ENDS_SEQUENCE > 0)
    is_excluded |= state.flags & EXCLUDED > 0
    processed = jnp.where(is_excluded, -jnp.inf, processed)
    return jnp.where(params.has_processors[:, None], processed, logits)
