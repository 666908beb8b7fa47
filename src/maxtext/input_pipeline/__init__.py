"""Level 4: batches of token ids from any source, with a position that can be saved.

interface: what a batch and its iterator are · sources: the registry of dataset_type · synthetic: random tokens ·
grain_source: text files through Grain (text_files → sequences → packing → grain_batches) · streams: a batch from
several iterators, whoever loads them · background: prefetch.
"""

from maxtext.input_pipeline.background import prefetch
from maxtext.input_pipeline.interface import FIELDS, Batch, BatchIterator, Share, Source, Split
from maxtext.input_pipeline.sources import SOURCES, make_eval_iterator, make_train_iterator, most_streams
from maxtext.input_pipeline.streams import Streams, join_states

__all__ = [
    "FIELDS",
    "SOURCES",
    "Batch",
    "BatchIterator",
    "Share",
    "Source",
    "Split",
    "Streams",
    "join_states",
    "make_eval_iterator",
    "make_train_iterator",
    "most_streams",
    "prefetch",
]
