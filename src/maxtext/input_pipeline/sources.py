"""The registry of data sources, and the entry points make_train_iterator and make_eval_iterator.

A new source is one file with a `DataSource` function and `max_data_streams`, and one line in
SOURCES. It is imported when it is used, so that a run on synthetic data does not import the
libraries of the others.
"""

import importlib
from collections.abc import Callable
from typing import Any

from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline.interface import BatchIterator, DataSource, ShardSpec, Split
from maxtext.input_pipeline.reuse_batch import ReusedBatch

# dataset_type -> module:function of its DataSource
SOURCES = {
    "synthetic": "maxtext.input_pipeline.synthetic:synthetic_source",
    "grain": "maxtext.input_pipeline.grain_source:grain_source",
    "hf": "maxtext.input_pipeline.hf_source:hf_source",
    "tfds": "maxtext.input_pipeline.tfds_source:tfds_source",
    "c4_mlperf": "maxtext.input_pipeline.c4_mlperf:c4_mlperf_source",
    "olmo_grain": "maxtext.input_pipeline.olmo:olmo_source",
}
# Any other dataset_type names a function of the user
TEACHER_LOGITS = "maxtext.input_pipeline.teacher_logits:teacher_logits_source"
CUSTOM = "maxtext.input_pipeline.custom:custom_source"


def make_train_iterator(config: MaxTextConfig, shard: ShardSpec | None = None) -> BatchIterator:
    """The training batches, or one shard of them."""
    iterator = make_iterator(
        config, Split.TRAIN, shard or ShardSpec(config.global_batch_size_to_load)
    )
    assert iterator is not None, "a source has training data, or says what is missing"
    return iterator


def make_eval_iterator(
    config: MaxTextConfig, shard: ShardSpec | None = None
) -> BatchIterator | None:
    """The evaluation batches, or one shard of them; None if no evaluation data is configured."""
    return make_iterator(
        config, Split.EVAL, shard or ShardSpec(config.global_batch_size_to_load_eval)
    )


def make_iterator(config: MaxTextConfig, split: Split, shard: ShardSpec) -> BatchIterator | None:
    module, name = source_of(config, split)
    source: DataSource = getattr(module, name)
    iterator = source(config, split, shard)
    return (
        ReusedBatch(iterator)
        if iterator and config.reuse_example_batch and split is Split.TRAIN
        else iterator
    )


def max_data_streams(config: MaxTextConfig, split: Split) -> int:
    """The largest number of data streams that leaves each enough documents to shuffle."""
    return source_of(config, split)[0].max_data_streams(config, split)


def supports_stream_count(config: MaxTextConfig, split: Split) -> Callable[[int], bool]:
    """A predicate: whether the documents can be divided over a number of streams at no cost."""
    module = source_of(config, split)[0]
    if hasattr(module, "supports_stream_count"):
        return module.supports_stream_count(config, split)
    most = module.max_data_streams(config, split)
    return lambda count: count <= most


def source_of(config: MaxTextConfig, split: Split) -> tuple[Any, str]:
    """The module of the configured source, and the name of its function. The logits of a teacher
    (offline_data_dir) replace the training data of dataset_type."""
    source = SOURCES.get(config.dataset_type.value, CUSTOM)
    if config.offline_data_dir and split is Split.TRAIN:
        source = TEACHER_LOGITS
    module, _, function = source.partition(":")
    return importlib.import_module(module), function
