"""Which weights a run trains. The others are frozen: they have no gradient and no optimizer state.

A subtree of weights is a nested dict without the leaves, and without the empty dicts, of the rest.
"""

import jax

from maxtext.common.types import Tree
from maxtext.configs.types import MaxTextConfig
from maxtext.layers.parameters import Template
from maxtext.optimizers import match_patterns, parameter_paths, trainable_mask


def optimized_mask(config: MaxTextConfig, template: Template, warn: bool = False) -> Tree:
    """Bools in the tree of the weights: what the optimizer has state for. `warn`: log patterns of
    trainable_parameters_mask and student_params_to_update that match nothing."""
    mask = trainable_mask(config, template.axes, template.trained, warn=warn)
    patterns = config.student_params_to_update
    if patterns is None:
        return mask
    updated = match_patterns(
        "student_params_to_update", patterns, parameter_paths(template.weights), warn
    )
    return jax.tree.map(lambda trainable, matched: trainable and matched, mask, updated)


def has_adapters(config: MaxTextConfig) -> bool:
    """Whether adapters are trained, and everything else is frozen."""
    return config.lora_rank > 0 or bool(config.lora_restore_path)


def trains_only_indexers(config: MaxTextConfig) -> bool:
    """During indexer warm-up attention is dense, and indexers learn to predict its weights."""
    return (
        config.use_indexer
        and config.indexer_loss_scaling_factor > 0
        and not config.indexer_sparse_training
    )


def in_indexers(tree: Tree) -> Tree:
    """Bools in a tree of weights: what indexer warm-up changes."""
    return jax.tree.map_with_path(
        lambda path, _: any(getattr(entry, "key", None) == "indexer" for entry in path), tree
    )


def select(tree: Tree, mask: Tree, keep: bool = True) -> Tree:
    """The subtree of the leaves whose mask is `keep`. A leaf of the mask may stand for any object
    of the tree."""
    if not isinstance(mask, dict):
        raise TypeError("a mask is a nested dict of bools")
    selected = {}
    for name, branch in mask.items():
        if not isinstance(branch, dict):
            if branch is keep:
                selected[name] = tree[name]
        elif subtree := select(tree[name], branch, keep):
            selected[name] = subtree
    return selected
