"""The share of a corpus that use_truncation drops, estimated from a sample of its documents."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from maxtext.configs.types import DatasetType, MaxTextConfig
from maxtext.input_pipeline import hf_source
from maxtext.input_pipeline.encode import RecordEncoder
from maxtext.input_pipeline.formats import BadRecord, Record, RecordSource, UnusableRecord
from maxtext.input_pipeline.interface import ShardSpec, Split
from maxtext.input_pipeline.packing import Document, num_targets
from maxtext.input_pipeline.row_formats import RowFormat, shared_encoder
from maxtext.input_pipeline.sources import source_of

SAMPLED_DOCUMENTS = 256  # of each component of a mixture; all documents of a smaller one
SAMPLED_CHARACTERS = 2**23


def truncated_share(config: MaxTextConfig, row_format: RowFormat) -> float | None:
    """The share of the training tokens that is dropped because a document is longer than
    max_target_length, or None if the run truncates no documents.

    Documents have n_i targets each: the share is 1 - sum(min(n_i, length)) / sum(n_i), in which
    the documents of a mixture count by its weights.
    """
    if not config.use_truncation or row_format.has_masks or row_format.train_source:
        return None
    encoder = shared_encoder(config, Split.TRAIN, row_format)
    used = total = 0.0
    for weight, records in sample_records(config, row_format):
        targets = np.array(count_targets(encoder, records), float)
        if len(targets):
            total += weight * targets.mean()
            used += weight * np.minimum(targets, config.max_target_length).mean()
    return 1 - used / total if total else None


def sample_records(
    config: MaxTextConfig, row_format: RowFormat
) -> list[tuple[float, Iterable[Record]]]:
    """(weight, records) of each component of the training data; empty for sources that do not
    truncate."""
    load_components = getattr(
        source_of(config, Split.TRAIN, row_format)[0], "load_components", None
    )
    if load_components is None or config.dataset_type is DatasetType.C4MLPERF:
        return []
    if components := load_components(config, Split.TRAIN, row_format):
        return [(part.weight, read_sample(part.documents)) for part in components]
    stream = hf_source.open_stream(config, Split.TRAIN, row_format, ShardSpec(1))
    return [(1.0, islice(stream, SAMPLED_DOCUMENTS))]


def read_sample(documents: RecordSource) -> Iterator[Record]:
    """Evenly spaced documents in random order, so that any number of the first ones is a sample."""
    count = min(len(documents), SAMPLED_DOCUMENTS)
    indices = np.linspace(0, len(documents) - 1, count).astype(int)
    for index in np.random.default_rng(0).permutation(indices).tolist():
        try:
            yield documents[index]
        except BadRecord:  # the pipeline reports it
            continue


def count_targets(encoder: RecordEncoder, records: Iterable[Record]) -> list[int]:
    """The number of targets of each document, up to SAMPLED_CHARACTERS of text."""
    counts: list[int] = []
    characters = 0
    for record in records:
        try:
            prepared: Any = encoder.prepare(record)
        except UnusableRecord:
            continue
        encoded: Sequence[Document] = encoder.encode([prepared])
        counts += map(num_targets, encoded)
        characters += len(prepared)
        if characters > SAMPLED_CHARACTERS:
            break
    return counts
