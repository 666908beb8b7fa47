"""Log-probabilities of tokens under the model's own logits, before any processing.

Shapes: V vocabulary, K most likely tokens, R rows of a prefill batch, C tokens of a row.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

COUNTS = (0, 5, 20, 128)  # most likely tokens that programs return: every count is a program
MAX_LOGPROBS = COUNTS[-1]
NONE = -1  # in place of a count: no log-probabilities at all
TILE_TOKENS = 512  # of prompts, whose logits a program has at a time


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Logprobs:
    """Of one token at each of some positions, [...], and of the most likely tokens there."""

    token: jax.Array  # [...] float32
    top_ids: jax.Array  # [..., K] int32, the most likely first
    top: jax.Array  # [..., K] float32
    rank: jax.Array  # [...] int32, of the token: how many tokens are at least as likely

    def column(self, index: int) -> "Logprobs":
        """Of positions [T, B]: those of one row, [T]."""
        return jax.tree.map(lambda x: x[:, index], self)

    @classmethod
    def zeros(cls, shape: tuple[int, ...], count: int) -> "Logprobs":
        return cls(
            token=jnp.zeros(shape, jnp.float32),
            top_ids=jnp.zeros((*shape, count), jnp.int32),
            top=jnp.zeros((*shape, count), jnp.float32),
            rank=jnp.zeros(shape, jnp.int32),
        )


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability of a token. `top` also has it, among the most likely tokens at its
    position, by token id; the most likely come first.
    """

    logprob: float
    top: Mapping[int, float]
    rank: int = 0  # how many tokens are at least as likely: 1 for the most likely one


def program_count(counts: Iterable[int | None], vocab_size: int) -> int:
    """How many of the most likely tokens a program returns for requests of these counts; NONE if no
    request wants log-probabilities.
    """
    wanted = max((count for count in counts if count is not None), default=NONE)
    return wanted if wanted < 0 else min(next(n for n in COUNTS if n >= wanted), vocab_size)


def compute_logprobs(logits: jax.Array, token_ids: jax.Array, count: int) -> Logprobs:
    """Logits [..., V] and token ids [...] -> log-probabilities of the tokens and of the `count`
    most likely ones.
    """
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    top, top_ids = jax.lax.top_k(logprobs, count)
    index = jnp.maximum(token_ids, 0)[..., None]
    token = jnp.take_along_axis(logprobs, index, axis=-1)[..., 0]
    rank = jnp.sum(logprobs >= token[..., None], axis=-1, dtype=jnp.int32)
    return Logprobs(token, top_ids.astype(jnp.int32), top=top, rank=rank)


def prompt_logprobs(
    hidden: jax.Array,
    targets: jax.Array,
    adapter_ids: jax.Array | None,
    project: Callable[[jax.Array, jax.Array | None], jax.Array],
    count: int,
) -> Logprobs:
    """Hidden states [R, C, D] and the token after each, targets [R, C] -> their log-probabilities.
    `project` maps hidden states and adapter ids ([R], or [R, C] of tokens) to logits; its results
    exist for a few tokens at a time.
    """
    rows, length = targets.shape
    limit = max(TILE_TOKENS // rows, 1)
    size = max(size for size in range(1, length + 1) if length % size == 0 and size <= limit)

    def tiles(x: jax.Array) -> jax.Array:
        """[R, C, ...] -> [C / size, R, size, ...]"""
        return jnp.moveaxis(x.reshape(rows, length // size, size, *x.shape[2:]), 1, 0)

    by_token = adapter_ids is not None and adapter_ids.ndim == 2

    def one_tile(inputs: tuple) -> Logprobs:
        x, tokens, ids = inputs
        return compute_logprobs(project(x, ids if by_token else adapter_ids), tokens, count)

    ids = tiles(adapter_ids) if by_token and adapter_ids is not None else None
    result = jax.lax.map(one_tile, (tiles(hidden), tiles(targets), ids))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(rows, length, *x.shape[3:]), result)


def to_host(logprobs: Logprobs, token_ids: Iterable[int], count: int) -> list[TokenLogprobs]:
    """Host arrays of positions [T] as records, with the `count` most likely tokens of each."""
    columns = (
        logprobs.token,
        logprobs.top_ids[:, :count],
        logprobs.top[:, :count],
        logprobs.rank,
    )
    rows = zip(token_ids, *(np.asarray(column).tolist() for column in columns), strict=False)
    return [
        TokenLogprobs(logprob, dict(zip(top_ids, top, strict=True)) | {token: logprob}, rank)
        for token, logprob, top_ids, top, rank in rows
    ]
