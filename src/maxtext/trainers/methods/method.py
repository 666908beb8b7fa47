"""The record of a training method: the rows that it reads, the objective that it minimizes, and its
functions before, around and after the steps.

The loop, the step, the input pipeline and the estimates take the record of a run's method and never
ask which one it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from maxtext.checkpoint.open import Checkpoint
from maxtext.configs.types import MaxTextConfig
from maxtext.diagnostics.metrics import Recorder
from maxtext.input_pipeline.row_formats import RowFormat
from maxtext.layers.parameters import Template
from maxtext.sharding import AxisRules
from maxtext.trainers.batch_size import RowBatches, StepBatches
from maxtext.trainers.data_loader import AddFields, TrainDataLoader
from maxtext.trainers.loop import Hook, TrainStep
from maxtext.trainers.objective import Objective
from maxtext.trainers.run_context import RunContext
from maxtext.trainers.step import TrainState

if TYPE_CHECKING:
    from maxtext.trainers.methods.rl.agents.agent import Agent
    from maxtext.trainers.methods.rl.rewards.functions import RewardFunction


@dataclass(frozen=True)
class UserCode:
    """Functions that callers of the Python API pass to a method. `rewards`: of reinforcement
    learning, in place of the built-in ones. `agent`: tools or an environment of conversations."""

    rewards: "Sequence[RewardFunction]" = ()
    agent: "Agent | None" = None


NO_USER_CODE = UserCode()


@dataclass(frozen=True)
class StepSetup:
    """The arguments with which a method wraps the train step. `first_step`: the number of steps
    done. `checkpoint`: load_parameters_path, if it is open already."""

    context: RunContext
    train_step: TrainStep
    data_loader: TrainDataLoader
    first_step: int = 0
    checkpoint: Checkpoint | None = None
    user_code: UserCode = NO_USER_CODE


class BuildObjective(Protocol):
    def __call__(self, config: MaxTextConfig, template: Template, rules: AxisRules) -> Objective:
        """The objective of a model. Raises ConfigError if the keys do not fit together."""


def read_rows(context: RunContext) -> TrainDataLoader:
    return TrainDataLoader(context)


def add_no_fields(
    context: RunContext, state: TrainState, step: int, checkpoint: Checkpoint | None
) -> AddFields:
    return lambda batch: batch


def plain_step(setup: StepSetup) -> TrainStep:
    return setup.train_step


def no_hooks(train_step: TrainStep, recorder: Recorder) -> list[Hook]:
    return []


def no_rollouts(context: RunContext) -> int:
    return 0


@dataclass(frozen=True)
class Method:
    """`is_chosen`: whether a configuration asks for the method.

    `prepare_batches(context, state, step, checkpoint)` returns the function that adds fields to
    each batch of the data, such as the log-probabilities of the reference of DPO.
    `wrap_step` returns the step of the loop; methods that sample do it there.
    `hooks(step, recorder)` takes that step.
    `rollout_bytes` are those that a device needs for rollouts, besides the weights of the trainer.
    """

    name: str
    is_chosen: Callable[[MaxTextConfig], bool]
    row_format: Callable[[MaxTextConfig], RowFormat]
    objective: BuildObjective
    batches: StepBatches = field(default_factory=RowBatches)
    trains_mtp: bool = False  # whether the loss has a term for MTP layers
    has_eval_loss: bool = True
    data_loader: Callable[[RunContext], TrainDataLoader] = read_rows
    prepare_batches: Callable[[RunContext, TrainState, int, Checkpoint | None], AddFields] = (
        add_no_fields
    )
    wrap_step: Callable[[StepSetup], TrainStep] = plain_step
    hooks: Callable[[TrainStep, Recorder], list[Hook]] = no_hooks
    rollout_bytes: Callable[[RunContext], int] = no_rollouts
