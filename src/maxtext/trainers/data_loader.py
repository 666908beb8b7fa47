"""Batches from the data streams to the devices, for one process or many.

`TrainDataLoader` returns the batch of each step. In a run of several processes it carries a stop
flag from every process: CONTINUE, STOP (it was asked to stop, and will after the steps that are
dispatched) or DATA_ENDED (it has no data for this step, which then changes nothing). The step
all-reduces the flags with max and returns the result with its metrics, so all processes leave the
loop after the same step without any other communication.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding

from maxtext.common.errors import ConfigError
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline import Batch, DataStreams, Split, open_data_streams, prefetch
from maxtext.trainers.batch_size import batch_size_at
from maxtext.trainers.model_losses import token_order
from maxtext.trainers.run_context import RunContext
from maxtext.trainers.step import STOP_FLAG, StopFlag

PREFETCHED_BATCHES = 2  # on the host
AddFields = Callable[[Batch], Batch]


class DeviceBatch(NamedTuple):
    """`max_segments`: the most segments of a row, counted on the host over the rows of this
    process. `shared_prefix`: the tokens that the rows of a group of rollouts begin with, and that
    the step computes once."""

    fields: dict[str, jax.Array]
    max_segments: int
    shared_prefix: int = 0


class TrainDataLoader:
    """The batch of each step. `source` holds the position in the data."""

    def __init__(self, context: RunContext):
        self.context = context
        self.streams = open_train_streams(context)
        self.source = prefetch(self.streams, PREFETCHED_BATCHES)
        self.stop_requested = False
        self.host_batch: Batch | None = None  # the last one
        self.add_fields: AddFields = lambda batch: batch  # to each batch of the data

    def __iter__(self) -> Iterator[DeviceBatch]:
        return self

    def __next__(self) -> DeviceBatch:
        config = self.context.config
        flag = StopFlag.STOP if self.stop_requested else StopFlag.CONTINUE
        try:
            self.host_batch = self.add_fields(next(self.source))
        except StopIteration:
            if jax.process_count() == 1:
                raise
            flag = StopFlag.DATA_ENDED
            # Other processes run this step, so this one must too. It changes nothing, so any batch
            # of the right size will do.
            self.host_batch = self.host_batch or padding_batch(
                self.context, self.streams, batch_size_at(config, 0)
            )
        batch = self.to_device(self.host_batch)
        if jax.process_count() > 1:
            batch.fields[STOP_FLAG] = fill_per_device(self.context, flag)
        return batch

    def to_device(self, batch: Batch) -> DeviceBatch:
        full_rows = self.context.config.global_batch_size_to_train_on
        fields = shard_batch(self.context, batch, self.streams, full_rows)
        return DeviceBatch(fields, max_segments(batch))

    def first_shared_prefix(self) -> int:
        """The tokens that the rows of a group share in the first step."""
        return 0

    def request_stop(self) -> bool:
        """Ask all processes to stop, by the flag of the next batch. False if this process is the
        only one: it need not wait for the others."""
        self.stop_requested = True
        return jax.process_count() > 1

    def close(self) -> None:
        self.source.close()


class EvalDataLoader:
    """Each call returns all batches of one evaluation, from the first. `add_fields` is called with
    each batch of the data."""

    def __init__(self, context: RunContext, streams: DataStreams, add_fields: AddFields):
        self.context = context
        self.streams = streams
        self.add_fields = add_fields

    def __call__(self) -> Iterator[dict[str, jax.Array]]:
        config = self.context.config
        rows = config.global_batch_size_to_eval_on
        self.streams.reset()
        # Processes must agree on the number of steps: it is given, or they ask each other before
        # each step whether any has data left.
        has_fixed_steps = config.generate_padding_batch_eval and config.eval_steps > 0
        for step in itertools.count():
            if has_fixed_steps and step == config.eval_steps:
                return
            batch = next(self.streams, None)
            # An empty batch: another process reads the rows of this one.
            if not has_fixed_steps and not any_process(bool(batch)):
                return
            if batch:
                batch = self.add_fields(batch)
            batch = batch or padding_batch(self.context, self.streams, rows, is_training=False)
            yield shard_batch(self.context, batch, self.streams, rows)


def max_segments(batch: Batch) -> int:
    """The most segments of a row, at least 1. Padding before or between segments counts as one;
    a program for n segments has one more: the padding, or the last segment of a full row.
    """
    segment_ids = batch.get("inputs_segmentation")
    if segment_ids is None:
        return 1
    boundaries = (segment_ids[:, 1:] != segment_ids[:, :-1]).sum(axis=1).max(initial=0)
    return max(int(boundaries), 1)


def any_process(flag: bool) -> bool:
    """Whether the flag is true in any process. It blocks, so it is for evaluation only."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.array(flag)).any())


def padding_batch(
    context: RunContext, streams: DataStreams, rows: int, is_training: bool = True
) -> Batch:
    """The part of a padding batch of `rows` rows that this process holds."""
    return padding_fields(context, len(streams.local_rows(rows)), is_training)


def padding_fields(context: RunContext, rows: int, is_training: bool) -> Batch:
    fields = context.abstract_batch(1, is_training)
    return {name: np.zeros((rows, *field.shape[1:]), field.dtype) for name, field in fields.items()}


def open_train_streams(context: RunContext) -> DataStreams:
    config = context.config
    batches = context.batches
    streams = open_data_streams(
        config,
        Split.TRAIN,
        context.row_format,
        rows=partial(batches.rows_to_read, config),
        sizes=batches.sizes_to_read(config),
        local_rows=partial(rows_to_read, context),
        processes=jax.process_count(),
    )
    assert streams is not None, "a source has training data, or says what is missing"
    return streams


def open_eval_streams(context: RunContext) -> DataStreams | None:
    """None if evaluation is off. Raises ConfigError if it has no data, or data without an end."""
    config = context.config
    if config.eval_interval <= 0 or not context.has_eval_loss:
        return None
    if config.eval_steps <= 0 and config.dataset_type.value == "synthetic":
        raise ConfigError(
            "eval_steps=-1 takes all evaluation data, and synthetic data never ends: set eval_steps"
        )
    rows = config.global_batch_size_to_eval_on
    streams = open_data_streams(
        config,
        Split.EVAL,
        context.row_format,
        rows=lambda step: rows,
        sizes=[rows],
        local_rows=partial(rows_to_read, context),
        processes=jax.process_count(),
    )
    if streams is None:
        raise ConfigError(
            f"eval_interval={config.eval_interval} needs evaluation data: {eval_data_hint(config)}"
        )
    return streams


def eval_data_hint(config: MaxTextConfig) -> str:
    hints = {"grain": "set grain_eval_files", "hf": "set hf_eval_split or hf_eval_files"}
    dataset_type = config.dataset_type.value
    return hints.get(dataset_type, f"dataset_type={dataset_type} has none")


def processes_per_reader(config: MaxTextConfig) -> int:
    """The number of processes whose rows a reading process loads (expansion_factor_real_data)."""
    return round(max(config.expansion_factor_real_data, 1))


def rows_to_read(context: RunContext, rows: int) -> np.ndarray:
    """Sorted indices of the rows of a batch that this process reads: those of its own devices, and
    with expansion_factor_real_data also those of processes that do not read."""
    loaded = rows * processes_per_reader(context.config)
    shape = (loaded, context.config.max_target_length)
    slices = context.shardings.batch(shape).addressable_devices_indices_map(shape)
    is_addressable = np.zeros(loaded, bool)
    for index in slices.values():
        assert index is not None, "every device has rows"
        is_addressable[index[0]] = True
    return np.flatnonzero(is_addressable[:rows])


def shard_batch(
    context: RunContext, batch: Batch, streams: DataStreams, full_rows: int
) -> dict[str, jax.Array]:
    """`full_rows`: the rows of the global batch, if this process has none of them."""
    rows = streams.global_rows(batch) or full_rows
    return to_devices(context, batch, streams.local_rows(rows), rows)


def to_devices(
    context: RunContext,
    batch: dict[str, np.ndarray],
    local_rows: np.ndarray | None = None,
    rows: int | None = None,
) -> dict[str, jax.Array]:
    """A global batch of `rows` rows, sharded over all devices.

    `local_rows`: sorted indices of the rows in `batch`; None: all. They include every row that a
    device of this process needs, or none if other processes read for it
    (expansion_factor_real_data).
    """
    config = context.config
    if rows is None:
        rows = next(iter(batch.values())).shape[0]
    local_rows = np.arange(rows) if local_rows is None else local_rows
    length = config.max_target_length
    # Only the first rows are read. With expansion_factor_real_data the array is so tall that the
    # first rows are those of the reading processes; the rest is padding and is cut off below.
    num_rows = rows * processes_per_reader(config)
    order = token_order(config)

    def read_shard(field: np.ndarray, index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        start, stop, _ = index[0].indices(num_rows)
        first, last = np.searchsorted(local_rows, (start, min(stop, rows)))
        shard = field[first:last]
        if stop > rows:
            padding = np.zeros((stop - max(start, rows), *field.shape[1:]), field.dtype)
            shard = np.concatenate([shard, padding])
        return shard[(slice(None), *index[1:])]

    def to_array(field: np.ndarray) -> jax.Array:
        if order is not None and field.ndim > 1:
            field = field[:, order.positions(length)]
        shape = (num_rows, *field.shape[1:])
        sharding = context.shardings.batch(shape)
        return jax.make_array_from_callback(shape, sharding, partial(read_shard, field))

    fields = batch or padding_fields(context, 0, is_training=True)
    arrays = {name: to_array(field) for name, field in fields.items()}
    if num_rows == rows:
        return arrays
    return {
        name: redistribute(array, rows, context.shardings.batch((rows, *array.shape[1:])))
        for name, array in arrays.items()
    }


@partial(jax.jit, static_argnums=(1, 2))
def redistribute(field: jax.Array, rows: int, sharding: Sharding) -> jax.Array:
    """The first `rows` rows, from the devices of the reading processes to all."""
    return jax.lax.with_sharding_constraint(field[:rows], sharding)


def fill_per_device(context: RunContext, value: int) -> jax.Array:
    """[devices]: this process's value on each of its devices."""
    array = np.full(1, value, np.int32)
    return jax.make_array_from_callback(
        (context.rules.mesh.size,), context.shardings.one_per_device, lambda index: array
    )
