"""Generation in one compiled loop: prompts of any lengths at once, then a token of each row at a time.

A row's draws depend on the seed, its number and its length alone, and its scores on its own tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.inference.sampling import Sampling, draw
from maxtext.layers.inputs import LayerInputs
from maxtext.layers.parameters import Template
from maxtext.models.transformer import empty_caches

BUCKET = 64  # lengths are rounded up to multiples of it, so that few programs are compiled


@dataclass(frozen=True)
class Cached:
    """Scores of the next tokens from what the layers keep: a new token runs alone."""

    config: Any
    template: Template

    def start(self, weights: Any, rows: jax.Array, lengths: jax.Array, width: int) -> tuple[jax.Array, Any]:
        """Scores [B, V] after the first `lengths` tokens of rows [B, L], all within `width`, and what is kept."""
        caches = empty_caches(self.config, *rows.shape)
        assert caches is not None, "asked before"
        place = jnp.arange(width)
        positions = jnp.where(place < lengths[:, None], place, -1)
        model = self.template.bind(weights)
        hidden, caches = model.step(rows[:, :width], LayerInputs(positions, fresh=True), caches)
        last = jnp.take_along_axis(hidden, lengths[:, None, None] - 1, axis=1)
        return model.logits(last)[:, 0], caches

    def next(self, weights: Any, caches: Any, rows: jax.Array, lengths: jax.Array) -> tuple[jax.Array, Any]:
        """The same with one more token in each row."""
        model = self.template.bind(weights)
        last = lengths[:, None] - 1
        hidden, caches = model.step(jnp.take_along_axis(rows, last, axis=1), LayerInputs(last), caches)
        return model.logits(hidden)[:, 0], caches


@dataclass(frozen=True)
class Recomputed:
    """The same from all tokens anew, for models with parts that keep nothing."""

    template: Template

    def start(self, weights: Any, rows: jax.Array, lengths: jax.Array, width: int) -> tuple[jax.Array, Any]:
        return self.next(weights, (), rows, lengths)

    def next(self, weights: Any, nothing: Any, rows: jax.Array, lengths: jax.Array) -> tuple[jax.Array, Any]:
        model = self.template.bind(weights)
        positions = jnp.broadcast_to(jnp.arange(rows.shape[1]), rows.shape)
        hidden, _ = model.hidden(rows, LayerInputs(positions))
        # Only one place of each row goes through the head.
        return model.logits(jnp.take_along_axis(hidden, lengths[:, None, None] - 1, axis=1))[:, 0], nothing


def scorer(config: Any, template: Template) -> Cached | Recomputed:
    possible = jax.eval_shape(lambda: empty_caches(config, 1, 1))
    return Recomputed(template) if possible is None else Cached(config, template)


def make_generator(scores: Cached | Recomputed, sampling: Sampling) -> Callable:
    """A jitted (weights, rows [B, L], lengths [B], new tokens, seed, ids that end a row [n], width) -> (rows, lengths).

    Rows hold their prompt from the left, within the first `width` places.
    """

    @partial(jax.jit, static_argnums=6)
    def generate(
        weights: Any,
        rows: jax.Array,
        lengths: jax.Array,
        count: jax.Array,
        seed: jax.Array,
        ends: jax.Array,
        width: int,
    ) -> tuple[jax.Array, jax.Array]:
        number = jnp.arange(rows.shape[0])
        keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.key(seed), row))(number)

        def chosen(found: jax.Array, rows: jax.Array, lengths: jax.Array, done: jax.Array) -> tuple:
            """The rows with the tokens that the scores give, where a row has not ended."""
            tokens = draw(found, jax.vmap(jax.random.fold_in)(keys, lengths), sampling)
            rows = jnp.where(done[:, None], rows, rows.at[number, lengths].set(tokens))
            ended = jnp.any(tokens[:, None] == ends, axis=-1)
            return rows, jnp.where(done, lengths, lengths + 1), done | ended

        def going(state: tuple) -> jax.Array:
            step, _, (_, _, done) = state
            return (step < count) & ~jnp.all(done)

        def advance(state: tuple) -> tuple:
            step, kept, (rows, lengths, done) = state
            found, kept = scores.next(weights, kept, rows, lengths)
            return step + 1, kept, chosen(found, rows, lengths, done)

        found, kept = scores.start(weights, rows, lengths, width)
        first = chosen(found, rows, lengths, jnp.zeros(rows.shape[0], bool))
        _, _, (rows, lengths, _) = jax.lax.while_loop(going, advance, (jnp.int32(1), kept, first))
        return rows, lengths

    return generate


def bucket(length: int) -> int:
    return -(-length // BUCKET) * BUCKET


def padded(prompts: Sequence[Sequence[int]], count: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Prompts as rows [B, L] with room for `count` more, their lengths, and the places that all of them are within."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    rows = np.zeros((len(prompts), bucket(int(lengths.max()) + count)), np.int32)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = prompt
    return rows, lengths, bucket(int(lengths.max()))


def extend(
    generate: Callable, weights: Any, prompts: Sequence[Sequence[int]], count: int, seed: int, ends: Sequence[int]
) -> list[list[int]]:
    """The new ids of each prompt: up to `count`, or up to and with one of `ends`."""
    rows, lengths, width = padded(prompts, count)
    stops = np.asarray(list(ends) or [-1], np.int32)  # no token has the id -1
    done, reached = generate(weights, rows, lengths, np.int32(count), np.uint32(seed), stops, width)
    done, reached = np.asarray(done), np.asarray(reached)
    return [done[row, start:end].tolist() for row, (start, end) in enumerate(zip(lengths, reached, strict=True))]
