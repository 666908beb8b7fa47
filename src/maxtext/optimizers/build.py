"""Builds the Optax optimizer of a configuration, over parameters that are selected by their paths.

    update = -learning_rate * (scale(gradient) + weight_decay * parameter)

without weight decay where adamw_mask matches; the learning rate follows the optimizer's own count
of updates. Each parameter belongs to one of three groups: "main" (the rule of opt_type; with
opt_type=muon, AdamW for parameters that are not matrices), "matrix" (Muon), or "frozen", which has
zero updates and no state. The state is an optax.PartitionState over the groups that occur, inside a
SpikeState if skip_step_on_spikes is set. Its dtypes and structure never change, so it can be
donated. Updates are float32 (frozen ones have the gradient's dtype); optax.apply_updates rounds the
sum once.

`parameter_paths` names a parameter by the keys in the tree joined by "/":
`layers/0/0/attention/query/weight`. `match_patterns` searches patterns in these paths
(`re.search`): `norm` matches all parameters with norm anywhere in the path, and `^head/` only those
of the head.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from maxtext.common.errors import ConfigError
from maxtext.common.log import LOGGER
from maxtext.common.types import Tree
from maxtext.configs.sources import is_preset
from maxtext.configs.types import MaxTextConfig
from maxtext.optimizers.moments import cast_to_float32, scale_by_adam_pax, scale_by_adamw
from maxtext.optimizers.muon import dimension_numbers, scale_by_muon
from maxtext.optimizers.schedules import learning_rate_schedule
from maxtext.optimizers.spikes import skip_spikes


def parameter_paths(tree: Tree, is_leaf: Callable[[Any], bool] | None = None) -> Tree:
    """The tree with each leaf replaced by its path."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path, simple=True, separator="/"),
        tree,
        is_leaf=is_leaf,
    )


def match_patterns(
    key: str, patterns: Sequence[str], paths: Tree, warn: bool = True, required: bool = True
) -> Tree:
    """A tree of bools: whether any pattern of the configuration key `key` matches the path.

    Raises ConfigError if no pattern matches any path: a typo would freeze or decay the wrong
    weights. A single pattern without a match may come from a list for several families; it is only
    logged, with `warn`. Without `required`, nothing has to match.
    """
    all_paths = jax.tree.leaves(paths)
    unmatched = [
        pattern for pattern in patterns if not any(re.search(pattern, path) for path in all_paths)
    ]
    if required and patterns and len(unmatched) == len(patterns):
        raise ConfigError(
            f"{key}={list(patterns)} matches no parameter: "
            f"patterns are searched in paths such as {all_paths[0]!r}"
        )
    for pattern in unmatched if warn else ():
        LOGGER.warning("%s: the pattern %r matches no parameter", key, pattern)
    return jax.tree.map(lambda path: any(re.search(pattern, path) for pattern in patterns), paths)


ADAM_KEYS = (
    "adam_b1",
    "adam_b2",
    "adam_eps",
    "adam_eps_root",
    "adam_weight_decay",
    "adamw_mask",
    "mu_dtype",
)
MUON_KEYS = ("muon_beta", "muon_weight_decay", "muon_consistent_rms")
WSD_KEYS = ("wsd_decay_steps_fraction", "wsd_decay_style")
SKIP_KEYS = ("skip_step_interval", "skip_step_scaling_factor")


def build_optimizer(
    config: MaxTextConfig, axis_names: Tree, trained: Tree | None = None
) -> optax.GradientTransformationExtraArgs:
    """The optimizer for parameters in the tree of `axis_names`, whose leaves are tuples of logical
    axis names. `trained` is a tree of bools, false for parameters that the model updates itself.

    `update(grads, state, params, loss=..., raw_grad_norm=...)`: only skip_step_on_spikes uses the
    last two.
    """
    check_unread_keys(config)
    paths = parameter_paths(axis_names, is_leaf=_is_axes)
    trainable = trainable_mask(config, axis_names, trained)
    dimensions = jax.tree.map(lambda _: None, paths)
    if config.opt_type == "muon":
        dimensions = jax.tree.map(dimension_numbers, paths, axis_names)
    groups = jax.tree.map(_group, trainable, dimensions)
    optimizer = optax.partition(_rules(config, paths, groups, dimensions), groups)
    return skip_spikes(config, optimizer) if config.skip_step_on_spikes else optimizer


def trainable_mask(
    config: MaxTextConfig, axis_names: Tree, trained: Tree | None = None, warn: bool = True
) -> Tree:
    """A tree of bools: whether the optimizer updates a parameter. The others are frozen: those that
    trainable_parameters_mask does not match, and those that are false in `trained`.

    `warn`: log patterns without a match.
    """
    paths = parameter_paths(axis_names, is_leaf=_is_axes)
    trainable = jax.tree.map(lambda _: True, paths)
    if config.trainable_parameters_mask:
        trainable = match_patterns(
            "trainable_parameters_mask", config.trainable_parameters_mask, paths, warn
        )
    if trained is not None:
        trainable = jax.tree.map(lambda matched, allowed: matched and allowed, trainable, trained)
    return trainable


def _group(trainable: bool, dimensions: Tree) -> str:
    if not trainable:
        return "frozen"
    return "main" if dimensions is None else "matrix"


def _rules(
    config: MaxTextConfig, paths: Tree, groups: Tree, dimensions: Tree
) -> dict[str, optax.GradientTransformation]:
    """The transformation of each group that occurs."""
    schedule = learning_rate_schedule(config)
    # The patterns of presets are for any model, also for adapters, which have no norms.
    is_chosen = not is_preset(config.source("adamw_mask"))
    masked = match_patterns(
        "adamw_mask", config.adamw_mask, paths, warn=is_chosen, required=is_chosen
    )
    decayed = jax.tree.map(lambda is_masked: not is_masked, masked)
    present = set(jax.tree.leaves(groups))
    if config.opt_type == "muon" and "matrix" not in present:
        raise ConfigError("opt_type=muon has no trainable matrix: use opt_type=adamw")

    def with_decay(
        scale: optax.GradientTransformation, weight_decay: float
    ) -> optax.GradientTransformation:
        decay = optax.add_decayed_weights(weight_decay, decayed)
        return optax.chain(scale, decay, optax.scale_by_learning_rate(schedule))

    rules: dict[str, optax.GradientTransformation] = {}
    if "frozen" in present:
        rules["frozen"] = optax.set_to_zero()
    if "matrix" in present:
        # In its group a transformation sees MaskedNode instead of other groups' parameters.
        matrix_dimensions = jax.tree.map(
            lambda group, dims: dims if group == "matrix" else optax.MaskedNode(),
            groups,
            dimensions,
        )
        muon = scale_by_muon(config, matrix_dimensions)
        rules["matrix"] = with_decay(muon, config.muon_weight_decay)
    if "main" in present:
        if config.opt_type == "sgd":
            rules["main"] = optax.chain(cast_to_float32(), optax.scale_by_learning_rate(schedule))
        elif config.opt_type == "adam_pax":
            rules["main"] = with_decay(scale_by_adam_pax(config), config.adam_weight_decay)
        else:
            rules["main"] = with_decay(scale_by_adamw(config), config.adam_weight_decay)
    return rules


def _is_axes(node: object) -> bool:
    return isinstance(node, tuple)


def check_unread_keys(config: MaxTextConfig) -> None:
    """Look at keys that are not at their default and have no effect. Those of another optimizer are
    a warning, since settings are often shared by several; others raise ConfigError, as do decay
    rates of 1 or more.
    """
    opt_type = f"opt_type={_text(config.opt_type)}"
    decay_keys = ["adam_b1", "adam_b2"]
    if config.opt_type == "sgd":
        warn_of_unread_keys(config, ADAM_KEYS, opt_type)
        decay_keys = []
    if config.opt_type == "muon":
        decay_keys.append("muon_beta")
    else:
        warn_of_unread_keys(config, MUON_KEYS, opt_type)
    problems = []
    if config.lr_schedule_type != "wsd":
        reason = f"lr_schedule_type={_text(config.lr_schedule_type)}"
        problems += unread_keys(config, WSD_KEYS, reason)
    if not config.skip_step_on_spikes:
        problems += unread_keys(config, SKIP_KEYS, "skip_step_on_spikes=false")
    problems = [f"{problem}: leave it out" for problem in problems]
    problems += [
        f"{key}={getattr(config, key)} would never forget the first gradient: it must be below 1"
        for key in decay_keys
        if getattr(config, key) >= 1
    ]
    if problems:
        raise ConfigError(*problems)


def warn_of_unread_keys(config: MaxTextConfig, keys: Sequence[str], reason: str) -> None:
    for problem in unread_keys(config, keys, reason):
        LOGGER.warning("%s", problem)


def unread_keys(config: MaxTextConfig, keys: Sequence[str], reason: str) -> list[str]:
    """A sentence for each key that is not at its default."""
    fields = type(config).model_fields
    return [
        f"{key}={_text(getattr(config, key))} has no effect with {reason}"
        for key in keys
        if getattr(config, key) != fields[key].get_default(call_default_factory=True)
        and not is_true_anyway(key, config)
    ]


def is_true_anyway(key: str, config: MaxTextConfig) -> bool:
    """Whether a key asks for what an optimizer does without reading it: SGD has no weight decay,
    whatever is left out of it."""
    return key in ("adam_weight_decay", "adamw_mask") and config.adam_weight_decay == 0


def _text(value: object) -> str:
    return str(getattr(value, "value", value))
