"""The set-up of a run before its first step: the data at its position, the compiled step, and the
state.

The state is restored in the background while the step compiles.
"""

import os
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.experimental import multihost_utils

from maxtext.checkpoint.open import Checkpoint
from maxtext.common import progress
from maxtext.common.files import write_text
from maxtext.common.log import LOGGER
from maxtext.configs import serialize
from maxtext.configs.derive import run_folder
from maxtext.configs.provenance import Source
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline import DataStreams
from maxtext.optimizers import build_optimizer
from maxtext.trainers.batch_size import batch_size_at
from maxtext.trainers.build import build_run_context
from maxtext.trainers.checkpointing.init_state import with_reference
from maxtext.trainers.checkpointing.restore import Start, find_start, frozen_checksum
from maxtext.trainers.compilation.aot import StepCache
from maxtext.trainers.data_loader import (
    TrainDataLoader,
    open_eval_streams,
    open_train_streams,
)
from maxtext.trainers.fit_batch import fit_batch
from maxtext.trainers.memory.usage import FreeMemory, check_state, compile_and_check
from maxtext.trainers.methods import method_of
from maxtext.trainers.run_context import RunContext
from maxtext.trainers.step import TrainState
from maxtext.trainers.trainable import select

# Rows of an epoch up to which every epoch is read. They are packed in another order each, so their
# numbers of rows may differ; of more rows, the first epoch is taken for all.
MAX_ROWS_READ = 10_000


def has_open_end(context: RunContext) -> bool:
    """Whether a run of fine-tuning has as many steps as its data gives."""
    config = context.config
    is_endless = config.dataset_type.value == "synthetic" or config.reuse_example_batch
    return (
        config.source("steps").kind == "default" and context.row_format.has_masks and not is_endless
    )


def with_steps_of_epochs(context: RunContext) -> RunContext:
    """The run with `steps` set to the number of batches in num_epoch epochs of its data."""
    with progress.working("counting the steps of the data"):
        steps = count_steps(context)
    config = context.config
    LOGGER.info("num_epoch=%d of the data is %d steps", config.num_epoch, steps)
    bounded = config.model_copy(update={"steps": steps})
    bounded._sources = config._sources | {"steps": Source("derived", "num_epoch")}
    optimizer = build_optimizer(bounded, select(context.template.axes, context.trained))
    return replace(context.with_config(bounded), optimizer=optimizer)


def count_steps(context: RunContext) -> int:
    config = context.config
    rows, steps = count_batches(context, epochs=1)
    if config.num_epoch > 1 and rows <= MAX_ROWS_READ:
        _, steps = count_batches(context, config.num_epoch)
    elif config.num_epoch > 1:
        steps = steps_of_rows(config, rows * config.num_epoch)
    if jax.process_count() > 1:
        steps = int(multihost_utils.process_allgather(np.array(steps)).min())
    return min(steps, config.steps)


def count_batches(context: RunContext, epochs: int) -> tuple[int, int]:
    """The rows and the batches of the first epochs, at most `steps` batches."""
    config = context.config.model_copy(update={"num_epoch": epochs})
    streams = open_train_streams(context.with_config(config))
    rows = steps = 0
    try:
        while steps < config.steps and next(streams, None) is not None:
            rows += batch_size_at(config, steps)
            steps += 1
    finally:
        streams.close()
    return rows, steps


def steps_of_rows(config: MaxTextConfig, rows: int) -> int:
    """The number of full batches."""
    steps = 0
    while rows >= batch_size_at(config, steps):
        rows -= batch_size_at(config, steps)
        steps += 1
    return steps


@dataclass(frozen=True)
class InitialState:
    """`frozen_checksum`: of the weights that a checkpoint leaves out, if there are any."""

    state: TrainState
    key: jax.Array
    frozen_checksum: int | None


@dataclass(frozen=True)
class RunSetup:
    context: RunContext
    checkpoint: Checkpoint | None
    free_memory: FreeMemory
    data_loader: TrainDataLoader
    eval_streams: DataStreams | None
    start: Start
    step_cache: StepCache

    @classmethod
    def open(cls, config: MaxTextConfig, checkpoint: Checkpoint | None) -> "RunSetup":
        """Open the data and find the checkpoint to start from. Raises UserError if the run cannot
        be started."""
        context = build_run_context(config)
        context.shardings.check()
        check_state(context, free_memory := FreeMemory.measure())
        if (fitted := fit_batch(context)) is not None:
            context = build_run_context(fitted)
        if has_open_end(context):
            context = with_steps_of_epochs(context)
        data_loader = method_of(config).data_loader(context)
        eval_streams = open_eval_streams(context.for_evaluation())
        start = find_start(context, data_loader.source, checkpoint)
        return cls(
            context,
            checkpoint,
            free_memory=free_memory,
            data_loader=data_loader,
            eval_streams=eval_streams,
            start=start,
            step_cache=StepCache(context),
        )

    @property
    def is_done(self) -> bool:
        """Whether the run had all its steps already."""
        return self.start.step >= self.context.config.steps

    def compile_first_step(self) -> jax.stages.Compiled:
        """Raises OutOfDeviceMemory if the step needs more memory than is free."""
        rows = batch_size_at(self.context.config, self.start.step)

        def compile_step() -> jax.stages.Compiled:
            LOGGER.info("compiling the train step")
            with progress.working("compiling the train step"):
                prefix = self.data_loader.first_shared_prefix()
                return self.step_cache.get(rows, shared_prefix=prefix)

        return compile_and_check(self.context, self.free_memory, compile_step)

    def load_state(self) -> InitialState:
        """The state to start from. The data loader then adds what the method reads of it."""
        step = self.start.step
        with progress.working("preparing the weights"):
            state, key = self.start.result()
            state = with_reference(self.context, state, step, self.checkpoint)
        checksum = frozen_checksum(self.context, state, self.start)
        self.data_loader.add_fields = method_of(self.context.config).prepare_batches(
            self.context, state, step, self.checkpoint
        )
        return InitialState(state, key, frozen_checksum=checksum)


def write_configuration(config: MaxTextConfig) -> None:
    """Write the resolved configuration to the run's folder, as a file to read and to run again."""
    if config.log_config and jax.process_index() == 0:
        write_text(
            os.path.join(run_folder(config), "config.yml"),
            serialize.yaml_text(config, serialize.KEYS_IN_ORDER),
        )
