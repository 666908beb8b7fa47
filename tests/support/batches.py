"""Batches of a configuration, in the row format of its training method."""

from collections.abc import Callable, Sequence
from typing import Any

from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline import BatchIterator, DataStreams, ShardSpec, Split, truncation
from maxtext.input_pipeline import data_stream_factory as stream_factory
from maxtext.input_pipeline import open_data_streams as open_streams
from maxtext.input_pipeline.row_formats import RowFormat
from maxtext.input_pipeline.sources import make_iterator as make_source_iterator
from maxtext.trainers.methods import method_of


def row_format(config: MaxTextConfig) -> RowFormat:
    return method_of(config).row_format(config)


def batch_fields(config: MaxTextConfig) -> tuple[str, ...]:
    return row_format(config).fields


def make_iterator(config: MaxTextConfig, split: Split, shard: ShardSpec) -> BatchIterator | None:
    return make_source_iterator(config, split, row_format(config), shard)


def make_train_iterator(config: MaxTextConfig, shard: ShardSpec | None = None) -> Any:
    return make_iterator(config, Split.TRAIN, shard or ShardSpec(config.global_batch_size_to_load))


def make_eval_iterator(config: MaxTextConfig, shard: ShardSpec | None = None) -> Any:
    rows = config.global_batch_size_to_load_eval
    return make_iterator(config, Split.EVAL, shard or ShardSpec(rows))


def open_data_streams(
    config: MaxTextConfig,
    split: Split,
    rows: Callable[[int], int],
    sizes: Sequence[int],
    *more: Any,
) -> DataStreams | None:
    return open_streams(config, split, row_format(config), rows, sizes, *more)


def data_stream_factory(config: MaxTextConfig, split: Split) -> Any:
    return stream_factory(config, split, row_format(config))


def truncated_share(config: MaxTextConfig) -> float | None:
    return truncation.truncated_share(config, row_format(config))
