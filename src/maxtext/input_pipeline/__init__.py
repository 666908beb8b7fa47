"""Level 4: batches of token ids from any source, with a position that can be saved.

interface: what a batch and its iterator are · sources: the registry of dataset_type · synthetic:
random tokens · grain_source, hf_source, tfds_source, c4_mlperf, custom: where documents are
(formats/: files as records), then pipeline (order, mixing → loading, encode → sequences → packing →
grain_batches) · olmo: rows of tokens · streams: batches dealt from data streams, whoever loads them
· loader: the data streams of a run · workers: streams in other processes (programs) · prefetch:
prefetch · prepare, shards: tokens written ahead of training.
"""

from maxtext.input_pipeline.data_streams import DataStreams, choose_stream_count, merge_states
from maxtext.input_pipeline.interface import (
    FIELDS,
    Batch,
    BatchIterator,
    DataSource,
    ShardSpec,
    Split,
)
from maxtext.input_pipeline.loader import open_data_streams
from maxtext.input_pipeline.prefetch import prefetch
from maxtext.input_pipeline.sources import (
    SOURCES,
    make_eval_iterator,
    make_train_iterator,
    max_data_streams,
)
from maxtext.input_pipeline.workers import data_stream_factory, worker_count

__all__ = [
    "FIELDS",
    "SOURCES",
    "Batch",
    "BatchIterator",
    "DataSource",
    "DataStreams",
    "ShardSpec",
    "Split",
    "choose_stream_count",
    "data_stream_factory",
    "make_eval_iterator",
    "make_train_iterator",
    "max_data_streams",
    "merge_states",
    "open_data_streams",
    "prefetch",
    "worker_count",
]
