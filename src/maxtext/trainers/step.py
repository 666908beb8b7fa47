"""One training step and one evaluation step: pure functions, each under one jit.

`train_step(state, batch, key) -> (state, metrics)`. A batch may be cut into micro-batches whose gradients add up; the
loss is the sum over all learned tokens divided by their number, so the cut does not change the update.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxtext.layers.parameters import Template
from maxtext.optimizers import clip_by_global_norm, global_norm
from maxtext.sharding.explicit import as_first, by_compiler, zeros_like
from maxtext.sharding.state import to_device
from maxtext.trainers.after_update import after_update
from maxtext.trainers.losses import Batch, evaluation_sums, language_model_losses, token_counts, token_weights

Metrics = dict[str, jax.Array]
GO_ON, STOP, ENDED = range(3)  # what processes vote (see feed.py); the strongest counts


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """`lost`: a step had no finite loss, and nothing has changed since (see `hold`)."""

    step: jax.Array
    weights: Any
    optimizer: Any
    lost: jax.Array


def make_train_step(
    config: Any,
    template: Template,
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: Callable[[jax.Array], jax.Array],
    to_optimizer: Callable[[Any], Any] = lambda gradients: gradients,
) -> Callable[[TrainState, Batch, jax.Array], tuple[TrainState, Metrics]]:
    pieces = config.gradient_accumulation_steps
    dropping = config.enable_dropout and config.dropout_rate > 0

    def train_step(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, Metrics]:
        vote = jnp.max(batch["vote"]) if "vote" in batch else None
        batch = {name: field for name, field in batch.items() if name != "vote"}
        step_key = jax.random.fold_in(key, state.step) if dropping else None
        counts = token_counts(config, batch)

        def loss(weights: Any, piece: Batch, key: jax.Array | None) -> tuple[jax.Array, tuple[Metrics, dict]]:
            losses = language_model_losses(config, template, weights, piece, key)
            means = {name: value / counts[name] for name, value in losses.sums.items()}
            means |= {name: value / pieces for name, value in losses.auxiliary.items()}
            return objective(config, means), (means, losses.reports)

        gradients, (means, reports) = accumulate(jax.grad(loss, has_aux=True), state.weights, batch, step_key, pieces)
        if config.parameter_memory_host_offload:
            gradients, state = to_device(gradients), replace(state, weights=to_device(state.weights))
        if config.optimizer_memory_host_offload:
            state = replace(state, optimizer=to_device(state.optimizer))
        gradients = jax.tree.map(lambda gradient: gradient.astype(config.grad_dtype.value), to_optimizer(gradients))
        value = objective(config, means)
        clipped, raw_norm, norm = clip_by_global_norm(gradients, config.gradient_clipping_threshold)
        updates, optimizer_state = optimizer.update(
            clipped, state.optimizer, state.weights, loss=value, raw_grad_norm=raw_norm
        )
        if warms_up(config):
            weights = optax.apply_updates(state.weights, of_indexers(updates))
        else:
            weights = optax.apply_updates(state.weights, updates)
            weights = as_first(lambda weights, reports: after_update(config, weights, reports), weights, reports)
        new = TrainState(state.step + 1, weights, optimizer_state, state.lost)
        if config.abort_on_nan_loss or config.abort_on_inf_loss:
            new = hold(new, state, is_lost(config, value) | is_lost(config, raw_norm))
        if vote is not None:
            new = choose(vote == ENDED, state, new)
        metrics = means | {
            "loss": value,
            "learning_rate": schedule(updates_done(state)),
            "grad_norm": norm,
            "raw_grad_norm": raw_norm,
            "param_norm": global_norm(new.weights),
            "total_weights": jnp.sum(token_weights(batch)),
        }
        if vote is not None:
            metrics["vote"] = vote.astype(jnp.float32)
        skipped = getattr(optimizer_state, "skipped", None)
        if skipped is not None:
            metrics["skipped"] = skipped.astype(jnp.float32)
        return new, metrics

    return train_step


def warms_up(config: Any) -> bool:
    """Whether indexers learn what attention looks at while it is still dense: they alone change."""
    return config.use_indexer and config.indexer_loss_scaling_factor > 0 and not config.indexer_sparse_training


def objective(config: Any, means: Metrics) -> jax.Array:
    """What is minimised."""
    learned = {"indexer_loss": means["indexer_loss"]} if warms_up(config) else means
    return sum(learned.values(), jnp.float32(0))


def of_indexers(updates: Any) -> Any:
    """The updates of indexers, and none of other weights, which would still decay without a gradient."""

    def kept(path: tuple, update: jax.Array) -> jax.Array:
        return update if any(getattr(step, "key", None) == "indexer" for step in path) else jnp.zeros_like(update)

    return jax.tree.map_with_path(kept, updates)


def is_lost(config: Any, value: jax.Array) -> jax.Array:
    """Whether a loss or a norm is of a kind that ends the run."""
    return (jnp.isnan(value) & config.abort_on_nan_loss) | (jnp.isinf(value) & config.abort_on_inf_loss)


def hold(after: TrainState, before: TrainState, lost: jax.Array) -> TrainState:
    """The state before a lost step, for that step and those dispatched after it, until the loop sees the loss."""
    lost = lost | before.lost
    return replace(choose(lost, before, after), lost=lost)


def choose(first: jax.Array, one: TrainState, other: TrainState) -> TrainState:
    return jax.tree.map(lambda one, other: jax.lax.select(first, one, other), one, other)


def updates_done(state: TrainState) -> jax.Array:
    """The optimizer's own count, by which it reads its schedule: a skipped step does not advance it."""
    counts = optax.tree_utils.tree_get_all_with_path(state.optimizer, "count")
    return counts[0][1] if counts else state.step


def accumulate(gradient: Callable, weights: Any, batch: Batch, key: jax.Array | None, pieces: int) -> tuple[Any, Any]:
    """Gradients and what comes with them summed over `pieces` equal cuts of the batch, one after the other."""
    if pieces == 1:
        return gradient(weights, batch, key)

    def cut(field: jax.Array) -> jax.Array:
        # Rows are dealt out in turn, so that each piece holds rows of every device.
        dealt, _ = by_compiler(
            lambda field: (field.reshape(field.shape[0] // pieces, pieces, *field.shape[1:]).swapaxes(0, 1), None),
            field, axes=(None, "activation_embed_and_logits_batch", "activation_norm_length"),
        )  # fmt: skip
        return dealt

    def merge(path: tuple, sums: jax.Array, piece: jax.Array) -> jax.Array:
        largest = getattr(path[-1], "key", None) == "max_logits"
        return jnp.maximum(sums, piece) if largest else sums + piece

    def add(sums: Any, piece: tuple[jax.Array, Batch]) -> tuple[Any, None]:
        index, rows = piece
        piece_key = None if key is None else jax.random.fold_in(key, index)
        return jax.tree.map_with_path(merge, sums, gradient(weights, rows, piece_key)), None

    cuts = jax.tree.map(cut, batch)
    shapes = jax.eval_shape(gradient, weights, jax.tree.map(lambda field: field[0], cuts), key)
    sums, _ = jax.lax.scan(add, zeros_like(shapes), (jnp.arange(pieces), cuts))
    return sums


def make_eval_step(config: Any, template: Template) -> Callable[[Any, Batch], Metrics]:
    """Sums over a batch, of the losses and of what they are divided by."""
    return lambda weights, batch: evaluation_sums(config, template, weights, batch)
