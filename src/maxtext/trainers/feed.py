"""Batches from the data streams to the devices, for one process or many.

In a run of several processes each batch carries a vote of every process: GO_ON, STOP (it was asked
to stop, and will after the steps that are on their way) or ENDED (it has no data for this step,
which then changes nothing). The step reports the strongest, so that all processes leave the loop
after the same step without talking to each other besides.
"""

import itertools
from collections.abc import Iterator
from functools import partial

import jax
import numpy as np
from jax.experimental import multihost_utils

from maxtext.common.errors import ConfigError
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline import FIELDS, Batch, DataStreams, Split, open_data_streams, prefetch
from maxtext.trainers.rows import row_counts, rows_at
from maxtext.trainers.setup import Setup
from maxtext.trainers.step import ENDED, GO_ON, STOP

HOST_BATCHES = 2  # prepared ahead of the device


class TrainFeed:
    """What each step trains on. `source` is the data with its position; `stop`: whether this
    process was asked to.
    """

    def __init__(self, setup: Setup):
        self.setup = setup
        self.streams = train_streams(setup)
        self.source = prefetch(self.streams, HOST_BATCHES)
        self.stop = False
        self.last: Batch | None = None

    def __iter__(self) -> Iterator[dict[str, jax.Array]]:
        return self

    def __next__(self) -> dict[str, jax.Array]:
        vote = STOP if self.stop else GO_ON
        try:
            self.last = next(self.source)
        except StopIteration:
            if jax.process_count() == 1:
                raise
            vote = ENDED
            # The others go on to this step too. It changes nothing, so any batch of the right size
            # will do.
            self.last = self.last or padding(
                self.setup.config, self.streams, rows_at(self.setup.config, 0)
            )
        batch = on_devices(
            self.setup, self.last, self.streams, self.setup.config.global_batch_size_to_train_on
        )
        return (
            batch if jax.process_count() == 1 else batch | {"vote": self.setup.on_all_devices(vote)}
        )

    def close(self) -> None:
        self.source.close()


class EvaluationFeed:
    """All batches of one evaluation, from the first, each time it is called."""

    def __init__(self, setup: Setup, streams: DataStreams):
        self.setup, self.streams = setup, streams

    def __call__(self) -> Iterator[dict[str, jax.Array]]:
        config = self.setup.config
        self.streams.reset()
        # Either a number of steps that all know, or processes ask each other whether somebody has
        # more.
        fixed = (
            config.eval_steps
            if config.generate_padding_batch_eval and config.eval_steps > 0
            else None
        )
        for step in itertools.count():
            if step == fixed:
                return
            batch = next(self.streams, None)
            if fixed is None and not anywhere(
                bool(batch)
            ):  # without fields: another process reads for this one
                return
            if not batch:
                batch = padding(config, self.streams, config.global_batch_size_to_eval_on)
            yield on_devices(self.setup, batch, self.streams, config.global_batch_size_to_eval_on)


def anywhere(here: bool) -> bool:
    """Whether it is so in any process. Only for evaluation, which is rare enough to ask
    everybody.
    """
    return (
        here
        if jax.process_count() == 1
        else bool(multihost_utils.process_allgather(np.array(here)).any())
    )


def padding(config: MaxTextConfig, streams: DataStreams, rows: int) -> Batch:
    """What a process without data gives to those that have some, for a batch of `rows`."""
    shape = (len(streams.local_rows(rows)), config.max_target_length)
    return {field: np.zeros(shape, np.int32) for field in FIELDS}


def on_devices(setup: Setup, batch: Batch, streams: DataStreams, full: int) -> dict[str, jax.Array]:
    """`full`: rows of the batch, if this process has none of them."""
    rows = streams.global_rows(batch) or full
    return setup.to_devices(batch, streams.local_rows(rows), rows)


def train_streams(setup: Setup) -> DataStreams:
    config = setup.config
    streams = open_data_streams(
        config, Split.TRAIN, partial(rows_at, config), row_counts(config), partial(held_rows, setup),
        jax.process_count(),
    )  # fmt: skip
    assert streams is not None, "a source has training data, or says what is missing"
    return streams


def eval_streams(setup: Setup) -> DataStreams | None:
    config = setup.config
    if config.eval_interval <= 0:
        return None
    if config.eval_steps <= 0 and config.dataset_type.value == "synthetic":
        raise ConfigError(
            "eval_steps=-1 takes all evaluation data, and synthetic data never ends: set eval_steps"
        )
    rows = config.global_batch_size_to_eval_on
    streams = open_data_streams(
        config,
        Split.EVAL,
        lambda step: rows,
        [rows],
        partial(held_rows, setup),
        jax.process_count(),
    )
    if streams is None:
        raise ConfigError(
            f"eval_interval={config.eval_interval} needs evaluation data: {no_data(config)}"
        )
    return streams


def no_data(config: MaxTextConfig) -> str:
    keys = {"grain": "set grain_eval_files", "hf": "set hf_eval_split or hf_eval_files"}
    return keys.get(config.dataset_type.value, f"dataset_type={config.dataset_type.value} has none")


def held_rows(setup: Setup, rows: int) -> np.ndarray:
    """Sorted indices of the rows of a batch that devices of this process get from it. Where only
    some processes read, these get the rows of the others too."""
    loaded = rows * setup.readers_of
    shape = (loaded, setup.config.max_target_length)
    places = setup.batch_sharding(shape).addressable_devices_indices_map(shape)
    held = np.zeros(loaded, bool)
    for index in places.values():
        held[index[0]] = True
    return np.flatnonzero(held[:rows])
