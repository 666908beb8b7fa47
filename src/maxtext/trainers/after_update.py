"""What a step changes beside the optimizer's updates, from what the layers reported of it.

Reports lie in a tree like the weights': the report of a stacked block is [layers, ...], that of a
single one is not.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from maxtext.configs.types import MaxTextConfig
from maxtext.layers.routers import updated_bias
from maxtext.optimizers.qk_clip import clip_mla

Tree = dict


def after_update(config: MaxTextConfig, weights: Tree, reports: Tree) -> Tree:
    """Weights after the loss-free balancing of experts (routed_bias_update_rate) and QK-clip
    (use_qk_clip).
    """
    rate = config.routed_bias_update_rate
    if rate > 0:
        weights = each_block(
            config, weights, reports, "expert_load", partial(rebalanced, rate=rate)
        )
    if config.use_qk_clip:
        clip = partial(clipped, threshold=config.qk_clip_threshold, nope=config.qk_nope_head_dim)
        weights = each_block(config, weights, reports, "max_logits", clip)
    return weights


Change = Callable[
    [Tree, jax.Array, int | None], Tree
]  # (a block's weights, the report, the axis of a stack) -> weights


def each_block(
    config: MaxTextConfig, weights: Tree, reports: Tree, name: str, change: Change
) -> Tree:
    """The weights with every block changed that has a report of this name."""
    if name in reports:
        report = reports[name]
        if all(
            isinstance(key, int) for key in weights
        ):  # a block for each layer, and a stack of reports
            return {
                repeat: change(block, report[repeat], None) for repeat, block in weights.items()
            }
        stacked = report.ndim > 1
        return change(weights, report, config.param_scan_axis if stacked else None)
    changed = {
        key: each_block(config, weights[key], below, name, change)
        for key, below in reports.items()
        if isinstance(below, dict)
    }
    return weights | changed


def rebalanced(block: Tree, load: jax.Array, axis: int | None, rate: float) -> Tree:
    router = block["mlp"]["router"]
    bias = router["bias"]
    if axis is None:
        new = updated_bias(bias, load, rate)
    else:
        place = min(axis, bias.ndim - 1)
        new = jnp.moveaxis(updated_bias(jnp.moveaxis(bias, place, 0), load, rate), 0, place)
    return block | {"mlp": block["mlp"] | {"router": router | {"bias": new}}}


def clipped(block: Tree, logits: jax.Array, axis: int | None, threshold: float, nope: int) -> Tree:
    return block | {"attention": clip_mla(block["attention"], logits, threshold, nope, axis)}
