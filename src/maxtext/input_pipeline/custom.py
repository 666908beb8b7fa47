"""dataset_type=package.module:function: a source of the user's own.

The function gets the configuration and the split ("train" or "eval") and returns the documents: anything with a length
and an index, whose items are records such as {"text": "..."} with the columns of train_data_columns. Order, epochs,
tokens, packing, streams and exact resume are the pipeline's. None: there is no evaluation data.
The items are read by several threads at once. With worker processes the function is called in each of them.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from maxtext.common.errors import ConfigError
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline.formats import BadRecord, Record
from maxtext.input_pipeline.interface import BatchIterator, Share, Split
from maxtext.input_pipeline.pipeline import Part, document_batches, most_streams_of

TYPICAL_BYTES = 4096  # of a document, for which only the user's function knows


class CustomDocuments:
    """The interface of file formats around a sequence of records."""

    blocks: np.ndarray | None = None
    sizes: np.ndarray | None = None

    def __init__(self, name: str, records: Sequence[Record]):
        self.name, self.records = name, records
        self.nbytes = self.decoded = TYPICAL_BYTES * len(records)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Record:
        record = self.records[index]
        if not isinstance(record, dict):
            raise BadRecord(*self.where(index), f"is {type(record).__name__} instead of a record of columns")
        return record

    def where(self, index: int) -> tuple[str, str]:
        return self.name, f"record {index}"

    def columns(self) -> list[str] | None:
        return None


def custom_source(config: MaxTextConfig, split: Split, share: Share) -> BatchIterator | None:
    documents = documents_of(config, split)
    if documents is None:
        return None
    return document_batches(config, split, share, [Part(documents)], "dataset_type")


def most_streams(config: MaxTextConfig, split: Split) -> int:
    documents = documents_of(config, split)
    return most_streams_of([Part(documents)]) if documents else 1


def documents_of(config: MaxTextConfig, split: Split) -> CustomDocuments | None:
    name = config.dataset_type.value
    records = named_function(name)(config, split.value)
    if records is None and split is Split.EVAL:
        return None
    if not (hasattr(records, "__len__") and hasattr(records, "__getitem__")) or not len(records):
        raise ConfigError(
            f"dataset_type={name} returned {type(records).__name__} for {split.value}: it should return documents, "
            "with a length above 0 and an index"
        )
    return CustomDocuments(name, records)


def named_function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"dataset_type={name} cannot be imported: {error}") from error
    if not callable(found):
        raise ConfigError(f"dataset_type={name} is {type(found).__name__} and no function")
    return found
