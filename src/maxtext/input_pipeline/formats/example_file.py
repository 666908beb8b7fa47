"""Files of tf.train.Example: the common part of TFRecord and ArrayRecord files."""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence

from maxtext.input_pipeline.formats.cache import Caches
from maxtext.input_pipeline.formats.example import decode_example
from maxtext.input_pipeline.formats.interface import HEAD, BadFile, BadRecord, Record, check_index


class ExampleFile(ABC):
    def __init__(self, path: str, columns: Sequence[str], caches: Caches, count: int):
        self.path = path
        self.wanted = tuple(columns)
        self.caches = caches
        self.count = count
        self.nbytes = self.decoded = os.path.getsize(path)
        self.names = self.peek_columns()

    @abstractmethod
    def read(self, index: int) -> bytes:
        """The bytes of a record. Raises ValueError if they are damaged."""

    def peek_columns(self) -> list[str]:
        """The columns of the first records that can be read."""
        names: dict[str, None] = {}
        reasons = []
        head = min(HEAD, self.count)
        for index in range(head):
            try:
                names.update(dict.fromkeys(sorted(decode_example(self.read(index)))))
            except ValueError as error:
                reasons.append(str(error))
        if reasons and len(reasons) == head:
            raise BadFile(f"has no tf.train.Example in its first records (record 0: {reasons[0]})")
        return list(names)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Record:
        check_index(index, self.count)
        try:
            return decode_example(self.read(index), self.wanted)
        except ValueError as error:
            raise BadRecord(*self.where(index), str(error)) from error

    def where(self, index: int) -> tuple[str, str]:
        return self.path, f"record {index}"

    def columns(self) -> list[str]:
        return self.names
