"""Losses as pure functions of weights and batch.

What is averaged over tokens comes as a sum with its weight, so that batches of unequal size add up
right; what layers report about themselves (balance of experts, the indexer's loss) keeps its own
full weight.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from maxtext.common.order import Order
from maxtext.configs.types import MaxTextConfig
from maxtext.layers.inputs import LayerInputs
from maxtext.layers.multi_token import accepted, mtp_targets
from maxtext.layers.parameters import Template
from maxtext.layers.stack import STREAM
from maxtext.sharding.explicit import by_compiler
from maxtext.sharding.state import to_device

Batch = dict[str, jax.Array]
AUXILIARY = ("load_balance_loss", "indexer_loss")  # reports that are losses
MTP_KEY = 0x6D7470  # folded into the key of dropout, far from the numbers of layers


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Losses:
    sums: dict[str, jax.Array]  # over tokens: lm_loss, z_loss, mtp_loss
    auxiliary: dict[str, jax.Array]  # summed over layers
    reports: dict  # of the layers, by their paths in the weights


def token_weights(batch: Batch) -> jax.Array:
    """1 where a token is learned from, 0 at padding."""
    return (batch["targets_segmentation"] != 0).astype(jnp.float32)


def token_counts(config: MaxTextConfig, batch: Batch) -> dict[str, jax.Array]:
    """What each sum over tokens is divided by."""
    tokens = jnp.maximum(jnp.sum(token_weights(batch)), 1.0)
    counts = {"lm_loss": tokens, "z_loss": tokens}
    if config.mtp_num_layers:
        ahead = [mtp_mask(batch, step) for step in range(1, config.mtp_num_layers + 1)]
        counts["mtp_loss"] = jnp.maximum(sum(jnp.sum(mask) for mask in ahead), 1.0)
    return counts


def mtp_mask(batch: Batch, step: int) -> jax.Array:
    return mtp_targets(batch["targets"], batch["targets_segmentation"], step)[1].astype(jnp.float32)


def separates(config: MaxTextConfig) -> bool:
    """Whether attention has to keep documents apart. Rows of one document need no mask for it,
    which is faster: causal attention does not look at the padding after it, and what padding itself
    computes is not learned from. Experts would make room for padding, so they are told of it."""
    packed = config.packing and config.dataset_type.value != "synthetic"
    crowded = config.num_experts > 1 and config.dataset_type.value != "synthetic"
    return packed or crowded or config.attention_type == "full"


def layer_inputs(config: MaxTextConfig, batch: Batch, key: jax.Array | None) -> LayerInputs:
    segments = batch["inputs_segmentation"] if separates(config) else None
    return LayerInputs(batch["inputs_position"], segments, key, order=token_order(config))


def token_order(config: MaxTextConfig) -> Order | None:
    """In which order a row's tokens come, where they are split over devices and are to make equal
    work for them.
    """
    shards, strategy = config.context_parallel_size, config.context_parallel_reorder_strategy.value
    if shards == 1 or not config.context_parallel_load_balance:
        return None
    return Order("dual_chunk_swap" if strategy == "auto" else strategy, shards)


def bound(config: MaxTextConfig, template: Template, weights: Any) -> Any:
    """The model with its weights. Those that live in host memory come to the device here, except
    for the layers', which come one layer at a time (see stack.py)."""
    if config.parameter_memory_host_offload:
        weights = {
            name: tree if name == "layers" else to_device(tree) for name, tree in weights.items()
        }
    return template.bind(weights)


def language_model_losses(
    config: MaxTextConfig, template: Template, weights: Any, batch: Batch, key: jax.Array | None
) -> Losses:
    model = bound(config, template, weights)
    # With the padding after them. See compiled.py, which sees to it that rows have no more.
    most = 0 if config.max_segments_per_seq < 0 else config.max_segments_per_seq + 1
    inputs = replace(layer_inputs(config, batch, key), max_segments=most)
    x, reports = model.run(batch["inputs"], inputs)
    around = {
        name: tree for name, tree in weights.items() if name != "layers"
    }  # what the head needs, and more
    _, sums = by_compiler(
        lambda around, x, batch: (x, head_sums(config, bound(config, template, weights | around), x, batch)),
        around, x, batch, axes=STREAM[3],
    )  # fmt: skip
    if config.mtp_num_layers:
        outputs, report = model.mtp(x, model.embed, inputs.fold(MTP_KEY), batch["inputs"])
        sums["mtp_loss"] = config.mtp_loss_scaling_factor * mtp_sum(config, model, outputs, batch)
        each = {
            number: {"block": jax.tree.map(lambda value, at=number: value[at], report)}
            for number in range(len(outputs))
        }
        reports = reports | {"mtp": {"layers": each}}
    return Losses(sums, auxiliary(reports), reports)


def head_sums(
    config: MaxTextConfig, model: Any, x: jax.Array, batch: Batch
) -> dict[str, jax.Array]:
    """Sums over tokens of what the output of the last layer loses."""
    losses, partition = model.losses(model.final_norm(x), batch["targets"], config.num_vocab_tiling)
    mask = token_weights(batch)
    sums = {"lm_loss": jnp.sum(losses * mask)}
    if config.z_loss_multiplier:
        sums["z_loss"] = config.z_loss_multiplier * jnp.sum(jnp.square(partition) * mask)
    return sums


def mtp_sum(config: MaxTextConfig, model: Any, outputs: list[jax.Array], batch: Batch) -> jax.Array:
    total = jnp.float32(0)
    for step, hidden in enumerate(outputs, start=1):
        targets, mask = mtp_targets(batch["targets"], batch["targets_segmentation"], step)
        losses, _ = model.losses(hidden, targets, config.num_vocab_tiling)
        total += jnp.sum(losses * mask)
    return total


def auxiliary(reports: dict) -> dict[str, jax.Array]:
    """The losses among the reports, each summed over the layers."""
    totals: dict[str, jax.Array] = {}
    for path, value in jax.tree.leaves_with_path(reports):
        name = path[-1].key
        if name in AUXILIARY:
            totals[name] = totals.get(name, jnp.float32(0)) + jnp.sum(value)
    return totals


def evaluation_sums(
    config: MaxTextConfig, template: Template, weights: Any, batch: Batch
) -> dict[str, jax.Array]:
    """Sums over a batch: the loss and its tokens; with mtp_eval_target_module also how many of that
    layer's drafts the model itself would have said, and of how many."""
    model = bound(config, template, weights)
    inputs = layer_inputs(config, batch, None)
    x, _ = model.run(batch["inputs"], inputs)
    hidden = model.final_norm(x)
    losses, _ = model.losses(hidden, batch["targets"], config.num_vocab_tiling)
    mask = token_weights(batch)
    sums = {"loss": jnp.sum(losses * mask), "weights": jnp.sum(mask)}
    ahead = config.mtp_eval_target_module
    if ahead:
        outputs, _ = model.mtp(x, model.embed, inputs, batch["inputs"])
        said, drafted = (jnp.argmax(model.logits(y), axis=-1) for y in (hidden, outputs[ahead - 1]))
        taken, drafts = accepted(said, drafted, mtp_mask(batch, ahead), ahead)
        sums |= {"accepted": taken, "drafts": drafts}
    return sums
