"""Runs the model for the engine: token ids and caches in, logits of the next tokens and caches out.

Shapes: N slots (sequences that are generated at a time), R rows of a prefill batch, each with its
slot, C new tokens of a row, V vocabulary. Position -1 is padding.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxtext.common.trees import Array
from maxtext.common.types import Tree
from maxtext.configs.types import MaxTextConfig
from maxtext.layers.adapters import AdapterInputs, use_adapter_inputs
from maxtext.layers.cache import CacheConfig, PagedKVCache
from maxtext.layers.context import BuildContext
from maxtext.layers.inputs import LayerInputs
from maxtext.layers.parameters import Template
from maxtext.models.registry import layers
from maxtext.models.transformer import Caches, empty_caches


@dataclass(frozen=True)
class ModelRunner(ABC):
    """The forward passes of prefill and decode, as pure functions of weights and caches."""

    config: MaxTextConfig
    template: Template

    @staticmethod
    def from_config(
        config: MaxTextConfig, template: Template, build: BuildContext
    ) -> "ModelRunner":
        longest = CacheConfig(1, config.max_target_length, config.dtype.value, context=build)
        caches = jax.eval_shape(lambda: empty_caches(config, longest))
        runner = RecomputingModelRunner if caches is None else CachedModelRunner
        return runner(config, template)

    @abstractmethod
    def init_caches(self, cache_config: CacheConfig) -> Caches:
        """Empty caches."""

    @abstractmethod
    def prefill(
        self,
        weights: Tree,
        caches: Caches,
        token_ids: Array,
        inputs: LayerInputs,
        slots: Array,
    ) -> tuple[jax.Array, Caches, jax.Array]:
        """Logits [R, V] after the last token of each row of token_ids [R, C], the updated caches,
        and the hidden states [R, C, D]. A padding row has slot N. With segments, R sequences share
        one row: [1, C].
        """

    @abstractmethod
    def decode(
        self, weights: Tree, caches: Caches, token_ids: jax.Array, inputs: LayerInputs
    ) -> tuple[jax.Array, Caches]:
        """Logits [N, C, V] after each of token_ids [N, C], and the updated caches. Where some layer
        has no cache, C is 1."""

    def logits(self, weights: Tree, hidden: jax.Array, adapter_ids: jax.Array | None) -> jax.Array:
        """Hidden states [R, C, D] to logits [R, C, V]; adapter ids are [R] or [R, C]."""
        with use_adapter_inputs(AdapterInputs(adapter_ids)):
            return self.template.bind(weights).logits(hidden)


class CachedModelRunner(ModelRunner):
    """Every layer has a cache, so only new tokens are computed."""

    def init_caches(self, cache_config: CacheConfig) -> Caches:
        caches = empty_caches(self.config, cache_config)
        assert caches is not None, "from_config chose this class because there are caches"
        return caches

    def prefill(
        self,
        weights: Tree,
        caches: Caches,
        token_ids: Array,
        inputs: LayerInputs,
        slots: Array,
    ) -> tuple[jax.Array, Caches, jax.Array]:
        model = self.template.bind(weights)
        row_caches = [cache.rows(slots) for cache in caches]
        hidden, new_caches = model.step(token_ids, inputs, row_caches)
        caches = [old.set_rows(slots, new) for old, new in zip(caches, new_caches, strict=True)]
        last_hidden = at_last_token(hidden, inputs)
        if inputs.segments is not None:
            # In a shared row, non-finite keys and values were replaced by zeros (see
            # `layers.cache`): the sequence that they belong to must not go on.
            nonfinite = max_by_segment(~jnp.isfinite(hidden[0]).all(axis=-1), inputs) > 0
            last_hidden = jnp.where(nonfinite[:, None], jnp.nan, last_hidden)
        with use_adapter_inputs(AdapterInputs(sequence_adapters(inputs))):
            return model.logits(last_hidden[:, None])[:, 0], caches, hidden

    def decode(
        self, weights: Tree, caches: Caches, token_ids: jax.Array, inputs: LayerInputs
    ) -> tuple[jax.Array, Caches]:
        model = self.template.bind(weights)
        hidden, caches = model.step(token_ids, inputs, caches)
        with use_adapter_inputs(inputs):
            return model.logits(hidden), caches


class RecomputingModelRunner(ModelRunner):
    """Some layer has no cache, so every step runs the whole sequence again. The "cache" is the
    token ids [N, length].
    """

    def init_caches(self, cache_config: CacheConfig) -> Caches:
        return [{"ids": jnp.zeros((cache_config.slots, cache_config.length), jnp.int32)}]

    def prefill(
        self,
        weights: Tree,
        caches: Caches,
        token_ids: Array,
        inputs: LayerInputs,
        slots: Array,
    ) -> tuple[jax.Array, Caches, jax.Array]:
        all_ids = caches[0]["ids"]
        # Padding is out of bounds, so it is not written.
        columns = jnp.where(inputs.positions >= 0, inputs.positions, all_ids.shape[1])
        all_ids = all_ids.at[slots[:, None], columns].set(token_ids, mode="drop")
        last = inputs.positions.max(axis=1)
        logits, hidden = self.last_logits(weights, all_ids[slots], last, inputs.adapter_ids)
        positions = jnp.maximum(inputs.positions, 0)
        hidden = jnp.take_along_axis(hidden, positions[:, :, None], axis=1)
        return logits, [{"ids": all_ids}], hidden

    def decode(
        self, weights: Tree, caches: Caches, token_ids: jax.Array, inputs: LayerInputs
    ) -> tuple[jax.Array, Caches]:
        slots = jnp.arange(token_ids.shape[0])
        logits, caches, _ = self.prefill(weights, caches, token_ids, inputs, slots)
        return logits[:, None], caches

    def last_logits(
        self,
        weights: Tree,
        token_ids: jax.Array,
        last: jax.Array,
        adapter_ids: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Logits [R, V] at position last [R] of token_ids [R, length], and all hidden states."""
        model = self.template.bind(weights)
        positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1]), token_ids.shape)
        inputs = LayerInputs(positions, lengths=last + 1, adapter_ids=adapter_ids)
        hidden, _ = model.hidden(token_ids, inputs)
        # Only one position of each row goes through the output head.
        last_hidden = jnp.take_along_axis(hidden, jnp.maximum(last, 0)[:, None, None], axis=1)
        with use_adapter_inputs(inputs):
            return model.logits(last_hidden)[:, 0], hidden


class DraftedWeights(NamedTuple):
    target: Tree
    draft: Tree


@dataclass(frozen=True)
class DraftedModelRunner(ModelRunner):
    """A model and the one that drafts tokens for it: the caches of both hold the same tokens, and
    blocks of both are allocated together. The weights are `DraftedWeights`; `config` and `template`
    are the target's, as are all logits.
    """

    target: ModelRunner
    draft: ModelRunner

    def init_caches(self, cache_config: CacheConfig) -> Caches:
        return [*self.target.init_caches(cache_config), *self.draft.init_caches(cache_config)]

    def prefill(
        self,
        weights: Tree,
        caches: Caches,
        token_ids: Array,
        inputs: LayerInputs,
        slots: Array,
    ) -> tuple[jax.Array, Caches, jax.Array]:
        own, drafted = split_caches(caches, self.draft)
        logits, own, hidden = self.target.prefill(weights.target, own, token_ids, inputs, slots)
        inputs = replace(inputs, adapter_ids=None)
        _, drafted, _ = self.draft.prefill(weights.draft, drafted, token_ids, inputs, slots)
        return logits, [*own, *drafted], hidden

    def decode(
        self, weights: Tree, caches: Caches, token_ids: jax.Array, inputs: LayerInputs
    ) -> tuple[jax.Array, Caches]:
        """Several tokens a row are drafts, which the draft model has in its caches."""
        own, drafted = split_caches(caches, self.draft)
        logits, own = self.target.decode(weights.target, own, token_ids, inputs)
        if token_ids.shape[1] == 1:
            inputs = replace(inputs, adapter_ids=None)
            _, drafted = self.draft.decode(weights.draft, drafted, token_ids, inputs)
        return logits, [*own, *drafted]

    def logits(self, weights: Tree, hidden: jax.Array, adapter_ids: jax.Array | None) -> jax.Array:
        return self.target.logits(weights.target, hidden, adapter_ids)


def split_caches(caches: Caches, draft: ModelRunner) -> tuple[Caches, Caches]:
    """The caches of the target, and of the draft model, one for each layer."""
    count = len(caches) - len(layers(draft.config))
    return caches[:count], caches[count:]


def is_paged(cache: object) -> bool:
    """Whether the cache of a layer is a pool of blocks, and not per slot."""
    return isinstance(cache, PagedKVCache)


def select_caches(caches: Caches, paged: bool) -> Caches:
    """The caches that are block pools, or those that are per slot."""
    return [cache for cache in caches if is_paged(cache) == paged]


def at_last_token(x: jax.Array, inputs: LayerInputs) -> jax.Array:
    """[R, ...]: x [R, C, ...], or [1, C, ...] with segments, at the last token of each sequence."""
    if inputs.segments is None:
        last = jnp.maximum((inputs.positions >= 0).sum(axis=1) - 1, 0)
        return x[jnp.arange(x.shape[0]), last]
    return x[0, max_by_segment(jnp.arange(x.shape[1]), inputs)]


def sequence_adapters(inputs: LayerInputs) -> jax.Array | None:
    """The adapter of each sequence [R]."""
    if inputs.adapter_ids is None or inputs.segments is None:
        return inputs.adapter_ids
    return at_last_token(inputs.adapter_ids, inputs)


def max_by_segment(values: jax.Array, inputs: LayerInputs) -> jax.Array:
    """[R]: the maximum of values [C] >= 0 over the tokens of each sequence in a shared row."""
    assert inputs.block_table is not None
    assert inputs.segments is not None
    count, segments = inputs.block_table.shape[0], inputs.segments[0]
    index = jnp.where(segments > 0, segments - 1, count)  # padding is out of bounds
    return jnp.zeros(count, jnp.int32).at[index].max(values.astype(jnp.int32), mode="drop")
