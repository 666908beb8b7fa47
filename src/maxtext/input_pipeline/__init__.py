"""Level 4: batches of token ids from any source, with an iterator state that can be saved.

- interface: batches, iterators and ShardSpec; sources: the registry of dataset_type
- synthetic: random tokens; olmo: pre-tokenized shards
- grain_source, hf_source, tfds_source, c4_mlperf, custom: documents (formats/: files as records)
- pipeline: order, mixture → load_documents, encode → sequences → packing → grain_batches
- row_formats: what a row is, handed down by the training method; row_forms, formatting,
  encode_rows: rows of fine-tuning as token ids and masks
- data_streams: batches dealt from data streams; loader: the data streams of a run
- workers: data streams in other processes (subprocesses); prefetch: batches ahead of the device
- prepare, write_shards: documents tokenized before training
"""

from maxtext.input_pipeline.data_streams import DataStreams, choose_stream_count, merge_states
from maxtext.input_pipeline.interface import (
    FIELDS,
    Batch,
    BatchIterator,
    ShardSpec,
    Split,
)
from maxtext.input_pipeline.loader import open_data_streams
from maxtext.input_pipeline.row_formats import DataSource, RowFormat
from maxtext.input_pipeline.sources import (
    SOURCES,
    max_data_streams,
)
from maxtext.input_pipeline.workers import data_stream_factory, prefetch, worker_count

__all__ = [
    "FIELDS",
    "SOURCES",
    "Batch",
    "BatchIterator",
    "DataSource",
    "DataStreams",
    "RowFormat",
    "ShardSpec",
    "Split",
    "choose_stream_count",
    "data_stream_factory",
    "max_data_streams",
    "merge_states",
    "open_data_streams",
    "prefetch",
    "worker_count",
]
