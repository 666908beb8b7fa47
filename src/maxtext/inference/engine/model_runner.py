"""Runs the model for the engine: token ids and caches in, logits of the next tokens and caches out.

Shapes: N slots (sequences that are generated at a time), R rows of a prefill batch, each with its
slot, C new tokens of a row, V vocabulary. Position -1 is padding.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
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


class ModelOutput(NamedTuple):
    """Of C columns of each row. A prefill has logits [R, V] of the last tokens alone."""

    logits: jax.Array  # [R, C, V]
    caches: Caches  # the updated ones
    hidden: jax.Array  # [R, C, E]
    tapped: jax.Array | None = None  # [R, C, n E], the residuals after n of the layers


@dataclass(frozen=True)
class ModelRunner(ABC):
    """The forward passes of prefill and decode, as pure functions of weights and caches. Residuals
    are tapped after these numbers of layers."""

    config: MaxTextConfig
    template: Template
    taps: tuple[int, ...] = ()

    @staticmethod
    def from_config(
        config: MaxTextConfig, template: Template, build: BuildContext, taps: tuple[int, ...] = ()
    ) -> "ModelRunner":
        longest = CacheConfig(1, config.max_target_length, config.dtype.value, context=build)
        caches = jax.eval_shape(lambda: empty_caches(config, longest))
        runner = RecomputingModelRunner if caches is None else CachedModelRunner
        return runner(config, template, taps)

    @abstractmethod
    def init_caches(self, cache_config: CacheConfig) -> Caches:
        """Empty caches."""

    @property
    @abstractmethod
    def num_caches(self) -> int: ...

    def split_caches(self, caches: Caches) -> tuple[Caches, Caches]:
        """The caches of the model, and others after them."""
        return caches[: self.num_caches], caches[self.num_caches :]

    @abstractmethod
    def prefill(
        self,
        weights: Tree,
        caches: Caches,
        token_ids: Array,
        inputs: LayerInputs,
        slots: Array,
    ) -> ModelOutput:
        """Of token_ids [R, C]. A padding row has slot N. With segments, R sequences share one row:
        [1, C].
        """

    @abstractmethod
    def decode(
        self, weights: Tree, caches: Caches, token_ids: jax.Array, inputs: LayerInputs
    ) -> ModelOutput:
        """Of token_ids [N, C]. Where some layer has no cache, C is 1."""

    def logits(self, weights: Tree, hidden: jax.Array, adapter_ids: jax.Array | None) -> jax.Array:
        """Hidden states [R, C, D] to logits [R, C, V]; adapter ids are [R] or [R, C]."""
        with use_adapter_inputs(AdapterInputs(adapter_ids)):
            return self.template.bind(weights).logits(hidden)


class CachedModelRunner(ModelRunner):
    """Every layer has a cache, so only new tokens are computed."""

    @property
    def num_caches(self) -> int:
        return len(layers(self.config))

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
    ) -> ModelOutput:
        model = self.template.bind(weights)
        row_caches = [cache.rows(slots) for cache in caches]
        hidden, new_caches, tapped = model.step(token_ids, inputs, row_caches, self.taps)
        caches = [old.set_rows(slots, new) for old, new in zip(caches, new_caches, strict=True)]
        last_hidden = at_last_token(hidden, inputs)
        if inputs.segments is not None:
            # In a shared row, non-finite keys and values were replaced by zeros (see
            # `layers.cache`): the sequence that they belong to must not go on.
            nonfinite = max_by_segment(~jnp.isfinite(hidden[0]).all(axis=-1), inputs) > 0
            last_hidden = jnp.where(nonfinite[:, None], jnp.nan, last_hidden)
        with use_adapter_inputs(AdapterInputs(sequence_adapters(inputs))):
            logits = model.logits(last_hidden[:, None])[:, 0]
        return ModelOutput(logits, caches, hidden, tapped)

    def decode(
        self, weights: Tree, caches: Caches, token_ids: jax.Array, inputs: LayerInputs
    ) -> ModelOutput:
        model = self.template.bind(weights)
        hidden, caches, tapped = model.step(token_ids, inputs, caches, self.taps)
        with use_adapter_inputs(inputs):
            return ModelOutput(model.logits(hidden), caches, hidden, tapped)


class RecomputingModelRunner(ModelRunner):
    """Some layer has no cache, so every step runs the whole sequence again. The "cache" is the
    token ids [N, length].
    """

    num_caches = 1

    def init_caches(self, cache_config: CacheConfig) -> Caches:
        return [{"ids": jnp.zeros((cache_config.slots, cache_config.length), jnp.int32)}]

    def prefill(
        self,
        weights: Tree,
        caches: Caches,
        token_ids: Array,
        inputs: LayerInputs,
        slots: Array,
    ) -> ModelOutput:
        all_ids = caches[0]["ids"]
        # Padding is out of bounds, so it is not written.
        columns = jnp.where(inputs.positions >= 0, inputs.positions, all_ids.shape[1])
        all_ids = all_ids.at[slots[:, None], columns].set(token_ids, mode="drop")
        last = inputs.positions.max(axis=1)
        logits, hidden = self.last_logits(weights, all_ids[slots], last, inputs.adapter_ids)
        positions = jnp.maximum(inputs.positions, 0)
        hidden = jnp.take_along_axis(hidden, positions[:, :, None], axis=1)
        return ModelOutput(logits, [{"ids": all_ids}], hidden)

    def decode(
        self, weights: Tree, caches: Caches, token_ids: jax.Array, inputs: LayerInputs
    ) -> ModelOutput:
        slots = jnp.arange(token_ids.shape[0])
        output = self.prefill(weights, caches, token_ids, inputs, slots)
        return output._replace(logits=output.logits[:, None])

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
