"""Scores of the next tokens: from what the layers keep, or from all tokens anew where some layer
keeps nothing.

Both offer the same. Slots are sequences that are worked on at a time; a batch of prompts has rows,
each with its slot. Shapes: N slots, R rows, C new tokens of a row, V vocabulary. Position -1 is no
token.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from maxtext.configs.types import MaxTextConfig
from maxtext.layers.cache import PAGES, CacheSize
from maxtext.layers.inputs import LayerInputs
from maxtext.layers.parameters import Template
from maxtext.models.transformer import Caches, empty_caches


@dataclass(frozen=True)
class Cached:
    """A new token runs alone."""

    config: MaxTextConfig
    template: Template

    def empty(self, size: CacheSize) -> Caches:
        caches = empty_caches(self.config, size)
        assert caches is not None, "asked before"
        return caches

    def of_prompts(
        self, weights: Any, caches: Caches, ids: jax.Array, inputs: LayerInputs, slots: jax.Array
    ) -> tuple[jax.Array, Caches]:
        """Scores [R, V] after the last of ids [R, C], and what is kept then. A row without tokens
        has slot N. With segments, R sequences are in one row, ids [1, C]."""
        model = self.template.bind(weights)
        rows = [
            cache if PAGES in cache else jax.tree.map(lambda x: x[slots], cache) for cache in caches
        ]
        hidden, after = model.step(ids, inputs, rows)
        caches = [
            new
            if PAGES in old
            else jax.tree.map(lambda x, y: x.at[slots].set(y, mode="drop"), old, new)
            for old, new in zip(caches, after, strict=True)
        ]
        last = at_last(hidden, inputs)
        if inputs.segments is not None:
            # A sequence that shares its row has lost what is not a number on the way: see
            # `cache.extended`.
            lost = of_sequences(~jnp.isfinite(hidden[0]).all(axis=-1), inputs) > 0
            last = jnp.where(lost[:, None], jnp.nan, last)
        return model.logits(last[:, None])[:, 0], caches

    def of_slots(
        self, weights: Any, caches: Caches, ids: jax.Array, inputs: LayerInputs
    ) -> tuple[jax.Array, Caches]:
        """Scores [N, V] after ids [N, 1], one more token of each slot, and what is kept then."""
        model = self.template.bind(weights)
        hidden, caches = model.step(ids, inputs, caches)
        return model.logits(hidden)[:, 0], caches


def at_last(x: jax.Array, inputs: LayerInputs) -> jax.Array:
    """[R, ...]: of x [R, C, ...], or [1, C, ...] with segments, what is at the last token of each
    sequence.
    """
    if inputs.segments is None:
        last = jnp.maximum((inputs.positions >= 0).sum(axis=1) - 1, 0)
        return x[jnp.arange(x.shape[0]), last]
    return x[0, of_sequences(jnp.arange(x.shape[1]), inputs)]


def of_sequences(numbers: jax.Array, inputs: LayerInputs) -> jax.Array:
    """[R]: the largest of [C] numbers, from 0 on, that each sequence has in their row."""
    assert inputs.table is not None
    assert inputs.segments is not None
    count, segments = inputs.table.shape[0], inputs.segments[0]
    own = jnp.where(segments > 0, segments - 1, count)  # out of bounds: nobody's
    return jnp.zeros(count, jnp.int32).at[own].max(numbers.astype(jnp.int32), mode="drop")


@dataclass(frozen=True)
class Recomputed:
    """All tokens run again, so they are what is kept: [N, length]."""

    template: Template

    def empty(self, size: CacheSize) -> Caches:
        return [{"ids": jnp.zeros((size.slots, size.length), jnp.int32)}]

    def of_prompts(
        self, weights: Any, caches: Caches, ids: jax.Array, inputs: LayerInputs, slots: jax.Array
    ) -> tuple[jax.Array, Caches]:
        kept = caches[0]["ids"]
        place = jnp.where(
            inputs.positions >= 0, inputs.positions, kept.shape[1]
        )  # out of bounds: not written
        kept = kept.at[slots[:, None], place].set(ids, mode="drop")
        return self.scores(weights, kept[slots], inputs.positions.max(axis=1)), [{"ids": kept}]

    def of_slots(
        self, weights: Any, caches: Caches, ids: jax.Array, inputs: LayerInputs
    ) -> tuple[jax.Array, Caches]:
        return self.of_prompts(weights, caches, ids, inputs, jnp.arange(ids.shape[0]))

    def scores(self, weights: Any, rows: jax.Array, last: jax.Array) -> jax.Array:
        model = self.template.bind(weights)
        positions = jnp.broadcast_to(jnp.arange(rows.shape[1]), rows.shape)
        hidden, _ = model.hidden(rows, LayerInputs(positions, lengths=last + 1))
        # Only one place of each row goes through the head.
        return model.logits(
            jnp.take_along_axis(hidden, jnp.maximum(last, 0)[:, None, None], axis=1)
        )[:, 0]


def scorer(config: MaxTextConfig, template: Template) -> Cached | Recomputed:
    longest = CacheSize(1, config.max_target_length, config.dtype.value)
    possible = jax.eval_shape(lambda: empty_caches(config, longest))
    return Recomputed(template) if possible is None else Cached(config, template)
