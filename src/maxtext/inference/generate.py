"""Generation without a cache: every new token runs the whole sequence again, in one compiled loop."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.inference.sampling import Sampling, draw
from maxtext.layers.inputs import LayerInputs
from maxtext.layers.parameters import Template

BUCKET = 64  # lengths are rounded up to multiples of it, so that few programs are compiled

# (weights, rows [B, L], the place in each row to continue from [B]) -> scores of the next token [B, V]
Scores = Callable[[Any, jax.Array, jax.Array], jax.Array]


def make_generator(scores: Scores, sampling: Sampling) -> Callable:
    """A jitted (weights, rows [B, L], lengths [B], new tokens, seed, ids that end a row [n]) -> (rows, lengths).

    Rows hold their prompt from the left. A row's draws depend on the seed, its number and its length alone.
    """

    def generate(
        weights: Any, rows: jax.Array, lengths: jax.Array, count: jax.Array, seed: jax.Array, ends: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        number = jnp.arange(rows.shape[0])
        keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.key(seed), row))(number)

        def going(state: tuple) -> jax.Array:
            step, _, _, done = state
            return (step < count) & ~jnp.all(done)

        def advance(state: tuple) -> tuple:
            step, rows, lengths, done = state
            row_keys = jax.vmap(jax.random.fold_in)(keys, lengths)
            tokens = draw(scores(weights, rows, lengths - 1), row_keys, sampling)
            ended = jnp.any(tokens[:, None] == ends, axis=-1)
            written = rows.at[number, lengths].set(tokens)
            rows = jnp.where(done[:, None], rows, written)
            return step + 1, rows, jnp.where(done, lengths, lengths + 1), done | ended

        state = (jnp.int32(0), rows, lengths, jnp.zeros(rows.shape[0], bool))
        _, rows, lengths, _ = jax.lax.while_loop(going, advance, state)
        return rows, lengths

    return jax.jit(generate)


def padded(prompts: Sequence[Sequence[int]], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as rows [B, L] with room for `count` more, and their lengths."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    width = -(-(int(lengths.max()) + count) // BUCKET) * BUCKET
    rows = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = prompt
    return rows, lengths


def extend(
    generate: Callable, weights: Any, prompts: Sequence[Sequence[int]], count: int, seed: int, ends: Sequence[int]
) -> list[list[int]]:
    """The new ids of each prompt: up to `count`, or up to and with one of `ends`."""
    rows, lengths = padded(prompts, count)
    stops = np.asarray(list(ends) or [-1], np.int32)  # no token has the id -1
    done, reached = generate(weights, rows, lengths, np.int32(count), np.uint32(seed), stops)
    done, reached = np.asarray(done), np.asarray(reached)
    return [done[row, start:end].tolist() for row, (start, end) in enumerate(zip(lengths, reached, strict=True))]


def last_scores(template: Template, weights: Any, rows: jax.Array, last: jax.Array) -> jax.Array:
    """The scores after one place of each row: only those go through the head."""
    model = template.bind(weights)
    positions = jnp.broadcast_to(jnp.arange(rows.shape[1]), rows.shape)
    hidden, _ = model.hidden(rows, LayerInputs(positions))
    return model.logits(jnp.take_along_axis(hidden, last[:, None, None], axis=1))[:, 0]
