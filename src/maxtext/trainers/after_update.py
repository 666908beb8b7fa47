"""Changes to weights besides the optimizer's update, from the auxiliary outputs of the layers.

The auxiliary outputs form a tree like that of the weights: [layers, ...] for a stacked block.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from maxtext.configs.types import MaxTextConfig
from maxtext.layers.aux_names import EXPERT_LOAD, MAX_LOGITS
from maxtext.layers.routers import updated_bias
from maxtext.optimizers.qk_clip import clip_mla

Tree = dict
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
