"""The state before the first step: random weights, or those of load_parameters_path."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax

from maxtext.checkpoint.open import Checkpoint, model_param_infos, open_checkpoint
from maxtext.checkpoint.state import compare_trees, tensor_infos, to_flat_dict
from maxtext.checkpoint.weights import load_weights
from maxtext.common.errors import ConfigError, UserError
from maxtext.common.types import Tree
from maxtext.configs.derive import Devices
from maxtext.configs.sources import from_python
from maxtext.configs.types import MaxTextConfig
from maxtext.models.configuration import load
from maxtext.models.hf_registry import config_differences
from maxtext.models.transformer import initial_weights as random_weights
from maxtext.sharding import use_rules
from maxtext.trainers.adapters import adapted_weights
from maxtext.trainers.run_context import RunContext
from maxtext.trainers.step import TrainState
from maxtext.trainers.trainable import has_adapters


def initial_state(context: RunContext, checkpoint: Checkpoint | None = None) -> TrainState:
    """`checkpoint`: load_parameters_path, if it is open already."""
    path = context.config.load_parameters_path
    if has_adapters(context.config) or context.computes_weights:
        return state_from_weights(context, initial_weights(context, checkpoint))
    if not path:
        with use_rules(context.rules):
            return jax.jit(
                context.random_state, out_shardings=context.shardings.state_without_reference
            )()
    return state_from_weights(context, read_weights(context, checkpoint or open_checkpoint(path)))


def state_from_weights(context: RunContext, weights: Tree) -> TrainState:
    """The state before the first step, in its shards. Donates the weights."""
    with use_rules(context.rules):
        init = jax.jit(
            context.state_from_weights,
            out_shardings=context.shardings.state_without_reference,
            donate_argnums=0,
        )
        return init(weights)


def initial_weights(context: RunContext, checkpoint: Checkpoint | None = None) -> Tree:
    """The weights before the first step, also of a run that has done some."""
    path = context.config.load_parameters_path
    if has_adapters(context.config):
        checkpoint = checkpoint or (open_checkpoint(path) if path else None)
        if checkpoint is not None:
            check_base(context.config, checkpoint)
        return adapted_weights(context, checkpoint)
    if context.computes_weights:
        checkpoint = checkpoint or (open_checkpoint(path) if path else None)
        return factor_weights(context, checkpoint)
    if path:
        return read_weights(context, checkpoint or open_checkpoint(path))
    return initial_state(context).weights


def factor_weights(context: RunContext, checkpoint: Checkpoint | None) -> Tree:
    """The factors that the objective trains instead of its model's weights, which come from a
    checkpoint or are random."""
    config, objective = context.config, context.objective
    template = objective.model_template
    shardings = context.rules.shardings(template.axes, template.weights)
    with use_rules(context.rules):
        if checkpoint is None:
            random = jax.jit(partial(random_weights, config, loop=True), out_shardings=shardings)
            weights = random()
        else:
            check_base(config, checkpoint)
            param_infos = model_param_infos(template, config)
            source = checkpoint.weights(config, param_infos)
            weights = load_weights(source, param_infos, template, shardings)
        init = jax.jit(objective.trained_weights, out_shardings=context.shardings.weights)
        return init(weights)


def with_reference(
    context: RunContext, state: TrainState, step: int, checkpoint: Checkpoint | None
) -> TrainState:
    """The state with the weights of the reference, if the objective has one. `step`: the number of
    steps done. `checkpoint`: load_parameters_path, if it is open already."""
    objective = context.objective
    if objective.abstract_reference is None:
        return state

    def weights() -> Tree:
        return state.weights if step == 0 else initial_weights(context, checkpoint)

    with use_rules(context.rules):
        reference = objective.make_reference(weights, context.shardings.reference)
        if step == 0 and objective.starts_from_reference:
            init = jax.jit(
                lambda *trees: context.state_from_weights(objective.start_weights(*trees)),
                out_shardings=context.shardings.state_without_reference,
            )
            state = init(state.weights, reference)
    return replace(state, reference=reference)


def read_weights(context: RunContext, checkpoint: Checkpoint) -> Tree:
    """The weights of a checkpoint, read straight into their shards. Raises ConfigError if they are
    quantized or of another model."""
    check_base(context.config, checkpoint)
    param_infos = model_param_infos(context.template, context.config)
    source = checkpoint.weights(context.config, param_infos)
    with use_rules(context.rules):
        return load_weights(source, param_infos, context.template, context.shardings.weights)


def check_base(config: MaxTextConfig, checkpoint: Checkpoint) -> None:
    """Raise ConfigError if the weights of a checkpoint are quantized, or of another model."""
    if "checkpoint_is_quantized" in checkpoint.settings:
        raise ConfigError(
            f"{checkpoint.path} holds quantized weights, and training needs floats: start from a "
            "folder that is not quantized"
        )
    check_same_model(config, checkpoint)


def check_same_model(config: MaxTextConfig, checkpoint: Checkpoint) -> None:
    """Raise ConfigError if the checkpoint describes another model than the configuration does,
    unless override_model_config allows it."""
    overrides = from_python(
        {"max_target_length": config.max_target_length, "num_labels": config.num_labels}
    )
    saved = load(None, overrides, environ={}, devices=Devices(1), model=checkpoint.settings)
    differing = config_differences(config, saved)
    if differing and not config.override_model_config:
        raise ConfigError(
            f"load_parameters_path={checkpoint.path} holds another model: this run's has "
            f"{', '.join(differing)}; leave out what differs (the folder says what model it is), "
            "or set override_model_config=true to use its weights anyway"
        )


def apply_conversion(context: RunContext, state: TrainState) -> TrainState:
    """The state with checkpoint_conversion_fn applied to its weights."""
    name = context.config.checkpoint_conversion_fn
    if name is None:
        return state
    weights = import_conversion(name)(state.weights)
    problems = compare_trees(
        tensor_infos(to_flat_dict(weights)), tensor_infos(to_flat_dict(state.weights))
    )
    if problems:
        raise UserError(
            f"checkpoint_conversion_fn={name} returned other weights than the model has: "
            f"{problems[0]}"
        )
    weights = jax.tree.map(
        lambda new, old: jax.device_put(new, old.sharding).astype(old.dtype),
        weights,
        state.weights,
    )
    with use_rules(context.rules):
        return jax.jit(
            context.state_from_weights, out_shardings=context.shardings.state_without_reference
        )(weights)


def import_conversion(name: str) -> Callable[[Tree], Tree]:
    module, _, function = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"checkpoint_conversion_fn={name} cannot be imported ({error}): name a function as "
            "package.module.function"
        ) from error
