"""Counts or lists the records that cannot be used.

A bad record stops the run, or is skipped, logged and counted, up to max_bad_records for each data
stream. It is counted once, however often it is read: in later epochs and evaluations, and after the
data is opened again. A command that examines data lists all of them and goes on (`BadRecordList`).
"""

import threading
from collections.abc import Sequence

from maxtext.common.errors import ConfigError
from maxtext.common.log import LOGGER
from maxtext.common.types import Json
from maxtext.input_pipeline.formats import BadRecord

MAX_LOGGED = 5  # bad records that are logged one by one; later only their number is logged


class BadRecords:
    """Counts bad records and raises ConfigError past `max_count` (-1: any number is allowed).
    `before` is the number that was counted earlier.
    """

    def __init__(self, max_count: int, before: int = 0):
        self.max_count = max_count
        self.before = before
        self.seen: set[int] = set()  # hashes of the locations: there may be millions
        self.lock = threading.Lock()

    def add(self, errors: Sequence[BadRecord]) -> None:
        """Count the errors that are new. Past `max_count`, all of them are in one error."""
        new: dict[int, BadRecord] = {}  # by the number of bad records up to it
        with self.lock:
            for error in errors:
                key = hash((error.path, error.location))
                if key not in self.seen:
                    self.seen.add(key)
                    new[self.before + len(self.seen)] = error
        if new and 0 <= self.max_count < max(new):
            first = next(iter(new.values()))
            # An error of the user's code has a traceback, and comes alone.
            *others, last = [first] if first.details else list(new.values())[:MAX_LOGGED]
            more = f" ({len(new)} bad records)" if others else ""
            repair = (
                "the function" if first.details else "the data, which `maxtext data inspect` lists"
            )
            stop = ConfigError(
                *map(str, others),
                f"{last}; max_bad_records={self.max_count}{more}: repair {repair}, "
                "or raise the limit",
            )
            stop.details = first.details
            raise stop
        for count, error in new.items():
            if count <= MAX_LOGGED:
                LOGGER.warning("skipped a bad record: %s (%d so far)", error, count)
            elif count & (count - 1) == 0:
                LOGGER.warning("skipped %d bad records so far", count)

    def __getstate__(self) -> Json:
        return {"max_count": self.max_count, "before": self.before, "seen": self.seen}

    def __setstate__(self, state: Json) -> None:
        self.__dict__.update(state)
        self.lock = threading.Lock()


class BadRecordList(BadRecords):
    """Collects the bad records of all data streams instead of raising an error. Each is listed
    once.
    """

    def __init__(self) -> None:
        super().__init__(max_count=-1)
        self.errors: dict[tuple[str, str], BadRecord] = {}

    def add(self, errors: Sequence[BadRecord]) -> None:
        with self.lock:
            for error in errors:
                self.errors.setdefault((error.path, error.location), error)

    def sorted(self) -> list[BadRecord]:
        """By file, then by the number of the line or record."""
        return sorted(self.errors.values(), key=sort_key)


def sort_key(error: BadRecord) -> tuple[str, int, str]:
    number = "".join(filter(str.isdigit, error.location))
    return error.path, int(number or 0), error.location
