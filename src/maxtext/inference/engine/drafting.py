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
from maxtext.configs.types import MaxTextConfig
from maxtext.inference.engine.batches import (
    NO_TOKEN,
    DecodeBatch,
    EngineState,
    PrefillBatch,
    sample_next,
)
from maxtext.inference.engine.draft_state import DraftState
from maxtext.inference.engine.grammar_batch import INACTIVE, first_mask
from maxtext.inference.engine.model_runner import ModelOutput, ModelRunner
from maxtext.inference.sampling.logprobs import NONE
from maxtext.inference.sampling.sampler import ProcessorState
from maxtext.layers.cache import CacheConfig
from maxtext.layers.inputs import LayerInputs
from maxtext.models.transformer import Caches


class DraftedWeights(NamedTuple):
    target: Tree
    draft: Tree = None  # of another model or head that drafts

    @staticmethod
    def of(weights: Tree) -> "DraftedWeights":
        return weights if isinstance(weights, DraftedWeights) else DraftedWeights(weights)


class DraftInputs(NamedTuple):
    runner: ModelRunner  # of the model that verifies the drafts
    weights: DraftedWeights
    state: EngineState
    batch: DecodeBatch
    processors: ProcessorState | None  # with the rows of the state
    mask: jax.Array | None  # [B, W]: the tokens that may come first
    adapter_ids: jax.Array | None = None  # [B]; None: the model has no adapters

    @property
    def newest(self) -> jax.Array:
        """The position of the newest token of each row."""
        return self.state.positions

    @property
    def drafting(self) -> DraftState:
        assert self.state.drafting is not None, "the state of an engine that drafts has it"
        return self.state.drafting

    def layer_inputs(self, positions: jax.Array) -> LayerInputs:
        return LayerInputs(
            positions,
            block_table=jnp.asarray(self.batch.block_tables),
            contiguous=self.batch.contiguous,
            max_kv_len=self.batch.kv_len,
            adapter_ids=self.adapter_ids,
        )

    def with_caches(self, caches: Caches) -> EngineState:
        """The state with other caches of the proposer."""
        own, _ = self.runner.split_caches(self.state.caches)
        return replace(self.state, caches=[*own, *caches])


class DraftPrefill(NamedTuple):
    runner: ModelRunner  # as in `DraftInputs`
    weights: DraftedWeights
    caches: Caches  # of the proposer
    batch: PrefillBatch
    inputs: LayerInputs  # of the model's prefill
    tapped: jax.Array | None  # [R, C, n E], in that prefill


@dataclass(frozen=True)
class Proposer(ABC):
    """Its caches follow those of the model that verifies the drafts. All have the same tokens, and
    blocks of all are allocated together."""

    num_tokens: int  # K
    # Of another model or head that drafts: programs take them as an argument.
    weights: Tree = field(default=None, kw_only=True, repr=False)

    @abstractmethod
    def propose(self, inputs: DraftInputs) -> tuple[jax.Array, EngineState]:
        """Tokens [B, K] that may follow the newest token of each row of the state, NO_TOKEN where
        there is no proposal, and the state with the proposer's own caches."""

    def observe(self, inputs: DraftInputs) -> EngineState:
        """The state after a step without drafts, with the newest tokens in the proposer's
        caches."""
        return inputs.state

    def taps(self, config: MaxTextConfig) -> tuple[int, ...]:
        """After how many layers of the model the residuals are that the proposer reads."""
        return ()

    def init_caches(self, cache_config: CacheConfig) -> Caches:
        return []

    def prefill(self, prompts: DraftPrefill) -> Caches:
        """The proposer's caches with the tokens of the prompts."""
        return prompts.caches


@dataclass(frozen=True)
class NgramProposer(Proposer):
    """Prompt lookup: the tokens that followed the latest earlier occurrence of a row's last n
    tokens, for the largest n between `min_length` and `max_length` that has one."""

    max_length: int
    min_length: int

    def propose(self, inputs: DraftInputs) -> tuple[jax.Array, EngineState]:
        drafts = lookup_ngrams(
            inputs.drafting.history,
            inputs.newest,
            num_tokens=self.num_tokens,
            max_length=self.max_length,
            min_length=self.min_length,
        )
        return drafts, inputs.state


class DraftSampler(NamedTuple):
    """Samples drafted tokens with the noise of the model itself, whose keys depend on the seed and
    position alone, so that random samples of both are often equal, as greedy ones are."""

    inputs: DraftInputs
    positions: jax.Array  # [B], of the newest token, which may be a draft; INACTIVE: no more drafts
    processors: ProcessorState | None

    def sample(self, logits: jax.Array, index: jax.Array | int) -> "tuple[jax.Array, DraftSampler]":
        """The draft [B] of this index from logits [B, V]."""
        state, batch = self.inputs.state, self.inputs.batch
        sampled, active = sample_next(
            logits,
            self.positions + 1,
            state.params,
            mode=batch.mode,
            num_logprobs=NONE,
            logprobs_temperature=1.0,
            active=self.positions >= 0,
            processors=self.processors,
            mask=first_mask(self.inputs.mask, index),
        )
        processors = self.processors
        if processors is not None:
            processors = processors.add_tokens(sampled.tokens)
        positions = jnp.where(active, self.positions + 1, INACTIVE)
        return sampled.tokens, self._replace(positions=positions, processors=processors)


@dataclass(frozen=True)
class DraftModelProposer(Proposer):
    """The tokens that a smaller model samples."""

    model_runner: ModelRunner

    def init_caches(self, cache_config: CacheConfig) -> Caches:
        return self.model_runner.init_caches(cache_config)

    def prefill(self, prompts: DraftPrefill) -> Caches:
        batch, inputs = prompts.batch, replace(prompts.inputs, adapter_ids=None)
        output = self.model_runner.prefill(
            prompts.weights.draft, prompts.caches, batch.token_ids, inputs, batch.slots
        )
        return output.caches

    def decode(
        self, inputs: DraftInputs, caches: Caches, token_ids: jax.Array, positions: jax.Array
    ) -> ModelOutput:
        layer_inputs = replace(inputs.layer_inputs(positions[:, None]), adapter_ids=None)
        token_ids = jnp.maximum(token_ids, 0)[:, None]
        return self.model_runner.decode(inputs.weights.draft, caches, token_ids, layer_inputs)

    def observe(self, inputs: DraftInputs) -> EngineState:
        _, caches = inputs.runner.split_caches(inputs.state.caches)
        output = self.decode(inputs, caches, inputs.state.token_ids, inputs.newest)
        return inputs.with_caches(output.caches)

    def propose(self, inputs: DraftInputs) -> tuple[jax.Array, EngineState]:
        _, caches = inputs.runner.split_caches(inputs.state.caches)

        def draft_token(carry: tuple, index: jax.Array) -> tuple[tuple, jax.Array]:
            caches, token_ids, positions, processors = carry
            output = self.decode(inputs, caches, token_ids, positions)
            sampler = DraftSampler(inputs, positions, processors)
            token_ids, sampler = sampler.sample(output.logits[:, 0], index)
            return (output.caches, token_ids, *sampler[1:]), token_ids

        # The last step samples nothing that is used: it writes the last draft to the caches.
        steps = jnp.arange(self.num_tokens + 1)
        carry: Any = (caches, inputs.state.token_ids, inputs.newest, inputs.processors)
        (caches, *_), drafts = jax.lax.scan(draft_token, carry, steps)
        return drafts[:-1].T, inputs.with_caches(caches)


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
