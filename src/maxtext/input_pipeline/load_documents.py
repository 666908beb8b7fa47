"""Documents read and encoded a packet at a time, and what becomes of those that are bad.

A bad record stops the run, or is left out with a line in the log and counted, up to max_bad_records
for each stream. It counts once, however often it is read: in later epochs and evaluations, and when
the data is looked at again.
"""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxtext.common.errors import UserError
from maxtext.common.log import LOGGER
from maxtext.input_pipeline.encode import Encoder, UnusableRecord
from maxtext.input_pipeline.formats import BadRecord, Record, RecordSource

NAMED = 5  # bad records that the log describes; of the rest it gives the number
CHUNK_BYTES = 2**20  # of text that is tokenized at once, about
MAX_CHUNK_DOCUMENTS = 64  # documents at most


def documents_per_chunk(documents: RecordSource) -> int:
    return int(
        np.clip(CHUNK_BYTES * len(documents) // max(documents.nbytes, 1), 1, MAX_CHUNK_DOCUMENTS)
    )


class BadRecords:
    """`most` -1: any number may be left out. `before`: were left out before this object counted."""

    def __init__(self, most: int, before: int = 0):
        self.most, self.before = most, before
        self.seen: set[int] = set()  # hashes of the places: there may be millions
        self.lock = threading.Lock()

    def add(self, error: BadRecord) -> None:
        key = hash((error.path, error.place))
        with self.lock:
            if key in self.seen:
                return
            self.seen.add(key)
            count = self.before + len(self.seen)
        if 0 <= self.most < count:
            stop = UserError(
                f"{error}; max_bad_records={self.most}: mend the data, or allow more to be left out"
            )
            stop.details = error.details
            raise stop
        if count <= NAMED:
            LOGGER.warning("left out a bad record: %s (%d so far)", error, count)
        elif count & (count - 1) == 0:
            LOGGER.warning("left out %d bad records so far", count)

    def __getstate__(self) -> dict[str, Any]:
        return {"most": self.most, "before": self.before, "seen": self.seen}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.lock = threading.Lock()


class LoadDocuments:
    """Indices of documents to their token ids."""

    def __init__(self, documents: RecordSource, encoder: Encoder, bad: BadRecords):
        self.documents, self.encoder, self.bad = documents, encoder, bad

    def __call__(self, indices: Sequence[int]) -> list[np.ndarray]:
        prepared = []
        for index in indices:
            try:
                prepared.append(self.encoder.prepare(self.documents[index]))
            except BadRecord as error:
                self.bad.add(error)
            except UnusableRecord as error:
                path, place = self.documents.where(index)
                self.bad.add(BadRecord(path, place, str(error)))
        return self.encoder.encode(prepared)


class EncodeRecords:
    """The same for records that come by themselves; `name` says from where."""

    def __init__(self, name: str, encoder: Encoder, bad: BadRecords):
        self.name, self.encoder, self.bad = name, encoder, bad

    def __call__(self, records: Sequence[tuple[int, Record]]) -> list[np.ndarray]:
        prepared = []
        for number, record in records:
            try:
                prepared.append(self.encoder.prepare(record))
            except UnusableRecord as error:
                self.bad.add(BadRecord(self.name, number, str(error)))
        return self.encoder.encode(prepared)
