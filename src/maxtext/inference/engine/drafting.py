"""Proposers of speculative decoding: they draft the next tokens of each row, which the model then
verifies in one forward pass (see `decode_loop.py`).

Shapes: B rows of a batch, L tokens of the longest sequence, K drafted tokens.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxtext.common.types import Tree
from maxtext.inference.engine.batches import NO_TOKEN, DecodeBatch, EngineState, sample_next
from maxtext.inference.engine.grammar_batch import INACTIVE, first_mask
from maxtext.inference.engine.model_runner import ModelRunner, split_caches
from maxtext.inference.sampling.logprobs import NONE
from maxtext.inference.sampling.sampler import ProcessorState
from maxtext.layers.inputs import LayerInputs


class DraftInputs(NamedTuple):
    weights: Tree
    state: EngineState
    batch: DecodeBatch
    processors: ProcessorState | None  # with the rows of the state
    mask: jax.Array | None  # [B, W]: the tokens that may come first


@dataclass(frozen=True)
class Proposer(ABC):
    num_tokens: int  # K
    # Of a model that drafts: programs take its weights as an argument.
    model_runner: ModelRunner | None = field(default=None, kw_only=True)
    model_weights: Tree = field(default=None, kw_only=True, repr=False)

    @abstractmethod
    def propose(self, inputs: DraftInputs) -> tuple[jax.Array, EngineState]:
        """Tokens [B, K] that may follow the newest token of each row of the state, NO_TOKEN where
        there is no proposal, and the state with the proposer's own caches."""


@dataclass(frozen=True)
class NgramProposer(Proposer):
    """Prompt lookup: the tokens that followed the latest earlier occurrence of a row's last n
    tokens, for the largest n between `min_length` and `max_length` that has one."""

    max_length: int
    min_length: int

    def propose(self, inputs: DraftInputs) -> tuple[jax.Array, EngineState]:
        state = inputs.state
        assert state.history is not None, "an engine that drafts has the tokens of its slots"
        drafts = lookup_ngrams(
            state.history,
            state.positions,
            num_tokens=self.num_tokens,
            max_length=self.max_length,
            min_length=self.min_length,
        )
        return drafts, state


@dataclass(frozen=True)
class DraftModelProposer(Proposer):
    """The tokens that a smaller model samples. Its noise is the target's, whose keys depend on the
    seed and position alone, so that random samples of both are often equal, as greedy ones are."""

    def propose(self, inputs: DraftInputs) -> tuple[jax.Array, EngineState]:
        runner, (weights, state, batch, processors, mask) = self.model_runner, inputs
        assert runner is not None, "the proposer of a draft model has its runner"
        target_caches, caches = split_caches(state.caches, runner)

        def draft_token(carry: tuple, index: jax.Array) -> tuple[tuple, jax.Array]:
            caches, token_ids, positions, processors = carry
            layer_inputs = LayerInputs(
                positions[:, None],
                block_table=jnp.asarray(batch.block_tables),
                contiguous=batch.contiguous,
                max_kv_len=batch.kv_len,
            )
            token_ids = jnp.maximum(token_ids, 0)[:, None]
            logits, caches = runner.decode(weights.draft, caches, token_ids, layer_inputs)
            sampled, active = sample_next(
                logits[:, 0],
                positions + 1,
                state.params,
                mode=batch.mode,
                num_logprobs=NONE,
                logprobs_temperature=1.0,
                active=positions >= 0,
                processors=processors,
                mask=first_mask(mask, index),
            )
            if processors is not None:
                processors = processors.add_tokens(sampled.tokens)
            positions = jnp.where(active, positions + 1, INACTIVE)
            return (caches, sampled.tokens, positions, processors), sampled.tokens

        # The last step samples nothing that is used: it writes the last draft to the caches.
        steps = jnp.arange(self.num_tokens + 1)
        carry: Any = (caches, state.token_ids, state.positions, processors)
        (caches, *_), drafts = jax.lax.scan(draft_token, carry, steps)
        return drafts[:-1].T, replace(state, caches=[*target_caches, *caches])


def lookup_ngrams(
    history: jax.Array,
    positions: jax.Array,
    *,
    num_tokens: int,
    max_length: int,
    min_length: int,
) -> jax.Array:
    """Drafted tokens [B, K] for rows of history [B, L] whose newest token is at `positions` [B];
    NO_TOKEN in rows without an earlier occurrence, and in inactive rows.

    With the occurrence ending at e and the newest token at p, draft k = 1..K is the token at e + k.
    Beyond p that is a draft itself, so the tokens e + 1 .. p repeat with the period p - e.
    """
    length = history.shape[1]
    newest = jnp.maximum(positions, 0)[:, None]
    ends = jnp.arange(length)
    num_equal = jnp.zeros(history.shape, jnp.int32)  # tokens up to each end that match the last
    matches = jnp.ones(history.shape, bool)
    for offset in range(max_length):
        token = jnp.take_along_axis(history, jnp.maximum(newest - offset, 0), axis=1)
        earlier = jnp.pad(history, ((0, 0), (offset, 0)), constant_values=NO_TOKEN)[:, :length]
        matches &= (earlier == token) & (newest >= offset)
        num_equal += matches
    is_match = (num_equal >= min_length) & (ends < newest) & (positions >= 0)[:, None]
    rank = jnp.where(is_match, num_equal * length + ends, INACTIVE)
    end = jnp.argmax(rank, axis=1, keepdims=True).astype(jnp.int32)
    period = jnp.maximum(newest - end, 1)
    index = end + 1 + jnp.arange(num_tokens) % period
    drafts = jnp.take_along_axis(history, jnp.minimum(index, length - 1), axis=1)
    return jnp.where(jnp.any(is_match, axis=1, keepdims=True), drafts, NO_TOKEN)
