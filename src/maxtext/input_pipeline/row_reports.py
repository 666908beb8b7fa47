"""Counts what is remarkable about the rows of fine-tuning, and logs it: rows without a token to
train on and pairs that truncation makes equal, which are dropped, system messages that are not
first, turns whose end is not trained on, and truncation.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from maxtext.common.log import LOGGER


class Remark(Enum):
    """What is reported of rows, with a count and the first example: "rows that …"."""

    NOT_LEARNED = "are dropped, since none of their tokens is learned"
    SYSTEM_NOT_FIRST = "have a system message that is not the first message"
    END_NOT_LEARNED = "have no learned end-of-turn token, so that a model does not learn to stop"
    TRUNCATED = "are truncated to max_target_length"
    CUT_EQUAL = "are dropped, since truncation to max_target_length makes chosen and rejected equal"
    PROMPT_TOO_LONG = "are dropped, since their prompt is longer than max_prefill_predict_length"
    PROMPT_TRUNCATED = "have a prompt whose start is cut off"


@dataclass
class RemarkCount:
    """`example` is the location of the first row; `seen` are hashes of all locations."""

    example: str
    seen: set[int] = field(default_factory=set)


class RowReports:
    """The remarks on the rows that a process has encoded. A row counts once, however often it is
    read. Thread-safe.
    """

    def __init__(self) -> None:
        self.counts: dict[Remark, RemarkCount] = {}
        self.lock = threading.Lock()

    def add(self, remarks: Iterable[Remark], path: str, location: str | int) -> None:
        location = f"record {location}" if isinstance(location, int) else location
        for remark in remarks:
            with self.lock:
                entry = self.counts.setdefault(remark, RemarkCount(f"{path}, {location}"))
                before = len(entry.seen)
                entry.seen.add(hash((path, location)))
                count = len(entry.seen)
            if count > before and count & (count - 1) == 0:
                LOGGER.warning(
                    "rows that %s: %d so far, first %s", remark.value, count, entry.example
                )

    def summary(self) -> dict[str, tuple[int, str]]:
        """The count and the first example of each remark."""
        with self.lock:
            return {
                remark.value: (len(entry.seen), entry.example)
                for remark, entry in self.counts.items()
            }
