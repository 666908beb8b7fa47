"""One training step and one evaluation step: pure functions, each under one jit.

`train_step(state, batch, key) -> (state, metrics)`. A batch may be cut into micro-batches whose
gradients add up; the loss is the sum over all learned tokens divided by their number, so the cut
does not change the update.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxtext.configs.types import MaxTextConfig
from maxtext.layers.parameters import Template
from maxtext.optimizers import clip_by_global_norm, global_norm, trainable_parameters
from maxtext.sharding.explicit import as_first, by_compiler, zeros_like
from maxtext.sharding.state import to_device
from maxtext.trainers.after_update import after_update
from maxtext.trainers.losses import (
    Batch,
    evaluation_sums,
    language_model_losses,
    token_counts,
    token_weights,
)

Metrics = dict[str, jax.Array]
GO_ON, STOP, ENDED = range(3)  # what processes vote (see feed.py); the strongest counts
MAX_NONFINITE_STEPS = (
    10  # in a row that skip_step_on_spikes skips, before abort_on_{nan,inf}_loss ends the run
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """`nonfinite_steps`: int32, the steps in a row up to this one whose loss or gradient norm is of
    a kind that ends the run. Once they reach `max_nonfinite_steps` nothing changes any more (see
    `hold_if_failed`)."""

    step: jax.Array
    weights: Any
    optimizer: Any
    nonfinite_steps: jax.Array


def make_train_step(
    config: MaxTextConfig,
    template: Template,
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: Callable[[jax.Array], jax.Array],
    to_optimizer: Callable[[Any], Any] = lambda gradients: gradients,
) -> Callable[[TrainState, Batch, jax.Array], tuple[TrainState, Metrics]]:
    pieces = config.gradient_accumulation_steps
    trainable = trainable_weights(config, template)
    dropping = config.enable_dropout and config.dropout_rate > 0

    def train_step(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, Metrics]:
        vote = jnp.max(batch["vote"]) if "vote" in batch else None
        batch = {name: field for name, field in batch.items() if name != "vote"}
        step_key = jax.random.fold_in(key, state.step) if dropping else None
        counts = token_counts(config, batch)

        def loss(
            weights: Any, piece: Batch, key: jax.Array | None
        ) -> tuple[jax.Array, tuple[Metrics, dict]]:
            losses = language_model_losses(config, template, weights, piece, key)
            means = {name: value / counts[name] for name, value in losses.sums.items()}
            means |= {name: value / pieces for name, value in losses.auxiliary.items()}
            return objective(config, means), (means, losses.reports)

        gradients, (means, reports) = accumulate(
            jax.grad(loss, has_aux=True),
            state.weights,
            batch,
            step_key,
            pieces,
            config.grad_dtype.value,
        )
        if config.parameter_memory_host_offload:
            gradients, state = (
                to_device(gradients),
                replace(state, weights=to_device(state.weights)),
            )
        if config.optimizer_memory_host_offload:
            state = replace(state, optimizer=to_device(state.optimizer))
        gradients = to_optimizer(select_trainable(gradients, trainable))
        gradients = jax.tree.map(
            lambda gradient: gradient.astype(config.grad_dtype.value), gradients
        )
        value = objective(config, means)
        clipped, raw_norm, norm = clip_by_global_norm(gradients, config.gradient_clipping_threshold)
        updates, optimizer_state = optimizer.update(
            clipped, state.optimizer, state.weights, loss=value, raw_grad_norm=raw_norm
        )
        # Weight decay would change weights without a gradient.
        weights = optax.apply_updates(state.weights, select_trainable(updates, trainable))
        if not warms_up(config):
            weights = as_first(
                lambda weights, reports: after_update(config, weights, reports), weights, reports
            )
        skipped = getattr(optimizer_state, "skipped", None)
        if skipped is not None:
            weights = choose(skipped, state.weights, weights)
        new = TrainState(state.step + 1, weights, optimizer_state, state.nonfinite_steps)
        if config.abort_on_nan_loss or config.abort_on_inf_loss:
            new = hold_if_failed(
                config, new, state, is_nonfinite(config, value) | is_nonfinite(config, raw_norm)
            )
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
        if skipped is not None:
            metrics["skipped"] = skipped.astype(jnp.float32)
        return new, metrics

    return train_step


def warms_up(config: MaxTextConfig) -> bool:
    """Whether indexers learn what attention looks at while it is still dense: they alone change."""
    return (
        config.use_indexer
        and config.indexer_loss_scaling_factor > 0
        and not config.indexer_sparse_training
    )


def objective(config: MaxTextConfig, means: Metrics) -> jax.Array:
    """What is minimised."""
    learned = {"indexer_loss": means["indexer_loss"]} if warms_up(config) else means
    return sum(learned.values(), jnp.float32(0))


def trainable_weights(config: MaxTextConfig, template: Template) -> Any:
    """Bools in the weights' tree: what an update may change. While indexers warm up, they alone."""
    trainable = trainable_parameters(config, template.axes, template.trained, warn=False)
    if not warms_up(config):
        return trainable

    def in_indexer(path: tuple, trains: bool) -> bool:
        return trains and any(getattr(step, "key", None) == "indexer" for step in path)

    return jax.tree.map_with_path(in_indexer, trainable)


def select_trainable(tree: Any, trainable: Any) -> Any:
    """Gradients or updates with zeros for frozen weights, so that these count in no norm and do not
    decay.
    """
    return jax.tree.map(
        lambda leaf, trains: leaf if trains else jnp.zeros_like(leaf), tree, trainable
    )


def is_nonfinite(config: MaxTextConfig, value: jax.Array) -> jax.Array:
    """Whether a loss or a norm is of a kind that ends the run."""
    return (jnp.isnan(value) & config.abort_on_nan_loss) | (
        jnp.isinf(value) & config.abort_on_inf_loss
    )


def max_nonfinite_steps(config: MaxTextConfig) -> int:
    """After so many non-finite steps in a row a run ends: at the first, unless skip_step_on_spikes
    skips it.
    """
    return MAX_NONFINITE_STEPS if config.skip_step_on_spikes else 1


def hold_if_failed(
    config: MaxTextConfig, after: TrainState, before: TrainState, nonfinite: jax.Array
) -> TrainState:
    """The state before the step that ends the run, for it and those dispatched after it, until the
    loop reads its loss; else the state after the step."""
    limit = max_nonfinite_steps(config)
    failed = before.nonfinite_steps >= limit
    count = jnp.where(nonfinite | failed, jnp.minimum(before.nonfinite_steps + 1, limit), 0)
    return replace(choose(count >= limit, before, after), nonfinite_steps=count)


def choose(first: jax.Array, one: Any, other: Any) -> Any:
    """The tree `one` where `first` is true, else `other`."""
    return jax.tree.map(lambda one, other: jax.lax.select(first, one, other), one, other)


def updates_done(state: TrainState) -> jax.Array:
    """The optimizer's own count, by which it reads its schedule: a skipped step does not advance
    it.
    """
    counts = optax.tree_utils.tree_get_all_with_path(state.optimizer, "count")
    return counts[0][1] if counts else state.step


def accumulate(
    gradient: Callable,
    weights: Any,
    batch: Batch,
    key: jax.Array | None,
    pieces: int,
    accum_dtype: Any = jnp.float32,
) -> tuple[Any, Any]:
    """Gradients and what comes with them summed over `pieces` equal cuts of the batch, one after
    the other.

    Gradients are summed in `accum_dtype`, or in their own dtype if that is wider: a sum in bfloat16
    stops growing when a microbatch adds less than 1/256 of it.
    """
    if pieces == 1:
        return gradient(weights, batch, key)

    def microbatch_gradient(weights: Any, batch: Batch, key: jax.Array | None) -> tuple[Any, Any]:
        gradients, rest = gradient(weights, batch, key)
        return jax.tree.map(
            lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, accum_dtype)), gradients
        ), rest

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
        return jax.tree.map_with_path(
            merge, sums, microbatch_gradient(weights, rows, piece_key)
        ), None

    cuts = jax.tree.map(cut, batch)
    shapes = jax.eval_shape(
        microbatch_gradient, weights, jax.tree.map(lambda field: field[0], cuts), key
    )
    sums, _ = jax.lax.scan(add, zeros_like(shapes), (jnp.arange(pieces), cuts))
    return sums


def make_eval_step(config: MaxTextConfig, template: Template) -> Callable[[Any, Batch], Metrics]:
    """Sums over a batch, of the losses and of what they are divided by."""
    return lambda weights, batch: evaluation_sums(config, template, weights, batch)
