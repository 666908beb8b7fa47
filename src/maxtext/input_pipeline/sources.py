"""The registry of data sources, and the two doors of this room: make_train_iterator and make_eval_iterator.

A new source is one file with a function of the `Source` shape, and one line in SOURCES. It is imported when it is used:
a run on synthetic data does not wait for the libraries of the others.
"""

import importlib

from maxtext.common.errors import ConfigError
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline.interface import BatchIterator, Share, Source, Split
from maxtext.input_pipeline.reuse import ReusedBatch

# value of dataset_type -> module:function that makes its batches
SOURCES = {
    "synthetic": "maxtext.input_pipeline.synthetic:synthetic_source",
    "grain": "maxtext.input_pipeline.grain_source:grain_source",
}


def make_train_iterator(config: MaxTextConfig) -> BatchIterator:
    """This process's rows of every training batch."""
    iterator = make_iterator(config, Split.TRAIN, share_of_this_process(config.global_batch_size_to_load))
    assert iterator is not None, "a source has training data, or says what is missing"
    return ReusedBatch(iterator) if config.reuse_example_batch else iterator


def make_eval_iterator(config: MaxTextConfig) -> BatchIterator | None:
    """This process's rows of every evaluation batch; None when no evaluation data is named."""
    return make_iterator(config, Split.EVAL, share_of_this_process(config.global_batch_size_to_load_eval))


def make_iterator(config: MaxTextConfig, split: Split, share: Share) -> BatchIterator | None:
    name = config.dataset_type.value
    if name not in SOURCES:
        raise ConfigError(
            f"dataset_type={name}: this version reads {' and '.join(sorted(SOURCES))}, choose one of them"
        )
    module, _, function = SOURCES[name].partition(":")
    source: Source = getattr(importlib.import_module(module), function)
    return source(config, split, share)


def share_of_this_process(batch_size: int | None) -> Share:
    import jax  # here, so that the rest of the room can be used without starting a back end

    assert batch_size is not None, "a loaded configuration has its batch sizes"
    index, count = jax.process_index(), jax.process_count()
    if batch_size % count:
        raise ConfigError(
            f"a batch of {batch_size} sequences does not divide over {count} processes: change per_device_batch_size"
        )
    return Share(batch_size // count, index, count)
