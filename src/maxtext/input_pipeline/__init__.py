"""Level 4: batches of token ids from any source, with a position that can be saved.

interface: what a batch and its iterator are · sources: the registry of dataset_type · synthetic:
random tokens · grain_source, hf_source, tfds_source, c4_mlperf, custom: where documents are
(formats/: files as records), then pipeline (order, mixing → loading, encode → sequences → packing →
grain_batches) · olmo: rows of tokens · streams: batches dealt from data streams, whoever loads them
· loader: the data streams of a run · workers: streams in other processes (programs) · prefetch:
prefetch · prepare, shards: tokens written ahead of training.
"""

from maxtext.input_pipeline.interface import FIELDS, Batch, BatchIterator, ShardSpec, Source, Split
from maxtext.input_pipeline.loader import open_streams
from maxtext.input_pipeline.prefetch import prefetch
from maxtext.input_pipeline.sources import (
    SOURCES,
    make_eval_iterator,
    make_train_iterator,
    most_streams,
)
from maxtext.input_pipeline.streams import Streams, join_states, stream_count
from maxtext.input_pipeline.workers import stream_opener, worker_count

__all__ = [
    "FIELDS",
    "SOURCES",
    "Batch",
    "BatchIterator",
    "ShardSpec",
    "Source",
    "Split",
    "Streams",
    "join_states",
    "make_eval_iterator",
    "make_train_iterator",
    "most_streams",
    "open_streams",
    "prefetch",
    "stream_count",
    "stream_opener",
    "worker_count",
]
