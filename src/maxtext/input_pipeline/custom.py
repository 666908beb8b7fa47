"""dataset_type=package.module:function: a data source that the user defines.

The function takes the configuration and the split ("train" or "eval") and returns a sequence of
documents: records such as {"text": "..."} with the columns of train_data_columns, or None if there
is no evaluation data. The pipeline does the rest: order, epochs, tokenization, packing, data
streams and exact resume. Several threads read the documents at once. With worker processes, the
function is called in each of them.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from maxtext.common.errors import ConfigError, UserError
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline.formats import BadRecord, Record
from maxtext.input_pipeline.interface import BatchIterator, ShardSpec, Split
from maxtext.input_pipeline.pipeline import MixtureComponent, document_batches, max_streams_of
from maxtext.input_pipeline.row_formats import RowFormat
from maxtext.input_pipeline.user_code import failure, traceback_of

TYPICAL_BYTES = 4096  # assumed size of a document


class CustomDocuments:
    """A sequence of records as a RecordSource."""

    blocks: np.ndarray | None = None
    sizes: np.ndarray | None = None

    def __init__(self, name: str, records: Sequence[Record]):
        self.name = name
        self.records = records
        self.nbytes = self.decoded = TYPICAL_BYTES * len(records)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Record:
        try:
            record = self.records[index]
        except (UserError, BadRecord):
            raise
        except Exception as error:  # the user's code may raise anything
            bad = BadRecord(*self.where(index), f"cannot be read: {type(error).__name__}: {error}")
            bad.details = traceback_of(error)
            raise bad from error
        if not isinstance(record, dict):
            raise BadRecord(
                *self.where(index), f"is {type(record).__name__} instead of a record of columns"
            )
        return record

    def where(self, index: int) -> tuple[str, str]:
        return self.name, f"record {index}"

    def columns(self) -> list[str] | None:
        return None


def custom_source(
    config: MaxTextConfig, split: Split, row_format: RowFormat, shard: ShardSpec
) -> BatchIterator | None:
    components = load_components(config, split, row_format)
    return (
        document_batches(config, split, row_format, shard, components, "dataset_type")
        if components
        else None
    )


def max_data_streams(config: MaxTextConfig, split: Split, row_format: RowFormat) -> int:
    return max_streams_of(load_components(config, split, row_format))


def load_components(
    config: MaxTextConfig, split: Split, row_format: RowFormat
) -> list[MixtureComponent]:
    """Empty if the function returns no evaluation data."""
    documents = documents_of(config, split)
    return [] if documents is None else [MixtureComponent(documents)]


def documents_of(config: MaxTextConfig, split: Split) -> CustomDocuments | None:
    name = config.dataset_type.value
    function = named_function(name)
    try:
        records = function(config, split.value)
        if records is None and split is Split.EVAL:
            return None
        usable = (
            hasattr(records, "__getitem__") and hasattr(records, "__len__") and len(records) > 0
        )
    except UserError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise failure(
            f"dataset_type={name} raised {type(error).__name__} for split {split.value}", error
        ) from error
    if not usable:
        raise ConfigError(
            f"dataset_type={name} returned {type(records).__name__} for {split.value}: it should "
            "return documents, with a length above 0 and an index"
        )
    return CustomDocuments(name, records)


def named_function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    try:
        source_function = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"dataset_type={name} cannot be imported: {error}") from error
    except UserError:
        raise
    except Exception as error:  # the user's module may raise anything
        raise failure(
            f"dataset_type={name} cannot be imported: {type(error).__name__}", error
        ) from error
    if not callable(source_function):
        raise ConfigError(
            f"dataset_type={name} is {type(source_function).__name__} and no function"
        )
    return source_function
