"""Logits processors: penalties, biases, minimum lengths and allowed tokens, before sampling.

Each slot has a row of per-token state on the device, which a program updates as it samples, so
decode programs of several steps need no host in between. The state exists once a request uses a
processor, and only programs for batches with such a request take it as an argument. Shapes:
N slots, B rows of a batch, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.inference.sampling.params import SamplingParams
from maxtext.inference.sampling.sampler import BatchedSamplingParams

IN_PROMPT, ENDS_SEQUENCE, EXCLUDED = 1, 2, 4  # flags of a token


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ProcessorState:
    """What the processors know about every token of the vocabulary."""

    output_counts: Any  # [N, V] int32, occurrences in the completion
    flags: Any  # [N, V] uint8
    bias: Any  # [N, V] float32

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

    def rows(self, slots: jax.Array) -> "ProcessorState":
        return jax.tree.map(lambda x: x[slots], self)

    def set_rows(self, slots: Any, rows: "ProcessorState") -> "ProcessorState":
        return jax.tree.map(lambda x, y: x.at[slots].set(y, mode="drop"), self, rows)

    def add_tokens(self, token_ids: jax.Array) -> "ProcessorState":
        """The rows with one more token each; a negative id is none."""
        vocab_size = self.output_counts.shape[-1]
        index = jnp.where(token_ids >= 0, token_ids, vocab_size)  # out of bounds: not counted
        rows = jnp.arange(token_ids.shape[0])
        return replace(self, output_counts=self.output_counts.at[rows, index].add(1, mode="drop"))


def process_logits(
    logits: jax.Array,
    state: ProcessorState,
    params: BatchedSamplingParams,
    positions: jax.Array,
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
