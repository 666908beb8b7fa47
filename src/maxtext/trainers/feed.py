"""Batches from the streams of the data to the devices, for one process or many.

In a run of several processes each batch carries a vote of every process: GO_ON, STOP (it was asked to stop, and will
after the steps that are on their way) or ENDED (it has no data for this step, which then changes nothing). The step
reports the strongest, so that all processes leave the loop after the same step without talking to each other besides.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import jax
import numpy as np
from jax.experimental import multihost_utils

from maxtext.common.errors import ConfigError
from maxtext.input_pipeline import (
    Batch,
    BatchIterator,
    Share,
    Split,
    Streams,
    make_eval_iterator,
    make_train_iterator,
    most_streams,
    prefetch,
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
            if jax.process_count() == 1 or self.last is None:
                raise
            vote = ENDED
        batch = on_devices(self.setup, self.last, self.streams)
        return batch if jax.process_count() == 1 else batch | {"vote": self.setup.on_all_devices(vote)}

    def close(self) -> None:
        self.source.close()


class EvaluationFeed:
    """All batches of one evaluation, from the first, each time it is called."""

    def __init__(self, setup: Setup, streams: Streams):
        self.setup, self.streams = setup, streams

    def __call__(self) -> Iterator[dict[str, jax.Array]]:
        self.streams.reset()
        last: Batch | None = None
        while True:
            batch = next(self.streams, None)
            # Evaluation is rare enough to ask everybody, and a process without data gives padding to those that have.
            if jax.process_count() > 1 and not multihost_utils.process_allgather(np.array(batch is not None)).any():
                return
            if batch is None:
                if jax.process_count() == 1 or last is None:
                    return
                batch = {name: np.zeros_like(field) for name, field in last.items()}
            last = batch
            yield on_devices(self.setup, batch, self.streams)


def on_devices(setup: Setup, batch: Batch, streams: Streams) -> dict[str, jax.Array]:
    return setup.to_devices(batch, tuple(streams.streams), streams.count)


def train_streams(setup: Setup) -> Streams:
    config = setup.config
    loaded, sizes = config.global_batch_size_to_load, row_counts(config)

    def make(wanted: Callable[[int], Collection[int]], number: int, count: int) -> BatchIterator:
        check_streams(count, [loaded, *sizes])
        share = Share(loaded // count, number, count, len(wanted(count)))
        return Rebatch(make_train_iterator(config, share), lambda step: rows_at(config, step) // count)

    return open_streams(setup, Split.TRAIN, loaded, sizes, make, pad=False)


def eval_streams(setup: Setup) -> Streams | None:
    config = setup.config
    if config.eval_interval <= 0:
        return None
    if config.eval_steps <= 0 and config.dataset_type.value == "synthetic":
        raise ConfigError("eval_steps=-1 takes all evaluation data, and synthetic data never ends: set eval_steps")
    loaded, rows = config.global_batch_size_to_load_eval, config.global_batch_size_to_eval_on

    def make(wanted: Callable[[int], Collection[int]], number: int, count: int) -> BatchIterator:
        iterator = make_eval_iterator(config, Share(loaded // count, number, count, len(wanted(count))))
        if iterator is None:
            raise ConfigError(f"eval_interval={config.eval_interval} needs evaluation data: set grain_eval_files")
        return Rebatch(iterator, lambda step: rows // count, keep_last=True)

    return open_streams(setup, Split.EVAL, loaded, [rows], make, pad=True)


def open_streams(
    setup: Setup, split: Split, loaded: int, sizes: Sequence[int], make: Callable[..., BatchIterator], pad: bool
) -> Streams:
    wanted = partial(streams_here, setup, sizes)
    return Streams(partial(make, wanted), stream_count(setup, split, [loaded, *sizes]), wanted, pad)


def stream_count(setup: Setup, split: Split, sizes: Sequence[int]) -> int:
    """One for each part of the batch that devices hold, if the data can be dealt out so far."""
    blocks = len({start for start, _ in row_blocks(setup, sizes[-1], everywhere=True)})
    count = math.gcd(blocks, *sizes)
    if count == 1:
        return 1
    most = most_streams(setup.config, split)
    return max(number for number in range(1, count + 1) if count % number == 0 and number <= most)


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
        for number in range(start * count // rows, -(-stop * count // rows))
    }


def row_blocks(setup: Setup, rows: int, everywhere: bool = False) -> set[tuple[int, int]]:
    """(start, stop) of the rows that a device holds, for the devices of this process or of all."""
    shape = (rows, setup.config.max_target_length)
    sharding = setup.batch_sharding(shape)
    places = sharding.devices_indices_map(shape) if everywhere else sharding.addressable_devices_indices_map(shape)
    return {index[0].indices(rows)[:2] for index in places.values()}
