"""Heads that draft tokens from what a model tapped at the tokens before: multi-token prediction
layers, and EAGLE-3 heads.

Shapes: B rows of a batch, C columns, K drafted tokens, E embed_dim, V vocabulary, n E what a model
taps at a token.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxtext.common.types import Tree
from maxtext.configs.types import MaxTextConfig
from maxtext.inference.engine.batches import EngineState
from maxtext.inference.engine.drafting import (
    DraftedWeights,
    DraftInputs,
    DraftPrefill,
    DraftSampler,
    Proposer,
)
from maxtext.inference.engine.grammar_batch import INACTIVE
from maxtext.inference.engine.model_runner import ModelRunner, at_last_token
from maxtext.layers.adapters import AdapterInputs, use_adapter_inputs
from maxtext.layers.cache import CacheConfig
from maxtext.layers.inputs import LayerInputs
from maxtext.layers.parameters import Template
from maxtext.layers.specs import AttentionSpec
from maxtext.models.registry import layers
from maxtext.models.transformer import Caches, Transformer, mtp_block


class HeadOutput(NamedTuple):
    hidden: jax.Array  # [B, C, E], the input for the next token
    logits_input: jax.Array  # [B, C, E]
    caches: Caches


class DraftHead(ABC):
    """A few layers on top of a model, that predict token t + 2 from token t + 1 and what the model
    tapped at token t; for further tokens from their own hidden state in its place. The entry of
    their caches at position t is that of the pair."""

    @abstractmethod
    def enter(self, tapped: jax.Array) -> jax.Array:
        """[B, C, n E] to the hidden state [B, C, E]."""

    @abstractmethod
    def step(
        self, hidden: jax.Array, token_ids: jax.Array, inputs: LayerInputs, caches: Caches
    ) -> HeadOutput:
        """Of hidden states [B, C, E] at the positions of the inputs, and the tokens after these."""

    @abstractmethod
    def logits(self, x: jax.Array, adapter_ids: jax.Array | None) -> jax.Array:
        """[B, C, E] to the logits [B, C, V] of the model's vocabulary, with adapters [B]."""


@dataclass(frozen=True)
class HeadProposer(Proposer):
    """The tokens that a head of the model samples, one after the other."""

    @abstractmethod
    def head(self, runner: ModelRunner, weights: DraftedWeights) -> DraftHead: ...

    def prefill(self, prompts: DraftPrefill) -> Caches:
        """All tokens of the batch but the last ones of complete prompts, after which there is
        none yet."""
        runner, weights, caches, batch, inputs, tapped = prompts
        assert tapped is not None
        assert batch.history is not None
        positions = inputs.positions
        rows = jnp.arange(len(positions))[:, None]
        if inputs.segments is not None:
            rows = jnp.maximum(inputs.segments - 1, 0)
        last = at_last_token(positions, inputs)
        ends = jnp.where(batch.is_complete, last, INACTIVE)[rows]
        tokens = jnp.asarray(batch.history)[rows, positions + 1]
        inputs = replace(inputs, positions=jnp.where(positions == ends, INACTIVE, positions))
        head = self.head(runner, weights)
        row_caches = [cache.rows(batch.slots) for cache in caches]
        output = head.step(head.enter(tapped), tokens, inputs, row_caches)
        return [
            old.set_rows(batch.slots, new) for old, new in zip(caches, output.caches, strict=True)
        ]

    def observe(self, inputs: DraftInputs) -> EngineState:
        drafting, (index, positions) = inputs.drafting, self.latest(inputs)
        head = self.head(inputs.runner, inputs.weights)
        hidden = head.enter(select_column(drafting.tapped, index))
        _, caches = inputs.runner.split_caches(inputs.state.caches)
        tokens = jnp.maximum(inputs.state.token_ids, 0)[:, None]
        output = head.step(hidden, tokens, inputs.layer_inputs(positions[:, None]), caches)
        return inputs.with_caches(output.caches)

    def propose(self, inputs: DraftInputs) -> tuple[jax.Array, EngineState]:
        """The head first steps over all tokens that the model has verified since its last draft,
        with what the model tapped at them in place of its own hidden states."""
        drafting, (index, latest) = inputs.drafting, self.latest(inputs)
        assert drafting.first is not None
        head = self.head(inputs.runner, inputs.weights)
        _, caches = inputs.runner.split_caches(inputs.state.caches)
        positions = drafting.first[:, None] + jnp.arange(self.num_tokens + 1)
        is_verified = (latest[:, None] >= positions) & (drafting.first[:, None] >= 0)
        positions = jnp.where(is_verified, positions, INACTIVE)
        tokens = jnp.take_along_axis(drafting.history, positions + 1, axis=1)
        assert drafting.tapped is not None
        hidden = head.enter(drafting.tapped)
        output = head.step(hidden, tokens, inputs.layer_inputs(positions), caches)
        output = output._replace(
            hidden=select_column(output.hidden, index),
            logits_input=select_column(output.logits_input, index),
        )
        newest = jnp.where(latest >= 0, inputs.newest, INACTIVE)

        def draft_token(carry: tuple, index: jax.Array) -> tuple[tuple, jax.Array]:
            output, positions, processors = carry
            logits = head.logits(output.logits_input, inputs.adapter_ids)[:, 0]
            tokens, sampler = DraftSampler(inputs, positions, processors).sample(logits, index)
            layer_inputs = inputs.layer_inputs(positions[:, None])
            next_tokens = jnp.maximum(tokens, 0)[:, None]
            output = head.step(output.hidden, next_tokens, layer_inputs, output.caches)
            return (output, *sampler[1:]), tokens

        carry: Any = (output, newest, inputs.processors)
        carry, drafts = jax.lax.scan(draft_token, carry, jnp.arange(self.num_tokens - 1))
        output, positions, processors = carry
        logits = head.logits(output.logits_input, inputs.adapter_ids)[:, 0]
        sampler = DraftSampler(inputs, positions, processors)
        last, _ = sampler.sample(logits, self.num_tokens - 1)
        return jnp.concatenate([drafts, last[None]]).T, inputs.with_caches(output.caches)

    def latest(self, inputs: DraftInputs) -> tuple[jax.Array, jax.Array]:
        """The column [B] of what the model tapped at the token before the newest, and the position
        [B] of that token; INACTIVE if no column has it."""
        first = inputs.drafting.first
        assert first is not None
        index = inputs.newest - 1 - first
        has_column = (first >= 0) & (index >= 0) & (index <= self.num_tokens)
        index = jnp.clip(index, 0, self.num_tokens)
        return index, jnp.where(has_column, first + index, INACTIVE)


def select_column(x: jax.Array | None, index: jax.Array) -> jax.Array:
    """[B, 1, ...] of x [B, C, ...]."""
    assert x is not None
    return jnp.take_along_axis(x, index[:, None, None], axis=1)


class MtpHead(DraftHead):
    """The first multi-token prediction layer of a model, whose embedding and head it shares. It
    also drafts the tokens for which others were trained."""

    def __init__(self, model: Transformer):
        assert model.mtp is not None, "`load_drafts` refuses models without MTP layers"
        self.model, self.layer = model, model.mtp.layers[0]

    def enter(self, tapped: jax.Array) -> jax.Array:
        return self.model.mtp_input(tapped)

    def step(
        self, hidden: jax.Array, token_ids: jax.Array, inputs: LayerInputs, caches: Caches
    ) -> HeadOutput:
        inputs = replace(inputs, cache=caches[0], tokens=token_ids)
        with use_adapter_inputs(inputs):
            embedded = self.model.embed(token_ids)
            hidden, logits_input, aux = self.layer(hidden, embedded, inputs)
        return HeadOutput(hidden, logits_input, [aux["cache"]])

    def logits(self, x: jax.Array, adapter_ids: jax.Array | None) -> jax.Array:
        with use_adapter_inputs(AdapterInputs(adapter_ids)):
            return self.model.logits(x)


@dataclass(frozen=True)
class MtpProposer(HeadProposer):
    """Drafts of the model's own multi-token prediction layer."""

    config: MaxTextConfig

    def taps(self, config: MaxTextConfig) -> tuple[int, ...]:
        return (len(layers(config)),)

    def init_caches(self, cache_config: CacheConfig) -> Caches:
        return [mtp_block(self.config).attention.cache(cache_config)]

    def head(self, runner: ModelRunner, weights: DraftedWeights) -> MtpHead:
        return MtpHead(runner.template.bind(weights.target))


class EagleHead(DraftHead):
    """An EAGLE-3 head; `weights` may have an embedding of their own."""

    def __init__(self, template: Template, weights: Tree, model: Transformer, vocab_size: int):
        self.eagle, self.weights = template.bind(weights["head"]), weights
        self.model, self.vocab_size = model, vocab_size

    def enter(self, tapped: jax.Array) -> jax.Array:
        return self.eagle.fuse(tapped)

    def step(
        self, hidden: jax.Array, token_ids: jax.Array, inputs: LayerInputs, caches: Caches
    ) -> HeadOutput:
        if "embedding" in self.weights:
            embedded = self.weights["embedding"][token_ids]
        else:
            with use_adapter_inputs(inputs):
                embedded = self.model.embedder(token_ids)
        inputs = replace(inputs, cache=caches[0], adapter_ids=None)
        with use_adapter_inputs(inputs):
            hidden, logits_input, aux = self.eagle(hidden, embedded.astype(hidden.dtype), inputs)
        return HeadOutput(hidden, logits_input, [aux["cache"]])

    def logits(self, x: jax.Array, adapter_ids: jax.Array | None) -> jax.Array:
        return self.eagle.logits(x, self.weights["token_ids"], self.vocab_size)


@dataclass(frozen=True)
class EagleProposer(HeadProposer):
    """Drafts of an EAGLE-3 head, from the residuals after these numbers of layers."""

    template: Template
    attention: AttentionSpec
    layer_outputs: tuple[int, ...]
    vocab_size: int

    def taps(self, config: MaxTextConfig) -> tuple[int, ...]:
        return self.layer_outputs

    def init_caches(self, cache_config: CacheConfig) -> Caches:
        return [self.attention.cache(cache_config)]

    def head(self, runner: ModelRunner, weights: DraftedWeights) -> EagleHead:
        model = runner.template.bind(weights.target)
        return EagleHead(self.template, weights.draft, model, self.vocab_size)
