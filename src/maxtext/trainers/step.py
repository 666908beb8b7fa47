"""The train step and the eval step: pure functions, each under one jit.

`make_train_step` returns `train_step(state, batch, key) -> (state, metrics)`. A batch may be split
into microbatches whose gradients are accumulated. The loss is the sum over all target tokens
divided by their number, so the split does not change the update.

`after_update` changes weights besides the optimizer's update, by the auxiliary outputs of the
layers. These form a tree like that of the weights: [layers, ...] for a stacked block.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from maxtext.common.trees import merge_dicts
from maxtext.common.types import Tree
from maxtext.configs.types import MaxTextConfig
from maxtext.layers.inputs import EXPERT_LOAD, INDEXER_LOSS, MAX_LOGITS, MAXIMA
from maxtext.layers.lora import copy_sources, sum_copies, update_copies
from maxtext.layers.routers import updated_bias
from maxtext.optimizers import clip_by_global_norm, clip_mla, global_norm
from maxtext.sharding.explicit import auto_sharded, auto_sharded_like_first, zeros_like
from maxtext.sharding.state import to_device
from maxtext.trainers.model_losses import Batch
from maxtext.trainers.objective import Objective
from maxtext.trainers.trainable import (
    has_adapters,
    in_indexers,
    optimized_mask,
    select,
    trains_only_indexers,
)

# (weights of a block, its auxiliary output, the stacked axis or None) -> weights
BlockUpdate = Callable[[Tree, jax.Array, int | None], Tree]


def after_update(config: MaxTextConfig, weights: Tree, layer_aux: Tree) -> Tree:
    """Weights after the loss-free balancing of experts (routed_bias_update_rate) and QK-clip
    (use_qk_clip)."""
    rate = config.routed_bias_update_rate
    if rate > 0:
        update_bias = partial(update_router_bias, rate=rate)
        weights = update_blocks(config, weights, layer_aux, EXPERT_LOAD, update_bias)
    if config.use_qk_clip:
        clip = partial(
            clip_attention, threshold=config.qk_clip_threshold, nope_dim=config.qk_nope_head_dim
        )
        weights = update_blocks(config, weights, layer_aux, MAX_LOGITS, clip)
    return weights


def update_blocks(
    config: MaxTextConfig, weights: Tree, layer_aux: Tree, name: str, update: BlockUpdate
) -> Tree:
    """The weights with every block updated that has an auxiliary output of this name."""
    if name in layer_aux:
        value = layer_aux[name]
        if all(isinstance(key, int) for key in weights):  # unrolled layers, stacked outputs
            return {repeat: update(block, value[repeat], None) for repeat, block in weights.items()}
        is_stacked = value.ndim > 1
        return update(weights, value, config.param_scan_axis if is_stacked else None)
    updated = {
        key: update_blocks(config, weights[key], subtree, name, update)
        for key, subtree in layer_aux.items()
        if isinstance(subtree, dict)
    }
    return weights | updated


def update_router_bias(block: Tree, load: jax.Array, axis: int | None, rate: float) -> Tree:
    router = block["mlp"]["router"]
    bias = router["bias"]
    if axis is None:
        new = updated_bias(bias, load, rate)
    else:
        axis = min(axis, bias.ndim - 1)
        new = jnp.moveaxis(updated_bias(jnp.moveaxis(bias, axis, 0), load, rate), 0, axis)
    return block | {"mlp": block["mlp"] | {"router": router | {"bias": new}}}


def clip_attention(
    block: Tree, max_logits: jax.Array, axis: int | None, threshold: float, nope_dim: int
) -> Tree:
    attention = clip_mla(block["attention"], max_logits, threshold, nope_dim, axis)
    return block | {"attention": attention}


Metrics = dict[str, jax.Array]
# With skip_step_on_spikes: consecutive non-finite steps that are skipped before
# abort_on_{nan,inf}_loss ends the run
MAX_NONFINITE_STEPS = 10
STOP_FLAG = "stop_flag"  # [devices] in a batch of several processes, a scalar in the metrics


class StopFlag(IntEnum):
    """Flags that processes exchange with each batch (see data_loader.py). The maximum counts."""

    CONTINUE = 0
    STOP = 1
    DATA_ENDED = 2


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """`nonfinite_steps`: int32, consecutive steps up to this one with a non-finite loss or gradient
    norm of a kind that ends the run. At `max_nonfinite_steps` the state stops changing (see
    `skip_update_if_nonfinite`). `reference`: the frozen weights of another model, which the
    objective compares with (DPO, distillation), or None; they are not saved."""

    step: jax.Array
    weights: Tree
    opt_state: Tree
    nonfinite_steps: jax.Array
    reference: Tree = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossReport:
    """The losses and metrics of a batch."""

    means: Metrics  # the losses that are minimized, each divided by its count
    metrics: Metrics  # other means
    layer_aux: dict

    def total(self, config: MaxTextConfig) -> jax.Array:
        """The sum of the losses that are minimized."""
        means = self.means
        if trains_only_indexers(config):
            means = {INDEXER_LOSS: means[INDEXER_LOSS]}
        return sum(means.values(), jnp.float32(0))


def make_train_step(
    objective: Objective,
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: Callable[[jax.Array], jax.Array],
    constrain_gradients: Callable[[Tree], Tree] = lambda gradients: gradients,
) -> Callable[[TrainState, Batch, jax.Array], tuple[TrainState, Metrics]]:
    """(state, batch, key) -> (state, metrics). `constrain_gradients` gives gradients the sharding
    in which the optimizer updates them."""
    config = objective.config
    trained = optimized_mask(config, objective.template)
    sources = select(copy_sources(objective.template), trained)

    def train_step(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, Metrics]:
        stop_flag = jnp.max(batch[STOP_FLAG]) if STOP_FLAG in batch else None
        batch = {name: field for name, field in batch.items() if name != STOP_FLAG}
        gradients, report = compute_gradients(objective, trained, state, batch, key)
        gradients = sum_copies(gradients, sources)
        if config.parameter_memory_host_offload:
            gradients = to_device(gradients)
            state = replace(state, weights=to_device(state.weights))
        if config.optimizer_memory_host_offload:
            state = replace(state, opt_state=to_device(state.opt_state))
        gradients = constrain_gradients(zero_unless_trained(config, gradients))
        gradients = jax.tree.map(
            lambda gradient: gradient.astype(config.grad_dtype.value), gradients
        )
        value = report.total(config)
        clipped, raw_norm, norm = clip_by_global_norm(gradients, config.gradient_clipping_threshold)
        trained_weights = select(state.weights, trained)
        updates, opt_state = optimizer.update(
            clipped, state.opt_state, trained_weights, loss=value, raw_grad_norm=raw_norm
        )
        # Weight decay would change weights without a gradient.
        trained_weights = optax.apply_updates(trained_weights, zero_unless_trained(config, updates))
        trained_weights = update_copies(trained_weights, sources)
        weights = merge_dicts(trained_weights, select(state.weights, trained, keep=False))
        if not (trains_only_indexers(config) or has_adapters(config)):
            weights = auto_sharded_like_first(
                lambda weights, aux: after_update(config, weights, aux), weights, report.layer_aux
            )
        weights = auto_sharded_like_first(objective.constrain_weights, weights)
        skipped = getattr(opt_state, "skipped", None)
        if skipped is not None:
            weights = select_tree(skipped, state.weights, weights)
        new = replace(state, step=state.step + 1, weights=weights, opt_state=opt_state)
        if config.abort_on_nan_loss or config.abort_on_inf_loss:
            nonfinite = is_nonfinite(config, value) | is_nonfinite(config, raw_norm)
            new = skip_update_if_nonfinite(config, new, state, nonfinite)
        if stop_flag is not None:
            new = select_tree(stop_flag == int(StopFlag.DATA_ENDED), state, new)
        metrics = report.metrics | report.means
        metrics |= {
            "loss": value,
            "learning_rate": schedule(updates_done(state)),
            "grad_norm": norm,
            "raw_grad_norm": raw_norm,
            "param_norm": global_norm(select(new.weights, trained)),
            "total_weights": objective.num_tokens(batch),
        }
        if objective.has_prompts:
            read = objective.model_rows(batch)["inputs_segmentation"] != 0
            metrics["computed_tokens"] = jnp.sum(read).astype(jnp.float32)
        if stop_flag is not None:
            metrics[STOP_FLAG] = stop_flag.astype(jnp.float32)
        if skipped is not None:
            metrics["skipped"] = skipped.astype(jnp.float32)
        return new, metrics

    return train_step


def compute_gradients(
    objective: Objective, trained: Tree, state: TrainState, batch: Batch, key: jax.Array
) -> tuple[Tree, LossReport]:
    """The gradients of the trained weights over all microbatches of the batch."""
    config = objective.config
    microbatches = config.gradient_accumulation_steps
    counts = objective.counts(batch)
    frozen_weights = select(state.weights, trained, keep=False)

    def loss(
        trained_weights: Tree, microbatch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, LossReport]:
        frozen = frozen_weights
        if microbatches > 1:
            frozen, microbatch = bind_to_microbatch(frozen, microbatch)
        weights = merge_dicts(trained_weights, frozen)
        losses = objective.losses(weights, state.reference, microbatch, key, state.step)
        means = {name: value / counts[name] for name, value in losses.sums.items()}
        means |= {name: value / microbatches for name, value in losses.aux_losses.items()}
        metrics = {name: value / counts[name] for name, value in losses.metrics.items()}
        report = LossReport(means, metrics, losses.layer_aux)
        return report.total(config), report

    return accumulate(
        jax.grad(loss, has_aux=True),
        select(state.weights, trained),
        batch,
        key=jax.random.fold_in(key, state.step) if uses_dropout(config) else None,
        microbatches=microbatches,
        accum_dtype=config.grad_dtype.value,
    )


def bind_to_microbatch(frozen_weights: Tree, microbatch: Batch) -> tuple[Tree, Batch]:
    """Both unchanged. A compiler would move what is computed of frozen weights alone, such as
    dequantized weights or other layouts, out of the loop over microbatches, and keep all of it."""
    return jax.lax.optimization_barrier((frozen_weights, microbatch))


def uses_dropout(config: MaxTextConfig) -> bool:
    return (config.enable_dropout and config.dropout_rate > 0) or config.lora_dropout > 0


def zero_unless_trained(config: MaxTextConfig, tree: Tree) -> Tree:
    """Gradients or updates. During indexer warm-up those of other weights are 0, which then neither
    count in norms nor decay."""
    if not trains_only_indexers(config):
        return tree
    return jax.tree.map(
        lambda leaf, is_trained: leaf if is_trained else jnp.zeros_like(leaf),
        tree,
        in_indexers(tree),
    )


def is_nonfinite(config: MaxTextConfig, value: jax.Array) -> jax.Array:
    """Whether a loss or norm is non-finite in a way that ends the run."""
    return (jnp.isnan(value) & config.abort_on_nan_loss) | (
        jnp.isinf(value) & config.abort_on_inf_loss
    )


def max_nonfinite_steps(config: MaxTextConfig) -> int:
    """Consecutive non-finite steps that end a run: one, or more if skip_step_on_spikes skips
    them."""
    return MAX_NONFINITE_STEPS if config.skip_step_on_spikes else 1


def skip_update_if_nonfinite(
    config: MaxTextConfig, after: TrainState, before: TrainState, nonfinite: jax.Array
) -> TrainState:
    """The state before the step if this step ends the run, or if an earlier one did whose loss the
    loop has not read yet; else the state after the step."""
    limit = max_nonfinite_steps(config)
    failed = before.nonfinite_steps >= limit
    count = jnp.where(nonfinite | failed, jnp.minimum(before.nonfinite_steps + 1, limit), 0)
    return replace(select_tree(count >= limit, before, after), nonfinite_steps=count)


def select_tree(condition: jax.Array, on_true: Tree, on_false: Tree) -> Tree:
    return jax.tree.map(
        lambda true, false: jax.lax.select(condition, true, false), on_true, on_false
    )


def updates_done(state: TrainState) -> jax.Array:
    """The optimizer's own count, which indexes its schedule: a skipped step does not advance it."""
    counts = optax.tree_utils.tree_get_all_with_path(state.opt_state, "count")
    return counts[0][1] if counts else state.step


def accumulate(
    gradient: Callable,
    weights: Tree,
    batch: Batch,
    key: jax.Array | None,
    microbatches: int,
    accum_dtype: DTypeLike = jnp.float32,
) -> tuple[Tree, Tree]:
    """gradient(weights, microbatch, key), summed over `microbatches` equal parts of the batch.

    Gradients are summed in `accum_dtype`, or in their own dtype if that is wider: a sum in bfloat16
    stops growing when a microbatch adds less than 1/256 of it.
    """
    if microbatches == 1:
        return gradient(weights, batch, key)
    parts = jax.tree.map(partial(split_rows, microbatches=microbatches), batch)
    gradient = with_accum_dtype(gradient, accum_dtype)

    def add(total: Tree, indexed: tuple[jax.Array, Batch]) -> tuple[Tree, None]:
        index, microbatch = indexed
        microbatch_key = None if key is None else jax.random.fold_in(key, index)
        values = gradient(weights, microbatch, microbatch_key)
        return jax.tree.map_with_path(accumulate_leaf, total, values), None

    shapes = jax.eval_shape(gradient, weights, jax.tree.map(lambda field: field[0], parts), key)
    total, _ = jax.lax.scan(add, zeros_like(shapes), (jnp.arange(microbatches), parts))
    return total


def with_accum_dtype(gradient: Callable, accum_dtype: DTypeLike) -> Callable:
    """`gradient`, with gradients in `accum_dtype`, or in their own dtype if that is wider."""

    def run(*args: Tree) -> tuple[Tree, Tree]:
        gradients, aux = gradient(*args)
        gradients = jax.tree.map(
            lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, accum_dtype)), gradients
        )
        return gradients, aux

    return run


def split_rows(field: jax.Array, microbatches: int) -> jax.Array:
    """[B, ...] to [microbatches, B / microbatches, ...]: row b goes to microbatch
    b % microbatches, so that every microbatch has rows of every device."""

    def interleave(field: jax.Array) -> jax.Array:
        parts = field.reshape(field.shape[0] // microbatches, microbatches, *field.shape[1:])
        return parts.swapaxes(0, 1)

    axes = (None, "activation_embed_and_logits_batch", "activation_norm_length", None)
    return auto_sharded(interleave, field, out_axes=axes[: field.ndim + 1])


def accumulate_leaf(path: tuple, total: jax.Array, value: jax.Array) -> jax.Array:
    is_maximum = getattr(path[-1], "key", None) in MAXIMA
    return jnp.maximum(total, value) if is_maximum else total + value


def make_eval_step(objective: Objective) -> Callable[[Tree, Tree, Batch], Metrics]:
    """(weights, reference, batch) -> sums over the batch, of the losses and of their divisors."""
    return objective.eval_sums
