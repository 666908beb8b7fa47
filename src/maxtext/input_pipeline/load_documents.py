"""Reads and encodes documents one chunk at a time."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from maxtext.common.errors import ConfigError
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline.bad_records import BadRecords
from maxtext.input_pipeline.encode import RecordEncoder
from maxtext.input_pipeline.encode_rows import TextEncoder
from maxtext.input_pipeline.formats import BadRecord, Record, RecordSource, UnusableRecord

CHUNK_BYTES = 2**20  # approximate size of the text that is tokenized at once
MAX_CHUNK_DOCUMENTS = 64
# Documents without a row before data counts as useless: more than threads read ahead of a slow one
MIN_READ = 4096


def documents_per_chunk(documents: RecordSource) -> int:
    return int(
        np.clip(CHUNK_BYTES * len(documents) // max(documents.nbytes, 1), 1, MAX_CHUNK_DOCUMENTS)
    )


def bad_records_of(encoder: RecordEncoder, config: MaxTextConfig) -> BadRecords:
    """The list of a command that examines data, or a counter for one data stream."""
    if encoder.bad_records is not None:
        return encoder.bad_records
    return BadRecords(config.max_bad_records)


def check_documents(
    documents: RecordSource, encoder: RecordEncoder, bad: BadRecords, max_count: int
) -> int:
    """Read up to `max_count` documents, so that `bad` has the bad ones and `encoder` the remarks on
    the others. Returns how many were read.
    """
    count = min(len(documents), max_count)
    load = LoadDocuments(documents, encoder, bad)
    for start in range(0, count, MAX_CHUNK_DOCUMENTS):
        load.prepare(range(start, min(start + MAX_CHUNK_DOCUMENTS, count)))
    return count


class NothingToTrainOn:
    """Raises `error` if documents are read again and none has given a row: further epochs would
    give none either.
    """

    def __init__(self, error: ConfigError):
        self.error = error
        self.first: int | None = None
        self.count = 0
        self.has_rows = False

    def check(self, indices: Sequence[int], rows: Sequence[object]) -> None:
        if rows:
            self.has_rows = True
        if self.has_rows or not len(indices):
            return
        is_repeated = self.first in indices
        if self.first is None:
            self.first = indices[0]
        self.count += len(indices)
        if is_repeated and self.count >= MIN_READ:
            raise self.error


class LoadDocuments:
    """Maps the indices of documents to their token ids, or to rows of fine-tuning."""

    def __init__(
        self,
        documents: RecordSource,
        encoder: RecordEncoder,
        bad: BadRecords,
        nothing: NothingToTrainOn | None = None,
    ):
        self.documents = documents
        self.encoder = encoder
        self.bad = bad
        self.nothing = nothing

    def __call__(self, indices: Sequence[int]) -> list[Any]:
        rows = self.read(indices)
        if self.nothing is not None:
            self.nothing.check(indices, rows)
        return rows

    def read(self, indices: Sequence[int]) -> list[Any]:
        return self.encoder.encode(self.prepare(indices))

    def prepare(self, indices: Sequence[int]) -> list[Any]:
        """The usable documents, before they are encoded. Counts the bad ones."""
        prepared: list[Any] = []
        errors: list[BadRecord] = []
        for index in indices:
            try:
                document: Any = self.encoder.prepare(self.documents[index])
            except BadRecord as error:
                errors.append(error)
            except UnusableRecord as error:
                path, location = self.documents.where(index)
                errors.append(BadRecord(path, location, str(error)))
            else:
                prepared.append(document)
                if isinstance(self.encoder, TextEncoder) and document.remarks:
                    self.encoder.reports.add(document.remarks, *self.documents.where(index))
        self.bad.add(errors)
        return prepared


class EncodeRecords:
    """Maps records that were read already to their token ids, or to rows of fine-tuning. `name` is
    their source in messages.
    """

    def __init__(
        self,
        name: str,
        encoder: RecordEncoder,
        bad: BadRecords,
        nothing: NothingToTrainOn | None = None,
    ):
        self.name = name
        self.encoder = encoder
        self.bad = bad
        self.nothing = nothing

    def __call__(self, records: Sequence[tuple[int, Record]]) -> list[Any]:
        rows = self.read(records)
        if self.nothing is not None:
            self.nothing.check([number for number, _ in records], rows)
        return rows

    def read(self, records: Sequence[tuple[int, Record]]) -> list[Any]:
        prepared: list[Any] = []
        errors: list[BadRecord] = []
        for number, record in records:
            try:
                document: Any = self.encoder.prepare(record)
            except UnusableRecord as error:
                errors.append(BadRecord(self.name, number, str(error)))
            else:
                prepared.append(document)
                if isinstance(self.encoder, TextEncoder) and document.remarks:
                    self.encoder.reports.add(document.remarks, self.name, number)
        self.bad.add(errors)
        return self.encoder.encode(prepared)
