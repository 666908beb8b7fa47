"""One training step and one evaluation step: pure functions, each under one jit.

`train_step(state, batch, key) -> (state, metrics)`. A batch may be cut into micro-batches whose gradients add up; the
loss is the sum over all learned tokens divided by their number, so the cut does not change the update.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxtext.layers.parameters import Template
from maxtext.optimizers import clip_by_global_norm
from maxtext.trainers.losses import Batch, language_model_sums, token_weights

Metrics = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    step: jax.Array
    weights: Any
    optimizer: Any


def make_train_step(
    config: Any,
    template: Template,
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: Callable[[jax.Array], jax.Array],
) -> Callable[[TrainState, Batch, jax.Array], tuple[TrainState, Metrics]]:
    pieces = config.gradient_accumulation_steps
    guarded = config.abort_on_nan_loss or config.abort_on_inf_loss
    dropping = config.enable_dropout and config.dropout_rate > 0

    def train_step(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, Metrics]:
        step_key = jax.random.fold_in(key, state.step) if dropping else None
        total = jnp.maximum(jnp.sum(token_weights(batch)), 1.0)

        def loss(weights: Any, piece: Batch, key: jax.Array | None) -> tuple[jax.Array, dict[str, jax.Array]]:
            sums = language_model_sums(config, template, weights, piece, key)
            means = {name: value / total for name, value in sums.items()}
            return sum(means.values(), jnp.float32(0)), means

        gradients, means = accumulate(jax.grad(loss, has_aux=True), state.weights, batch, step_key, pieces)
        gradients = jax.tree.map(lambda gradient: gradient.astype(config.grad_dtype.value), gradients)
        value = sum(means.values(), jnp.float32(0))
        clipped, raw_norm, norm = clip_by_global_norm(gradients, config.gradient_clipping_threshold)
        updates, optimizer_state = optimizer.update(
            clipped, state.optimizer, state.weights, loss=value, raw_grad_norm=raw_norm
        )
        new = TrainState(state.step + 1, optax.apply_updates(state.weights, updates), optimizer_state)
        if guarded:
            # The weights of the last good step stay: the loop ends when it sees the loss of this one.
            good = jnp.isfinite(value) & jnp.isfinite(raw_norm)
            new = jax.tree.map(lambda after, before: jnp.where(good, after, before), new, state)
        metrics = means | {
            "loss": value,
            "learning_rate": schedule(state.step),
            "grad_norm": norm,
            "raw_grad_norm": raw_norm,
            "param_norm": optax.global_norm(new.weights),
            "total_weights": jnp.sum(token_weights(batch)),
        }
        skipped = getattr(optimizer_state, "skipped", None)
        if skipped is not None:
            metrics["skipped"] = skipped.astype(jnp.float32)
        return new, metrics

    return train_step


def accumulate(
    gradient: Callable, weights: Any, batch: Batch, key: jax.Array | None, pieces: int
) -> tuple[Any, dict[str, jax.Array]]:
    """Gradients and loss parts summed over `pieces` equal cuts of the batch, one after the other."""
    if pieces == 1:
        return gradient(weights, batch, key)

    def cut(field: jax.Array) -> jax.Array:
        # Rows are dealt out in turn, so that each piece holds rows of every device.
        return field.reshape(field.shape[0] // pieces, pieces, *field.shape[1:]).swapaxes(0, 1)

    def add(sums: Any, piece: tuple[jax.Array, Batch]) -> tuple[Any, None]:
        index, rows = piece
        piece_key = None if key is None else jax.random.fold_in(key, index)
        return jax.tree.map(jnp.add, sums, gradient(weights, rows, piece_key)), None

    cuts = jax.tree.map(cut, batch)
    shapes = jax.eval_shape(gradient, weights, jax.tree.map(lambda field: field[0], cuts), key)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    sums, _ = jax.lax.scan(add, zeros, (jnp.arange(pieces), cuts))
    return sums


def make_eval_step(config: Any, template: Template) -> Callable[[Any, Batch], Metrics]:
    """(sum of losses, number of tokens) of a batch."""

    def eval_step(weights: Any, batch: Batch) -> Metrics:
        sums = language_model_sums(config, template, weights, batch, None)
        return {"loss": sums["lm_loss"], "weights": jnp.sum(token_weights(batch))}

    return eval_step
