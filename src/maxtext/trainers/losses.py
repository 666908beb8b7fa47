"""Losses as pure functions of weights and batch, each as (sum, weight) so that batches of unequal size add up right."""

from typing import Any

import jax
import jax.numpy as jnp

from maxtext.kernels.loss import tiled_cross_entropy
from maxtext.layers.inputs import LayerInputs
from maxtext.layers.parameters import Template

Batch = dict[str, jax.Array]


def token_weights(batch: Batch) -> jax.Array:
    """1 where a token is learned from, 0 at padding."""
    return (batch["targets_segmentation"] != 0).astype(jnp.float32)


def separates(config: Any) -> bool:
    """Whether attention has to keep documents apart. Rows of one document need no mask for it, which is faster: causal
    attention does not look at the padding after it, and what padding itself computes is not learned from."""
    packed = config.packing and config.dataset_type.value != "synthetic"
    return packed or config.attention_type == "full"


def language_model_sums(
    config: Any, template: Template, weights: Any, batch: Batch, key: jax.Array | None
) -> dict[str, jax.Array]:
    """Sums over the batch's tokens: lm_loss and z_loss."""
    model = template.bind(weights)
    inputs = LayerInputs(batch["inputs_position"], batch["inputs_segmentation"] if separates(config) else None, key)
    hidden = model.hidden(batch["inputs"], inputs)
    losses, partition = tiled_cross_entropy(model.logits, hidden, batch["targets"], config.num_vocab_tiling)
    mask = token_weights(batch)
    sums = {"lm_loss": jnp.sum(losses * mask)}
    if config.z_loss_multiplier:
        sums["z_loss"] = config.z_loss_multiplier * jnp.sum(jnp.square(partition) * mask)
    return sums
