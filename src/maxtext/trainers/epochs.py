"""The number of steps of a fine-tuning run that `steps` does not bound: as many as num_epoch epochs
of its rows fill.

How many rows there are is known only after they are tokenized, filtered and packed, so the data is
read once before training. The learning-rate schedule then ends where the data does.
"""

from dataclasses import replace

import jax
import numpy as np
from jax.experimental import multihost_utils

from maxtext.common import progress
from maxtext.common.log import LOGGER
from maxtext.configs.provenance import Source
from maxtext.configs.types import MaxTextConfig
from maxtext.optimizers import build_optimizer
from maxtext.trainers.batch_size import batch_size_at
from maxtext.trainers.data_loader import open_train_streams
from maxtext.trainers.run_context import RunContext
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
