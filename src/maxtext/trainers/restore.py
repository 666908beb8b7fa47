"""Where a run starts: at its own newest checkpoint, else at load_full_state_path or
load_parameters_path, else fresh.

A checkpoint may come from another mesh, another number of processes, other dtypes, and from layers
scanned or unrolled; arrays go straight into this run's shards. One of another model is refused, and
so is the state of another optimizer.
"""

import importlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from maxtext.checkpoint import steps
from maxtext.checkpoint.integrity import verify
from maxtext.checkpoint.local_checkpoints import LocalCheckpointManager
from maxtext.checkpoint.manager import StorageOptions
from maxtext.checkpoint.multihost import allgather_int, allgather_ints
from maxtext.checkpoint.open import model_param_infos, open_checkpoint
from maxtext.checkpoint.restack import restack_layers
from maxtext.checkpoint.saved_step import CorruptCheckpoint, SavedStep
from maxtext.checkpoint.state import (
    OPTIMIZER,
    WEIGHTS,
    Name,
    compare_trees,
    from_flat_dict,
    tensor_infos,
    to_flat_dict,
    unflatten_like,
)
from maxtext.common.errors import ConfigError, UserError
from maxtext.common.log import LOGGER
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline import BatchIterator, merge_states
from maxtext.models.transformer import make_template
from maxtext.optimizers import make_optimizer
from maxtext.sharding import use_rules
from maxtext.trainers.setup import Setup, placed, refuse_other_model
from maxtext.trainers.step import TrainState

LAYOUT_KEYS = ("scan_layers", "param_scan_axis", "inhomogeneous_layer_cycle_interval")
SHOWN = 5  # of the tensors that differ
MOST = 256  # checkpoints that are examined


@dataclass
class Start:
    """What the first step needs. `step` is the number of steps done. State and key may still be in
    the making.
    """

    made: tuple[TrainState, jax.Array] | Future[tuple[TrainState, jax.Array]]
    step: int
    origin: str

    def ready(self) -> tuple[TrainState, jax.Array]:
        return self.made.result() if isinstance(self.made, Future) else self.made


def start(setup: Setup, source: BatchIterator) -> Start:
    """The state to start from; `source` is moved to the place that belongs to it."""
    config = setup.config
    if config.enable_checkpointing:
        folder = checkpoints_folder(config)
        for path in steps.incomplete(folder):
            LOGGER.warning("%s is no complete checkpoint and is not used", path)
        found = newest(
            setup,
            [folder / str(step) for step in steps.all_steps(folder)],
            LocalSteps(setup, source),
        )
        if found is not None:
            return found if isinstance(found, Start) else at_position(found, source)
    if config.load_full_state_path:
        path = existing(config.load_full_state_path, "load_full_state_path")
        check_layout(config, path)
        if not steps.is_checkpoints(path):
            raise UserError(
                f"load_full_state_path={path} holds no checkpoint of training: for weights use load_parameters_path"
            )
        found = newest(setup, steps.steps_under(path))
        assert isinstance(found, tuple)
        return at_position(found, source)
    if not config.load_parameters_path:
        thread = ThreadPoolExecutor(1)  # so that the step can be compiled at the same time
        made = thread.submit(lambda: (setup.initial_state(), setup.key))
        thread.shutdown(wait=False)
        return Start(made, 0, "fresh")
    path = existing(config.load_parameters_path, "load_parameters_path")
    check_layout(config, path)
    return Start((state_of_weights(setup, path), setup.key), 0, f"from {path}")


def checkpoints_folder(config: MaxTextConfig) -> Path:
    return Path(config.checkpoint_dir).absolute()


def local_tier(setup: Setup) -> LocalCheckpointManager | None:
    config = setup.config
    if not (config.enable_emergency_checkpoint or config.enable_multi_tier_checkpointing):
        return None
    directory = Path(config.local_checkpoint_directory).expanduser().absolute()
    return LocalCheckpointManager(
        directory, config.run_name, str(checkpoints_folder(config)), setup.rules.mesh.shape
    )


class LocalSteps:
    """The newest step on the machines' own disks, to be used where the shared checkpoints have none
    that is newer.
    """

    def __init__(self, setup: Setup, source: BatchIterator):
        self.setup, self.source = setup, source
        self.tier = local_tier(setup)
        self.step = None if self.tier is None else self.tier.latest_step()

    def after(self, shared: int) -> Start | None:
        """The start from that step if it is newer than step `shared` and fits this run."""
        if self.tier is None or self.step is None or self.step <= shared:
            return None
        step, self.step = self.step, None  # it is tried once
        like = saved_tree(self.setup)
        found = self.tier.restore(step, to_flat_dict(like))
        if found is None:
            return None
        arrays, position = found
        self.source.set_state(position)
        return Start(
            state_and_key(self.setup, unflatten_like(like, arrays)),
            step,
            f"step {step} of {self.tier.folder.parent}",
        )


def existing(text: str, key: str) -> Path:
    path = Path(text).expanduser().absolute()
    if not path.is_dir():
        raise UserError(f"{key}: there is no folder {path}")
    return path


def check_layout(config: MaxTextConfig, path: Path) -> None:
    """A person who says what kind of checkpoint it is must be right; else it is found out."""
    found = "orbax" if steps.is_checkpoints(path) else "safetensors"
    said = config.source_checkpoint_layout
    if config.source("source_checkpoint_layout").is_user and said != found:
        raise ConfigError(
            f"source_checkpoint_layout={said}, but {path} holds {found}: leave the key out"
        )


def newest(
    setup: Setup, paths: Sequence[Path], local: LocalSteps | None = None
) -> tuple[TrainState, jax.Array, SavedStep] | Start | None:
    """The state of the last of these steps that is whole; which they are, the first process says. A
    local step is taken before every shared one that is older than it."""
    numbers = allgather_ints([int(path.name) for path in paths[-MOST:]], MOST)[0]
    if local is not None and (start := local.after(numbers[-1] if numbers else 0)):
        return start
    if not numbers:
        return None
    if not paths:
        raise UserError(
            "this process does not see the checkpoints of process 0: they must be on a disk that all share"
        )
    folder = paths[0].parent
    damaged = []
    for number in reversed(numbers):
        path = folder / str(number)
        if local is not None and (start := local.after(number)):
            return start
        problems = verify(path, jax.process_index(), jax.process_count())
        if not max(allgather_int(len(problems))):
            try:
                state, key = read_state(setup, SavedStep(path))
                return state, key, SavedStep(path)
            except CorruptCheckpoint as error:
                if jax.process_count() > 1:  # the others may have read theirs
                    raise
                problems = [str(error)]
        for problem in problems[:SHOWN]:
            LOGGER.warning("checkpoint %s is damaged: %s", path, problem)
        damaged.append(path.name)
        LOGGER.warning("checkpoint %s is not used; trying the one before", path)
    if local is not None and (start := local.after(0)):
        return start
    raise UserError(
        f"{folder} has no checkpoint that can be read: {damaged_steps(damaged[::-1])} damaged; "
        "bring back their files, or start again under a new run_name"
    )


def damaged_steps(names: Sequence[str]) -> str:
    """`step 2 is`, `steps 2, 6 are`, `all 133 steps from 10 to 1330 are`."""
    if len(names) > SHOWN:
        return f"all {len(names)} steps from {names[0]} to {names[-1]} are"
    return f"step{'s' if len(names) > 1 else ''} {', '.join(names)} {'are' if len(names) > 1 else 'is'}"


def at_position(found: tuple[TrainState, jax.Array, SavedStep], source: BatchIterator) -> Start:
    state, key, stored = found
    source.set_state(merge_states(stored.iterator_states()))
    return Start((state, key), stored.step, f"step {stored.step} of {stored.path.parent}")


def read_state(setup: Setup, stored: SavedStep) -> tuple[TrainState, jax.Array]:
    check_optimizer(setup, stored)
    return state_and_key(setup, read(setup, stored, saved_tree))


def state_and_key(setup: Setup, tree: dict[str, Any]) -> tuple[TrainState, jax.Array]:
    wrap = jax.jit(jax.random.wrap_key_data, out_shardings=setup.rules.replicated())
    zero = jax.jit(lambda: jnp.zeros((), jnp.int32), out_shardings=setup.rules.replicated())()
    return TrainState(tree["step"], tree[WEIGHTS], tree[OPTIMIZER], nonfinite_steps=zero), wrap(
        tree["key"]
    )


def saved_tree(setup: Setup) -> dict[str, Any]:
    """What a checkpoint of this run holds, without values."""
    state = placed(setup.abstract_state, setup.state_shardings)
    key = jax.eval_shape(jax.random.key_data, setup.abstract_key)
    where = setup.rules.replicated()
    return {
        "step": state.step,
        WEIGHTS: state.weights,
        OPTIMIZER: state.optimizer,
        "key": jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=where),
    }


def only_weights(setup: Setup) -> dict[str, Any]:
    return {WEIGHTS: placed(setup.template.weights, setup.weight_shardings)}


def read(setup: Setup, stored: SavedStep, wanted: Callable[[Setup], dict[str, Any]]) -> Any:
    """The part of a checkpoint that a run wants, in the run's own layout."""
    like = wanted(setup)
    parts = tuple(like)
    storage = StorageOptions.of(setup.config)
    there = in_layout_of(setup, stored)
    expected = to_flat_dict(wanted(there))
    saved = {
        name: tensor
        for name, tensor in stored.tensors_named_as(expected).items()
        if name[0] in parts
    }
    problems = compare_trees(saved, tensor_infos(expected))
    if problems:
        refuse(stored, problems)
    if there is setup:
        return unflatten_like(like, stored.restore(to_flat_dict(like), storage))
    LOGGER.info(
        "%s: layers are laid out as %s and now become those of this run",
        stored.path,
        stored.run["layout"],
    )
    old, new = (model_param_infos(one.template, one.config) for one in (there, setup))
    arrays = stored.restore(expected, storage)
    with use_rules(setup.rules):
        return unflatten_like(like, restack_layers(arrays, old, new, to_flat_dict(like)))


def in_layout_of(setup: Setup, stored: SavedStep) -> Setup:
    """This run's setup, with its layers stacked as those of a checkpoint are."""
    layout = {key: value for key, value in stored.run["layout"].items() if key in LAYOUT_KEYS}
    if layout == layout_of(setup.config):
        return setup
    config = setup.config.model_copy(update=layout)
    template = make_template(config)
    return replace(
        setup,
        config=config,
        template=template,
        optimizer=make_optimizer(config, template.axes, template.trained),
    )


def layout_of(config: MaxTextConfig) -> dict[str, Any]:
    return {key: getattr(config, key) for key in LAYOUT_KEYS}


def refuse(stored: SavedStep, problems: Sequence[str]) -> None:
    some = "; ".join(problems[:SHOWN])
    rest = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    if all(problem.startswith(f"{OPTIMIZER}/") for problem in problems):
        raise ConfigError(
            f"{stored.path} was saved with other settings of the optimizer ({some}{rest}): set them as they were, or "
            "start a new run from its weights with load_parameters_path"
        )
    raise ConfigError(
        f"{stored.path} is of another model ({some}{rest}): set the model as it was, or choose another run_name"
    )


def check_optimizer(setup: Setup, stored: SavedStep) -> None:
    saved, wanted = stored.run["optimizer"], setup.config.opt_type.value
    if saved != wanted:
        raise ConfigError(
            f"{stored.path} was saved with opt_type={saved}, and this run has opt_type={wanted}: "
            f"set opt_type={saved}, or start a new run from its weights with load_parameters_path"
        )


def state_of_weights(setup: Setup, path: Path) -> TrainState:
    """A first state with the weights of a folder, or of the newest step of a checkpoint of
    training.
    """
    if not steps.is_checkpoints(path):
        return converted(setup, setup.initial_state())
    stored = SavedStep(steps.steps_under(path)[-1])
    problems = verify(stored.path, jax.process_index(), jax.process_count())
    if max(allgather_int(len(problems))):
        raise UserError(
            f"{stored.path} is damaged: {(problems or ['see the other processes'])[0]}; name an older step"
        )
    refuse_other_model(setup.config, open_checkpoint(stored.path))
    with use_rules(setup.rules):
        make = jax.jit(setup.first_state, out_shardings=setup.state_shardings, donate_argnums=0)
        return converted(setup, make(read(setup, stored, only_weights)[WEIGHTS]))


def converted(setup: Setup, state: TrainState) -> TrainState:
    """The state with checkpoint_conversion_fn applied to its weights."""
    name = setup.config.checkpoint_conversion_fn
    if name is None:
        return state
    weights = conversion(name)(state.weights)
    wrong = compare_trees(
        tensor_infos(to_flat_dict(weights)), tensor_infos(to_flat_dict(state.weights))
    )
    if wrong:
        raise UserError(
            f"checkpoint_conversion_fn={name} returned other weights than the model has: {wrong[0]}"
        )
    with use_rules(setup.rules):
        return jax.jit(setup.first_state, out_shardings=setup.state_shardings)(
            jax.tree.map(
                lambda new, old: jax.device_put(new, old.sharding).astype(old.dtype),
                weights,
                state.weights,
            )
        )


def conversion(name: str) -> Callable[[Any], Any]:
    module, _, function = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"checkpoint_conversion_fn={name} cannot be imported ({error}): name a function as package.module.function"
        ) from error


def description(setup: Setup, step: int) -> dict[str, Any]:
    """What a checkpoint says of the run that saved it."""
    config = setup.config
    return {
        "step": step,
        "layout": layout_of(config),
        "optimizer": config.opt_type.value,
        "weight_dtype": config.weight_dtype.value,
        "processes": jax.process_count(),
        "mesh": {axis: size for axis, size in setup.rules.mesh.shape.items() if size > 1},
    }


def tree_to_save(state: TrainState, key: jax.Array) -> dict[str, Any]:
    """As saved_tree, with values. `nonfinite_steps` starts at 0 again in a resumed run."""
    leaves: dict[Name, Any] = to_flat_dict(
        {"step": state.step, WEIGHTS: state.weights, OPTIMIZER: state.optimizer}
    )
    return from_flat_dict(leaves) | {"key": jax.random.key_data(key)}
