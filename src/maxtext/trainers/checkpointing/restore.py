"""Finds where a run starts, restores its state, and moves the data iterator to its position.

The state is that of the run's own newest checkpoint, else of load_full_state_path, else the weights
of load_parameters_path, else random weights. With the first two, the iterator continues after the
batches that the checkpoint has seen; otherwise it starts at the first one.

A checkpoint may come from another mesh, another number of processes, other dtypes, and from layers
scanned or unrolled. Arrays are read straight into this run's shards. A checkpoint of another model
or the state of another optimizer is an error.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp

from maxtext.checkpoint import steps
from maxtext.checkpoint.local_checkpoints import LocalCheckpointManager
from maxtext.checkpoint.manager import StorageOptions
from maxtext.checkpoint.multihost import allgather_int, allgather_ints
from maxtext.checkpoint.open import Checkpoint, model_param_infos, open_checkpoint
from maxtext.checkpoint.saved_step import CorruptCheckpoint, SavedStep
from maxtext.checkpoint.state import (
    OPTIMIZER,
    WEIGHTS,
    compare_trees,
    tensor_infos,
    to_flat_dict,
    unflatten_like,
)
from maxtext.checkpoint.steps import verify
from maxtext.checkpoint.training_weights import restack_layers
from maxtext.common.errors import ConfigError, UserError
from maxtext.common.hub import find_folder
from maxtext.common.log import LOGGER
from maxtext.common.trees import checksum, merge_dicts
from maxtext.common.types import Json, Tree
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline import BatchIterator, merge_states
from maxtext.sharding import use_rules
from maxtext.trainers.build import run_context_from_rules
from maxtext.trainers.checkpointing.init_state import (
    apply_conversion,
    check_same_model,
    initial_state,
    initial_weights,
    state_from_weights,
)
from maxtext.trainers.run_context import RunContext
from maxtext.trainers.shardings import with_shardings
from maxtext.trainers.step import TrainState
from maxtext.trainers.trainable import has_adapters, select

LAYOUT_KEYS = ("scan_layers", "param_scan_axis", "inhomogeneous_layer_cycle_interval")
MAX_SHOWN = 5  # problems that an error lists
MAX_EXAMINED = 256  # checkpoints


@dataclass
class Start:
    """The start of a run. `step`: the number of steps done. `state_and_key` may still be
    under construction in a thread."""

    state_and_key: tuple[TrainState, jax.Array] | Future[tuple[TrainState, jax.Array]]
    step: int
    origin: str
    run: Json = field(default_factory=dict)  # what the checkpoint says of its run

    def result(self) -> tuple[TrainState, jax.Array]:
        if isinstance(self.state_and_key, Future):
            return self.state_and_key.result()
        return self.state_and_key


def find_start(
    context: RunContext, source: BatchIterator, checkpoint: Checkpoint | None = None
) -> Start:
    """The state to start from; `source` is moved to its position in the data. `checkpoint`:
    load_parameters_path, if it is open already."""
    config = context.config
    if config.enable_checkpointing:
        folder = checkpoints_folder(config)
        for path in steps.incomplete_steps(folder):
            LOGGER.warning("%s is no complete checkpoint and is not used", path)
        paths = [folder / str(step) for step in steps.all_steps(folder)]
        newest = restore_newest(context, paths, LocalSteps(context, source))
        if newest is not None:
            return newest if isinstance(newest, Start) else resume_at(newest, source)
    if config.load_full_state_path:
        path = existing_folder(config.load_full_state_path, "load_full_state_path")
        check_layout(config, path)
        if not steps.has_steps(path):
            raise UserError(
                f"load_full_state_path={path} holds no checkpoint of training: for weights use "
                "load_parameters_path"
            )
        newest = restore_newest(context, steps.find_steps(path))
        assert isinstance(newest, tuple)
        return resume_at(newest, source)
    if not config.load_parameters_path:
        thread = ThreadPoolExecutor(1)  # the step is compiled at the same time
        future = thread.submit(lambda: (initial_state(context), context.key))
        thread.shutdown(wait=False)
        return Start(future, step=0, origin="fresh")
    folder = find_folder(config.load_parameters_path, config.hf_access_token)
    path = existing_folder(str(folder), "load_parameters_path")
    check_layout(config, path)
    state = load_initial_weights(context, path, checkpoint)
    return Start((state, context.key), step=0, origin=f"from {path}")


def checkpoints_folder(config: MaxTextConfig) -> Path:
    return Path(config.checkpoint_dir).absolute()


def local_tier(context: RunContext) -> LocalCheckpointManager | None:
    config = context.config
    if not (config.enable_emergency_checkpoint or config.enable_multi_tier_checkpointing):
        return None
    directory = Path(config.local_checkpoint_directory).expanduser().absolute()
    return LocalCheckpointManager(
        directory, config.run_name, str(checkpoints_folder(config)), context.rules.mesh.shape
    )


class LocalSteps:
    """The newest step on the local disks of the machines. It is used if no shared checkpoint is
    newer."""

    def __init__(self, context: RunContext, source: BatchIterator):
        self.context = context
        self.source = source
        self.tier = local_tier(context)
        self.step = None if self.tier is None else self.tier.latest_step()

    def after(self, shared: int) -> Start | None:
        """The start from the local step if it is newer than step `shared` and fits this run."""
        if self.tier is None or self.step is None or self.step <= shared:
            return None
        step, self.step = self.step, None  # it is tried once
        abstract = abstract_tree(self.context)
        restored = self.tier.restore(step, to_flat_dict(abstract))
        if restored is None:
            return None
        arrays, position = restored
        self.source.set_state(position)
        return Start(
            state_and_key(self.context, unflatten_like(abstract, arrays)),
            step=step,
            origin=f"step {step} of {self.tier.folder.parent}",
        )


def existing_folder(text: str, key: str) -> Path:
    path = Path(text).expanduser().absolute()
    if not path.is_dir():
        raise UserError(f"{key}: there is no folder {path}")
    return path


def check_layout(config: MaxTextConfig, path: Path) -> None:
    """Raise ConfigError if source_checkpoint_layout is set and wrong. The layout is detected
    anyway."""
    detected = "orbax" if steps.has_steps(path) else "safetensors"
    stated = config.source_checkpoint_layout
    if config.source("source_checkpoint_layout").is_user and stated != detected:
        raise ConfigError(
            f"source_checkpoint_layout={stated}, but {path} holds {detected}: leave the key out"
        )


def restore_newest(
    context: RunContext, paths: Sequence[Path], local: LocalSteps | None = None
) -> tuple[TrainState, jax.Array, SavedStep] | Start | None:
    """The state of the newest of these steps that is intact; process 0 decides which steps exist.
    A local step is preferred to every older shared one."""
    step_numbers = allgather_ints([int(path.name) for path in paths[-MAX_EXAMINED:]], MAX_EXAMINED)[
        0
    ]
    if local is not None and (start := local.after(step_numbers[-1] if step_numbers else 0)):
        return start
    if not step_numbers:
        return None
    if not paths:
        raise UserError(
            "this process does not see the checkpoints of process 0: they must be on a disk that "
            "all share"
        )
    folder = paths[0].parent
    damaged = []
    for number in reversed(step_numbers):
        path = folder / str(number)
        if local is not None and (start := local.after(number)):
            return start
        problems = verify(path, jax.process_index(), jax.process_count())
        if not max(allgather_int(len(problems))):
            try:
                state, key = read_state(context, SavedStep(path))
                return state, key, SavedStep(path)
            except CorruptCheckpoint as error:
                if jax.process_count() > 1:  # other processes may have succeeded
                    raise
                problems = [str(error)]
        for problem in problems[:MAX_SHOWN]:
            LOGGER.warning("checkpoint %s is damaged: %s", path, problem)
        damaged.append(path.name)
        LOGGER.warning("checkpoint %s is not used; trying the one before", path)
    if local is not None and (start := local.after(0)):
        return start
    raise UserError(
        f"{folder} has no checkpoint that can be read: {describe_damaged(damaged[::-1])} damaged; "
        "bring back their files, or start again under a new run_name"
    )


def describe_damaged(names: Sequence[str]) -> str:
    """`step 2 is`, `steps 2, 6 are`, `all 133 steps from 10 to 1330 are`."""
    if len(names) > MAX_SHOWN:
        return f"all {len(names)} steps from {names[0]} to {names[-1]} are"
    return f"steps {', '.join(names)} are" if len(names) > 1 else f"step {', '.join(names)} is"


def resume_at(newest: tuple[TrainState, jax.Array, SavedStep], source: BatchIterator) -> Start:
    state, key, stored = newest
    source.set_state(merge_states(stored.iterator_states()))
    origin = f"step {stored.step} of {stored.path.parent}"
    return Start((state, key), step=stored.step, origin=origin, run=stored.run)


def read_state(context: RunContext, stored: SavedStep) -> tuple[TrainState, jax.Array]:
    check_optimizer(context, stored)
    return state_and_key(context, read(context, stored, abstract_tree))


def state_and_key(context: RunContext, tree: Tree) -> tuple[TrainState, jax.Array]:
    """The state of a checkpoint, and the key of training. A checkpoint of adapters gets the frozen
    base of this run."""
    weights = tree[WEIGHTS]
    if has_adapters(context.config):
        weights = merge_dicts(
            select(initial_weights(context), context.trained, keep=False), weights
        )
    replicated = context.shardings.replicated
    wrap_key = jax.jit(jax.random.wrap_key_data, out_shardings=replicated)
    zero = jax.jit(lambda: jnp.zeros((), jnp.int32), out_shardings=replicated)()
    state = TrainState(
        step=tree["step"], weights=weights, opt_state=tree[OPTIMIZER], nonfinite_steps=zero
    )
    return state, wrap_key(tree["key"])


def saved_weights(context: RunContext, weights: Tree) -> Tree:
    """The weights in a checkpoint: all, or only the trained ones if the others are a frozen
    base."""
    return select(weights, context.trained) if has_adapters(context.config) else weights


def abstract_tree(context: RunContext) -> Tree:
    """The content of a checkpoint of this run, as abstract arrays."""
    state = with_shardings(context.abstract_state, context.shardings.state)
    key = jax.eval_shape(jax.random.key_data, context.abstract_key)
    return {
        "step": state.step,
        WEIGHTS: saved_weights(context, state.weights),
        OPTIMIZER: state.opt_state,
        "key": jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=context.shardings.replicated),
    }


def abstract_weights(context: RunContext) -> Tree:
    return {WEIGHTS: with_shardings(context.abstract_weights, context.shardings.weights)}


def read(context: RunContext, stored: SavedStep, abstract_of: Callable[[RunContext], Tree]) -> Tree:
    """The part of a checkpoint that `abstract_of` selects, in the layout of this run."""
    abstract = abstract_of(context)
    storage = StorageOptions.of(context.config)
    saved_context = with_layout_of(context, stored)
    expected = to_flat_dict(abstract_of(saved_context))
    saved = {
        name: tensor
        for name, tensor in stored.tensors_named_as(expected).items()
        if name[0] in abstract
    }
    problems = compare_trees(saved, tensor_infos(expected))
    if problems:
        raise_mismatch(stored, problems)
    if saved_context is context:
        return unflatten_like(abstract, stored.restore(to_flat_dict(abstract), storage))
    LOGGER.info(
        "%s: converting layers saved as %s to the layout of this run",
        stored.path,
        stored.run["layout"],
    )
    old = model_param_infos(saved_context.template, saved_context.config)
    new = model_param_infos(context.template, context.config)
    arrays = stored.restore(expected, storage)
    with use_rules(context.rules):
        return unflatten_like(abstract, restack_layers(arrays, old, new, to_flat_dict(abstract)))


def with_layout_of(context: RunContext, stored: SavedStep) -> RunContext:
    """This run's context, with its layers stacked like those of a checkpoint."""
    layout = {key: value for key, value in stored.run["layout"].items() if key in LAYOUT_KEYS}
    if layout == layout_of(context.config):
        return context
    return run_context_from_rules(context.config.model_copy(update=layout), context.rules)


def layout_of(config: MaxTextConfig) -> Json:
    return {key: getattr(config, key) for key in LAYOUT_KEYS}


def raise_mismatch(stored: SavedStep, problems: Sequence[str]) -> None:
    shown = "; ".join(problems[:MAX_SHOWN])
    if len(problems) > MAX_SHOWN:
        shown += f"; and {len(problems) - MAX_SHOWN} more"
    if all(problem.startswith(f"{OPTIMIZER}/") for problem in problems):
        raise ConfigError(
            f"{stored.path} was saved with other settings of the optimizer ({shown}): set them as "
            "they were, or start a new run from its weights with load_parameters_path"
        )
    raise ConfigError(
        f"{stored.path} is of another model ({shown}): set the model as it was, or choose another "
        "run_name"
    )


def check_optimizer(context: RunContext, stored: SavedStep) -> None:
    saved, current = stored.run["optimizer"], context.config.opt_type.value
    if saved != current:
        raise ConfigError(
            f"{stored.path} was saved with opt_type={saved}, and this run has opt_type={current}: "
            f"set opt_type={saved}, or start a new run from its weights with load_parameters_path"
        )


def load_initial_weights(
    context: RunContext, path: Path, checkpoint: Checkpoint | None
) -> TrainState:
    """The state before the first step, with the weights of a folder or of the newest step of a
    training checkpoint. `checkpoint`: the same, if it is open already."""
    is_other_tree = has_adapters(context.config) or context.computes_weights
    if is_other_tree or not steps.has_steps(path):
        return apply_conversion(context, initial_state(context, checkpoint))
    stored = SavedStep(steps.find_steps(path)[-1])
    problems = verify(stored.path, jax.process_index(), jax.process_count())
    if max(allgather_int(len(problems))):
        problem = problems[0] if problems else "see the other processes"
        raise UserError(f"{stored.path} is damaged: {problem}; name an older step")
    check_same_model(context.config, checkpoint or open_checkpoint(stored.path))
    weights = read(context, stored, abstract_weights)[WEIGHTS]
    return apply_conversion(context, state_from_weights(context, weights))


def frozen_checksum(context: RunContext, state: TrainState, start: Start) -> int | None:
    """The checksum of what a run needs and does not save: the base of its adapters, the reference
    of its preferences, or its teacher. Raises ConfigError if the run began with other weights."""
    frozen = state.reference
    if has_adapters(context.config):
        frozen = select(state.weights, context.trained, keep=False), frozen
    if not jax.tree.leaves(frozen):
        return None
    with use_rules(context.rules):
        value = int(checksum(frozen))
    if start.run.get("frozen_checksum", value) != value:
        config = context.config
        path = config.teacher_overrides.get("load_parameters_path") or config.load_parameters_path
        raise ConfigError(
            f"{start.origin} continues from other weights than those of load_parameters_path="
            f"{path}: name the folder that the run began with"
        )
    return value
