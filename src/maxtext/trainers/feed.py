"""Batches from the streams of the data to the devices, for one process or many.

In a run of several processes each batch carries a vote of every process: GO_ON, STOP (it was asked to stop, and will
after the steps that are on their way) or ENDED (it has no data for this step, which then changes nothing). The step
reports the strongest, so that all processes leave the loop after the same step without talking to each other besides.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from maxtext.common.errors import ConfigError
from maxtext.input_pipeline import (
    FIELDS,
    Batch,
    BatchIterator,
    Share,
    Split,
    Streams,
    most_streams,
    prefetch,
    stream_count,
    stream_opener,
    worker_count,
)  # fmt: skip
from maxtext.trainers.rows import Rebatch, row_counts, rows_at
from maxtext.trainers.setup import Setup
from maxtext.trainers.step import ENDED, GO_ON, STOP

HOST_BATCHES = 2  # prepared ahead of the device


class TrainFeed:
    """What each step trains on. `source` is the data with its position; `stop`: whether this process was asked to."""

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
            # The others go on to this step too. It changes nothing, so any batch of the right size will do.
            self.last = self.last or padding(self.setup.config, self.streams, rows_at(self.setup.config, 0))
        batch = on_devices(self.setup, self.last, self.streams, self.setup.config.global_batch_size_to_train_on)
        return batch if jax.process_count() == 1 else batch | {"vote": self.setup.on_all_devices(vote)}

    def close(self) -> None:
        self.source.close()


class EvaluationFeed:
    """All batches of one evaluation, from the first, each time it is called."""

    def __init__(self, setup: Setup, streams: Streams):
        self.setup, self.streams = setup, streams

    def __call__(self) -> Iterator[dict[str, jax.Array]]:
        config = self.setup.config
        self.streams.reset()
        # Either a number of steps that all know, or processes ask each other whether somebody has more.
        fixed = config.eval_steps if config.generate_padding_batch_eval and config.eval_steps > 0 else None
        for step in itertools.count():
            if step == fixed:
                return
            batch = next(self.streams, None)
            if fixed is None and not anywhere(batch is not None):
                return
            if batch is None:
                batch = padding(config, self.streams, config.global_batch_size_to_eval_on)
            yield on_devices(self.setup, batch, self.streams, config.global_batch_size_to_eval_on)


def anywhere(here: bool) -> bool:
    """Whether it is so in any process. Only for evaluation, which is rare enough to ask everybody."""
    return here if jax.process_count() == 1 else bool(multihost_utils.process_allgather(np.array(here)).any())


def padding(config: Any, streams: Streams, rows: int) -> Batch:
    """What a process without data gives to those that have some, for a batch of `rows`."""
    shape = (rows // streams.count * len(streams.streams), config.max_target_length)
    return {field: np.zeros(shape, np.int32) for field in FIELDS}


def on_devices(setup: Setup, batch: Batch, streams: Streams, rows: int) -> dict[str, jax.Array]:
    return setup.to_devices(batch, tuple(streams.streams), streams.count, rows if not streams.streams else None)


def train_streams(setup: Setup) -> Streams:
    config = setup.config
    loaded, sizes = config.global_batch_size_to_load, row_counts(config)
    open_stream = stream_opener(config, Split.TRAIN)

    def make(wanted: Callable[[int], Collection[int]], number: int, count: int) -> BatchIterator:
        check_streams(count, [loaded, *sizes])
        iterator = open_stream(Share(loaded // count, number, count, len(wanted(count))))
        assert iterator is not None, "a source has training data, or says what is missing"
        keep_last = config.generate_padding_batch_train
        return Rebatch(iterator, lambda step: rows_at(config, step) // count, keep_last)

    return open_streams(setup, Split.TRAIN, loaded, sizes, make, pad=config.generate_padding_batch_train)


def eval_streams(setup: Setup) -> Streams | None:
    config = setup.config
    if config.eval_interval <= 0:
        return None
    if config.eval_steps <= 0 and config.dataset_type.value == "synthetic":
        raise ConfigError("eval_steps=-1 takes all evaluation data, and synthetic data never ends: set eval_steps")
    loaded, rows = config.global_batch_size_to_load_eval, config.global_batch_size_to_eval_on
    open_stream = stream_opener(config, Split.EVAL)

    def make(wanted: Callable[[int], Collection[int]], number: int, count: int) -> BatchIterator:
        iterator = open_stream(Share(loaded // count, number, count, len(wanted(count))))
        if iterator is None:
            raise ConfigError(f"eval_interval={config.eval_interval} needs evaluation data: {no_data(config)}")
        return Rebatch(iterator, lambda step: rows // count, keep_last=True)

    return open_streams(setup, Split.EVAL, loaded, [rows], make, pad=True)


def no_data(config: Any) -> str:
    keys = {"grain": "set grain_eval_files", "hf": "set hf_eval_split or hf_eval_files"}
    return keys.get(config.dataset_type.value, f"dataset_type={config.dataset_type.value} has none")


def open_streams(
    setup: Setup, split: Split, loaded: int, sizes: Sequence[int], make: Callable[..., BatchIterator], pad: bool
) -> Streams:
    wanted = partial(streams_here, setup, sizes)
    return Streams(partial(make, wanted), streams_for(setup, split, [loaded, *sizes]), wanted, pad)


def streams_for(setup: Setup, split: Split, sizes: Sequence[int]) -> int:
    config = setup.config
    rows = math.gcd(*sizes)
    blocks = math.gcd(rows, len({start for start, _ in row_blocks(setup, sizes[-1], everywhere=True)}))
    workers = worker_count(config, split) * jax.process_count()
    return stream_count(rows, blocks, workers, config.grain_use_elastic_iterator, lambda: most_streams(config, split))


def check_streams(count: int, sizes: Sequence[int]) -> None:
    uneven = [size for size in sizes if size % count]
    if uneven:
        raise ConfigError(
            f"the saved data position has {count} streams, which cannot share a batch of {uneven[0]} sequences: "
            "choose per_device_batch_size as the run began, or start again under a new run_name"
        )


def streams_here(setup: Setup, sizes: Sequence[int], count: int) -> set[int]:
    """The streams that have rows for devices of this process."""
    return {
        number
        for rows in sizes
        for start, stop in row_blocks(setup, rows)
        for number in range(start * count // rows, -(-min(stop, rows) * count // rows))
    }


def row_blocks(setup: Setup, rows: int, everywhere: bool = False) -> set[tuple[int, int]]:
    """(start, stop) of the rows that a device gets from its process, for the devices of this process or of all. Where
    only some processes read, these get the rows of the others too."""
    loaded = rows * setup.readers_of
    shape = (loaded, setup.config.max_target_length)
    sharding = setup.batch_sharding(shape)
    places = sharding.devices_indices_map(shape) if everywhere else sharding.addressable_devices_indices_map(shape)
    blocks = {index[0].indices(loaded)[:2] for index in places.values()}
    return {(start, stop) for start, stop in blocks if start < rows}
