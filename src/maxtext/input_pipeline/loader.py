"""Opens the data streams of a run: how many there are, how many rows each loads at a time, and in
which process.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from maxtext.common.log import LOGGER
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline.data_streams import DataStreams, choose_stream_count
from maxtext.input_pipeline.interface import BatchIterator, ShardSpec, Split, keeps_last
from maxtext.input_pipeline.row_formats import RowFormat
from maxtext.input_pipeline.sources import supports_stream_count
from maxtext.input_pipeline.workers import data_stream_factory

# Least size of the batches that a stream loads: large messages from worker processes are cheaper
MIN_LOADED_TOKENS, MAX_LOADED_ROWS = 2**14, 32


class NoData(Exception):
    """The configuration names no evaluation data."""


def open_data_streams(
    config: MaxTextConfig,
    split: Split,
    row_format: RowFormat,
    rows: Callable[[int], int],
    sizes: Sequence[int],
    local_rows: Callable[[int], np.ndarray] | None = None,
    processes: int = 1,
) -> DataStreams | None:
    """The batches of `split`, or None if the configuration names no evaluation data.

    `rows(step)` is the global batch size of a step, one of `sizes`, the full one last. This process
    yields the rows `local_rows(size)` of each batch.
    """
    open_stream = data_stream_factory(config, split, row_format)
    keep_last = keeps_last(config, split)
    full = sizes[-1]

    def make(index: int, count: int, local_streams: int, full_window: bool) -> BatchIterator:
        min_rows = max(full // count, 1)
        loaded = max(min_rows, min(MIN_LOADED_TOKENS // config.max_target_length, MAX_LOADED_ROWS))
        loaded = min_rows if config.reuse_example_batch else loaded
        iterator = open_stream(
            ShardSpec(
                rows=loaded,
                index=index,
                count=count,
                local_streams=local_streams,
                min_rows=1 if keep_last else min_rows,
                full_window=full_window,
            )
        )
        if iterator is None:
            raise NoData
        return iterator

    try:
        count = data_streams(config, split, row_format, sizes)
        if processes > count:
            LOGGER.info(
                "%d processes read %d data streams, so some read the same: data_streams=%d gives "
                "each its own, with other batches",
                processes,
                count,
                processes,
            )
        return DataStreams(
            make,
            count,
            rows,
            sizes,
            local_rows=local_rows,
            pad=keep_last,
            single_process=processes == 1,
        )
    except NoData:
        return None


def data_streams(
    config: MaxTextConfig, split: Split, row_format: RowFormat, sizes: Sequence[int]
) -> int:
    """The number of data streams of a run: data_streams, or what fits the batch and the data. It
    must not depend on devices, processes or workers, since every batch depends on it.
    """
    if config.data_streams > 0:
        return config.data_streams
    rows = math.gcd(*sizes)
    supports = supports_stream_count(config, split, row_format) if rows > 1 else bool
    return choose_stream_count(rows, supports, config.grain_use_elastic_iterator)
