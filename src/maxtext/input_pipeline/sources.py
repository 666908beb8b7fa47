"""The registry of data sources.

A new source is one file with a `DataSource` function and `max_data_streams`, and one line in
SOURCES. It is imported when it is used, so that a run on synthetic data does not import the
libraries of the others.
"""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline.interface import (
    Batch,
    BatchIterator,
    ShardSpec,
    Split,
    State,
)
from maxtext.input_pipeline.row_formats import DataSource, RowFormat

if TYPE_CHECKING:
    from maxtext.input_pipeline.pipeline import MixtureComponent

# dataset_type -> module:function of its DataSource
SOURCES = {
    "synthetic": "maxtext.input_pipeline.synthetic:synthetic_source",
    "grain": "maxtext.input_pipeline.grain_source:grain_source",
    "hf": "maxtext.input_pipeline.hf_source:hf_source",
    "tfds": "maxtext.input_pipeline.tfds_source:tfds_source",
    "c4_mlperf": "maxtext.input_pipeline.c4_mlperf:c4_mlperf_source",
    "olmo_grain": "maxtext.input_pipeline.olmo:olmo_source",
}
# Modules with documents of local files or of the user
RANDOM_ACCESS = {
    f"maxtext.input_pipeline.{name}" for name in ("grain_source", "hf_source", "custom")
}
# Any other dataset_type names a function of the user
CUSTOM = "maxtext.input_pipeline.custom:custom_source"


def make_iterator(
    config: MaxTextConfig, split: Split, row_format: RowFormat, shard: ShardSpec
) -> BatchIterator | None:
    module, name = source_of(config, split, row_format)
    source: DataSource = getattr(module, name)
    iterator = source(config, split, row_format, shard)
    return (
        ReusedBatch(iterator)
        if iterator and config.reuse_example_batch and split is Split.TRAIN
        else iterator
    )


def max_data_streams(config: MaxTextConfig, split: Split, row_format: RowFormat) -> int:
    """The largest number of data streams that leaves each enough documents to shuffle."""
    return source_of(config, split, row_format)[0].max_data_streams(config, split, row_format)


def supports_stream_count(
    config: MaxTextConfig, split: Split, row_format: RowFormat
) -> Callable[[int], bool]:
    """A predicate: whether the documents can be divided over a number of streams at no cost."""
    module = source_of(config, split, row_format)[0]
    if hasattr(module, "supports_stream_count"):
        return module.supports_stream_count(config, split, row_format)
    most = module.max_data_streams(config, split, row_format)
    return lambda count: count <= most


def load_components(
    config: MaxTextConfig, split: Split, row_format: RowFormat
) -> "list[MixtureComponent]":
    """The documents of a source whose documents can be read in any order, or none."""
    module = source_of(config, split, row_format)[0]
    return (
        module.load_components(config, split, row_format)
        if module.__name__ in RANDOM_ACCESS
        else []
    )


def source_of(config: MaxTextConfig, split: Split, row_format: RowFormat) -> tuple[ModuleType, str]:
    """The module of the configured source, and the name of its function."""
    source = SOURCES.get(config.dataset_type.value, CUSTOM)
    if row_format.train_source and split is Split.TRAIN:
        source = row_format.train_source
    module, _, function = source.partition(":")
    return importlib.import_module(module), function


class ReusedBatch(BatchIterator):
    def __init__(self, iterator: BatchIterator):
        self.iterator = iterator
        self.state = iterator.get_state()
        self.batch: Batch | None = None

    def __next__(self) -> Batch:
        if self.batch is None:
            self.batch = next(self.iterator)
        # The fields are shared, the dict is not: a consumer may add to it.
        return dict(self.batch)

    def get_state(self) -> State:
        return self.state

    def set_state(self, state: State) -> None:
        self.iterator.set_state(state)
        self.state, self.batch = state, None

    def reset(self) -> None:
        self.iterator.reset()
        self.state, self.batch = self.iterator.get_state(), None

    def close(self) -> None:
        self.iterator.close()
