"""From the configuration to one Optax optimizer.

Every rule is: scaled gradient, + weight decay * parameter (not where adamw_mask matches), times
-learning rate, where the rate follows the optimizer's own count of updates. Each parameter belongs
to one of three groups: "main" (the rule that opt_type names, and under muon the AdamW of what is no
matrix), "matrix" (Muon) or "frozen", which has zero updates and no state at all. The state is an
optax.PartitionState over the groups that occur, inside a SpikeState when skip_step_on_spikes is
set. Types and structure of the state never change, so it can be donated.

Updates come out in float32 (frozen ones in the gradient's type); optax.apply_updates rounds the sum
once.
"""

from typing import Any

import jax
import optax

from maxtext.common.errors import ConfigError
from maxtext.configs.types import MaxTextConfig
from maxtext.optimizers.moments import scale_by_adam_pax, scale_by_adamw, scale_by_nothing
from maxtext.optimizers.muon import dimension_numbers, scale_by_muon
from maxtext.optimizers.paths import path_names, selected
from maxtext.optimizers.schedules import learning_rate_schedule
from maxtext.optimizers.spikes import skip_spikes

ADAM_KEYS = (
    "adam_b1", "adam_b2", "adam_eps", "adam_eps_root", "adam_weight_decay", "adamw_mask", "mu_dtype",
)  # fmt: skip
MUON_KEYS = ("muon_beta", "muon_weight_decay", "muon_consistent_rms")
WSD_KEYS = ("wsd_decay_steps_fraction", "wsd_decay_style")
SKIP_KEYS = ("skip_step_interval", "skip_step_scaling_factor")


def make_optimizer(
    config: MaxTextConfig, axis_names: Any, trained: Any = None
) -> optax.GradientTransformationExtraArgs:
    """The optimizer of parameters whose tree is that of `axis_names`, with a tuple of logical axis
    names a leaf; `trained`: bools of the same tree, false for weights that the model sets in
    another way.

    `update(grads, state, params, loss=..., raw_grad_norm=...)`: only skip_step_on_spikes looks at
    the last two.
    """
    refuse_unread_keys(config)
    names = path_names(axis_names, is_leaf=_is_axes)
    trains = trainable_parameters(config, axis_names, trained)
    dimensions = jax.tree.map(lambda _: None, names)
    if config.opt_type == "muon":
        dimensions = jax.tree.map(dimension_numbers, names, axis_names)
    groups = jax.tree.map(_group, trains, dimensions)
    optimizer = optax.partition(_rules(config, names, groups, dimensions), groups)
    return skip_spikes(config, optimizer) if config.skip_step_on_spikes else optimizer


def trainable_parameters(
    config: MaxTextConfig, axis_names: Any, trained: Any = None, warn: bool = True
) -> Any:
    """Bools in the tree of `axis_names`: which parameters the optimizer updates. The others are
    frozen: those that trainable_parameters_mask leaves out, and those that are false in `trained`.
    `warn`: of patterns without a match."""
    names = path_names(axis_names, is_leaf=_is_axes)
    trainable = jax.tree.map(lambda _: True, names)
    if config.trainable_parameters_mask:
        trainable = selected(
            "trainable_parameters_mask", config.trainable_parameters_mask, names, warn
        )
    if trained is not None:
        trainable = jax.tree.map(lambda wanted, possible: wanted and possible, trainable, trained)
    return trainable


def _group(trains: bool, dimensions: Any) -> str:
    if not trains:
        return "frozen"
    return "main" if dimensions is None else "matrix"


def _rules(
    config: MaxTextConfig, names: Any, groups: Any, dimensions: Any
) -> dict[str, optax.GradientTransformation]:
    """A rule for each group that occurs."""
    schedule = learning_rate_schedule(config)
    decays = jax.tree.map(
        lambda masked: not masked, selected("adamw_mask", config.adamw_mask, names)
    )
    present = set(jax.tree.leaves(groups))
    if config.opt_type == "muon" and "matrix" not in present:
        raise ConfigError("opt_type=muon has no matrix to train: use opt_type=adamw")

    def with_decay(
        scale: optax.GradientTransformation, weight_decay: float
    ) -> optax.GradientTransformation:
        decay = optax.add_decayed_weights(weight_decay, decays)
        return optax.chain(scale, decay, optax.scale_by_learning_rate(schedule))

    rules: dict[str, optax.GradientTransformation] = {}
    if "frozen" in present:
        rules["frozen"] = optax.set_to_zero()
    if "matrix" in present:
        # Inside its group a rule sees MaskedNode in place of the parameters of the others, and so
        # must the dimensions.
        own = jax.tree.map(
            lambda group, numbers: numbers if group == "matrix" else optax.MaskedNode(),
            groups,
            dimensions,
        )
        rules["matrix"] = with_decay(scale_by_muon(config, own), config.muon_weight_decay)
    if "main" in present:
        if config.opt_type == "sgd":
            rules["main"] = optax.chain(scale_by_nothing(), optax.scale_by_learning_rate(schedule))
        elif config.opt_type == "adam_pax":
            rules["main"] = with_decay(scale_by_adam_pax(config), config.adam_weight_decay)
        else:
            rules["main"] = with_decay(scale_by_adamw(config), config.adam_weight_decay)
    return rules


def _is_axes(node: Any) -> bool:
    return isinstance(node, tuple)


def refuse_unread_keys(config: MaxTextConfig) -> None:
    """A key that the chosen optimizer or schedule never reads must be at its default; a decay of 1
    is never right.
    """
    unread: list[tuple[tuple[str, ...], str]] = []
    decays = ["adam_b1", "adam_b2"]
    if config.opt_type == "sgd":
        unread.append((ADAM_KEYS, "opt_type=sgd"))
        decays = []
    if config.opt_type == "muon":
        decays.append("muon_beta")
    else:
        unread.append((MUON_KEYS, f"opt_type={_shown(config.opt_type)}"))
    if config.lr_schedule_type != "wsd":
        unread.append((WSD_KEYS, f"lr_schedule_type={_shown(config.lr_schedule_type)}"))
    if not config.skip_step_on_spikes:
        unread.append((SKIP_KEYS, "skip_step_on_spikes=false"))
    defaults = {
        key: field.get_default(call_default_factory=True)
        for key, field in type(config).model_fields.items()
    }
    problems = [
        f"{key}={_shown(getattr(config, key))} has no effect with {reason}: leave it out"
        for keys, reason in unread
        for key in keys
        if getattr(config, key) != defaults[key]
    ]
    problems += [
        f"{key}={getattr(config, key)} would never forget the first gradient: it must be below 1"
        for key in decays
        if getattr(config, key) >= 1
    ]
    if problems:
        raise ConfigError(*problems)


def _shown(value: Any) -> str:
    return str(getattr(value, "value", value))
