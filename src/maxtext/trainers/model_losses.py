"""Losses of a model over a batch: pure functions of weights and batch.

A loss over tokens is returned as a sum, to be divided by its token count, so that microbatches of
unequal token counts add up. Auxiliary losses of layers (load balance, indexer) are not divided by
tokens.

`map_tiles` and `sum_tiles` compute functions of logits for a part of the tokens of each row at a
time, since the logits of a batch, [B, S, V], may not fit in memory. Arrays [B, S, ...] are split
along the sequence into tiles [B, S / tiles, ...]. With more than one tile the backward pass
recomputes each.

Shapes: B batch, S sequence, E embed_dim, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from maxtext.common.types import Tree
from maxtext.configs.types import MaxTextConfig
from maxtext.kernels.attention_options import LoadBalancedOrder
from maxtext.layers.inputs import LOSSES, LayerInputs
from maxtext.layers.multi_token import count_accepted, mtp_targets
from maxtext.layers.parameters import Template
from maxtext.sharding.explicit import auto_sharded
from maxtext.sharding.state import to_device


def map_tiles(function: Callable[..., Tree], tiles: int, *arrays: jax.Array) -> Tree:
    """function(*arrays), whose results are [B, S, ...]."""
    if tiles == 1:
        return function(*arrays)
    leading = arrays[0].shape[:2]
    return jax.tree.map(
        lambda result: result.swapaxes(0, 1).reshape(*leading, *result.shape[3:]),
        run_tiles(function, tiles, arrays),
    )


def sum_tiles(function: Callable[..., Tree], tiles: int, *arrays: jax.Array) -> Tree:
    """function(*arrays), whose results are scalars, sums over all tokens."""
    if tiles == 1:
        return function(*arrays)
    return jax.tree.map(jnp.sum, run_tiles(function, tiles, arrays))


def run_tiles(function: Callable[..., Tree], tiles: int, arrays: tuple[jax.Array, ...]) -> Tree:
    """The results of all tiles, stacked."""
    parts = tuple(split_sequence(array, tiles) for array in arrays)
    return jax.lax.map(jax.checkpoint(lambda part: function(*part)), parts)


def split_sequence(x: jax.Array, tiles: int) -> jax.Array:
    """[B, S, ...] to [tiles, B, S / tiles, ...]."""
    batch, length, *rest = x.shape
    return x.reshape(batch, tiles, length // tiles, *rest).swapaxes(0, 1)


Batch = dict[str, jax.Array]
MTP_KEY = 0x6D7470  # folded into the dropout key; layers fold in small indices


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Losses:
    sums: dict[str, jax.Array]  # over tokens: lm_loss, z_loss, mtp_loss
    aux_losses: dict[str, jax.Array]  # summed over layers
    layer_aux: dict  # auxiliary outputs of the layers, by their paths in the weights
    metrics: dict[str, jax.Array] = field(default_factory=dict)  # other sums, not minimized


def target_mask(batch: Batch) -> jax.Array:
    """[B, S]: 1 for a target token, 0 for padding."""
    return (batch["targets_segmentation"] != 0).astype(jnp.float32)


def token_counts(config: MaxTextConfig, batch: Batch) -> dict[str, jax.Array]:
    """The divisor of each sum over tokens."""
    tokens = jnp.maximum(jnp.sum(target_mask(batch)), 1.0)
    counts = {"lm_loss": tokens, "z_loss": tokens}
    if config.mtp_num_layers:
        masks = [mtp_mask(batch, step) for step in range(1, config.mtp_num_layers + 1)]
        counts["mtp_loss"] = jnp.maximum(sum(jnp.sum(mask) for mask in masks), 1.0)
    return counts


def mtp_fields(batch: Batch, step: int) -> tuple[jax.Array, jax.Array]:
    """The targets of MTP layer `step`, and the mask of its loss, bool."""
    segments = (batch["targets_segmentation"], batch["inputs_segmentation"])
    return mtp_targets(batch["targets"], *segments, step)


def mtp_mask(batch: Batch, step: int) -> jax.Array:
    return mtp_fields(batch, step)[1].astype(jnp.float32)


def needs_segment_mask(config: MaxTextConfig) -> bool:
    """Whether attention must mask other segments of a row. A row of one document is faster without
    a mask: causal attention does not see the padding after it, and the outputs at padding have no
    loss. Expert layers need the segments to leave padding out of their capacity."""
    if config.attention_type == "full":
        return True
    is_packed = config.packing or config.num_experts > 1
    return is_packed and config.dataset_type.value != "synthetic"


def layer_inputs(config: MaxTextConfig, batch: Batch, key: jax.Array | None) -> LayerInputs:
    segments = batch["inputs_segmentation"] if needs_segment_mask(config) else None
    return LayerInputs(batch["inputs_position"], segments, key, order=token_order(config))


def token_order(config: MaxTextConfig) -> LoadBalancedOrder | None:
    """The order of a row's tokens that balances causal attention over the context-parallel shards;
    None: unchanged."""
    shards, strategy = config.context_parallel_size, config.context_parallel_reorder_strategy.value
    if shards == 1 or not config.context_parallel_load_balance:
        return None
    return LoadBalancedOrder("dual_chunk_swap" if strategy == "auto" else strategy, shards)


def bind_model(config: MaxTextConfig, template: Template, weights: Tree) -> Any:
    """The model with its weights. Weights in host memory are moved to the device here, except those
    of the layers, which are moved one layer at a time (see stack.py)."""
    if config.parameter_memory_host_offload:
        weights = {
            name: tree if name == "layers" else to_device(tree) for name, tree in weights.items()
        }
    return template.bind(weights)


def training_inputs(config: MaxTextConfig, batch: Batch, key: jax.Array | None) -> LayerInputs:
    # The padding is one more segment. A step program (compilation/aot.py) runs only batches whose
    # rows have no more.
    bound = config.max_segments_per_seq
    return replace(layer_inputs(config, batch, key), max_segments=0 if bound < 0 else bound + 1)


def run_head(
    head: Callable[..., Tree],
    models: Sequence[tuple[MaxTextConfig, Template, Tree]],
    *arrays: Tree,
    out_axes: tuple[str | None, ...] = (),
) -> Tree:
    """head(*models, *arrays), inside which the compiler chooses shardings. `models`: the
    configuration, template and weights of each."""

    def run(outer_weights: Sequence[Tree], *arrays: Tree) -> Tree:
        bound = [
            bind_model(config, template, weights | outer)
            for (config, template, weights), outer in zip(models, outer_weights, strict=True)
        ]
        return head(*bound, *arrays)

    # The weights of the heads are arguments: auto_sharded changes the sharding types of arguments.
    outer_weights = [
        {name: tree for name, tree in weights.items() if name != "layers"}
        for _, _, weights in models
    ]
    return auto_sharded(run, outer_weights, *arrays, out_axes=out_axes)


def language_model_losses(
    config: MaxTextConfig, template: Template, weights: Tree, batch: Batch, key: jax.Array | None
) -> Losses:
    model = bind_model(config, template, weights)
    inputs = training_inputs(config, batch, key)
    x, layer_aux = model.run(batch["inputs"], inputs)
    head = partial(head_loss_sums, config)
    sums = run_head(head, [(config, template, weights)], x, batch)
    if config.mtp_num_layers:
        outputs, mtp_aux = model.mtp(
            model.mtp_input(x), model.embed, inputs.fold(MTP_KEY), batch["inputs"]
        )
        sums["mtp_loss"] = config.mtp_loss_scaling_factor * mtp_loss_sum(
            config, model, outputs, batch
        )
        aux_by_layer = {
            index: {"block": jax.tree.map(lambda value, at=index: value[at], mtp_aux)}
            for index in range(len(outputs))
        }
        layer_aux = layer_aux | {"mtp": {"layers": aux_by_layer}}
    return Losses(sums=sums, aux_losses=sum_aux_losses(layer_aux), layer_aux=layer_aux)


def head_loss_sums(
    config: MaxTextConfig, model: Any, x: jax.Array, batch: Batch
) -> dict[str, jax.Array]:
    """Losses of the output of the last layer [B, S, E], summed over tokens."""
    losses, log_z = model.losses(model.final_norm(x), batch["targets"], config.num_vocab_tiling)
    mask = target_mask(batch)
    sums = {"lm_loss": jnp.sum(losses * mask)}
    if config.z_loss_multiplier:
        sums["z_loss"] = config.z_loss_multiplier * jnp.sum(jnp.square(log_z) * mask)
    return sums


def z_loss_sums(config: MaxTextConfig, logits: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
    """z_loss of logits [B, S, V], summed over tokens; empty if it is off."""
    if not config.z_loss_multiplier:
        return {}
    log_z = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)
    return {"z_loss": config.z_loss_multiplier * jnp.sum(jnp.square(log_z) * mask)}


def mtp_loss_sum(
    config: MaxTextConfig, model: Any, outputs: list[jax.Array], batch: Batch
) -> jax.Array:
    total = jnp.float32(0)
    for step, hidden in enumerate(outputs, start=1):
        targets, mask = mtp_fields(batch, step)
        losses, _ = model.losses(hidden, targets, config.num_vocab_tiling)
        total += jnp.sum(losses * mask)
    return total


def sum_aux_losses(layer_aux: dict) -> dict[str, jax.Array]:
    """The losses among the auxiliary outputs, each summed over the layers."""
    totals: dict[str, jax.Array] = {}
    for path, value in jax.tree.leaves_with_path(layer_aux):
        name = path[-1].key
        if name in LOSSES:
            totals[name] = totals.get(name, jnp.float32(0)) + jnp.sum(value)
    return totals


def eval_loss_sums(
    config: MaxTextConfig,
    template: Template,
    weights: Tree,
    batch: Batch,
    counts_correct: bool = False,
) -> dict[str, jax.Array]:
    """Sums over a batch: the loss and its tokens; with `counts_correct` also the tokens that are
    predicted right; with mtp_eval_target_module also the draft tokens of that MTP layer, and how
    many of them the model accepts."""
    model = bind_model(config, template, weights)
    inputs = layer_inputs(config, batch, None)
    x, _ = model.run(batch["inputs"], inputs)
    hidden = model.final_norm(x)
    losses, _ = model.losses(hidden, batch["targets"], config.num_vocab_tiling)
    mask = target_mask(batch)
    sums = {"loss": jnp.sum(losses * mask), "count": jnp.sum(mask)}
    if counts_correct:
        sums["correct"] = count_correct(config, model, hidden, batch["targets"], mask)
    step = config.mtp_eval_target_module
    if step:
        outputs, _ = model.mtp(model.mtp_input(x), model.embed, inputs, batch["inputs"])
        predicted = jnp.argmax(model.logits(hidden), axis=-1)
        drafted = jnp.argmax(model.logits(outputs[step - 1]), axis=-1)
        num_accepted, num_drafts = count_accepted(predicted, drafted, mtp_mask(batch, step), step)
        sums |= {"accepted": num_accepted, "drafts": num_drafts}
    return sums


def count_correct(
    config: MaxTextConfig, model: Any, hidden: jax.Array, targets: jax.Array, mask: jax.Array
) -> jax.Array:
    """The number of tokens in the mask [B, S] whose most likely token is the target. Logits exist
    for about S / num_vocab_tiling tokens of each row at a time."""

    def count(hidden: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
        return jnp.sum((jnp.argmax(model.logits(hidden), axis=-1) == targets) * mask)

    tiles = math.gcd(targets.shape[1], config.num_vocab_tiling)
    return sum_tiles(count, tiles, hidden, targets, mask)
