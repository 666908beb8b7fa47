"""From sequences to rows of max_target_length, and from rows to batches.

first_fit and best_fit keep each sequence in one row and pad the rest; concat_then_split fills every
row and cuts a sequence where the row ends; without packing a row is one sequence and padding.

first_fit and best_fit fill a group of OPEN_ROWS rows, until a sequence has room in none of them;
with it the next group begins. So a position is that of the parent at the start of a group and the
place in it, and a group is packed again after a restart. Grain's own packers do the same, but take
several times as long for each sequence.
"""

from functools import partial
from typing import Any

import grain
import numpy as np

from maxtext.common.errors import ConfigError
from maxtext.input_pipeline.interface import FIELDS, Batch, ShardSpec, check_position
from maxtext.input_pipeline.sequences import TokenPairs

# Rows that first_fit and best_fit fill at a time: more leave less padding, and cost memory and a
# later first batch. With the lengths of web pages and rows of 2048 best_fit leaves 2.6% empty with
# 32 rows, 1.7% with 64, 1.2% with 128. Not tied to the batch size, so that the order of rows, and
# with it a saved position, holds for any batch size.
OPEN_ROWS = 64
# Grain's names of what it adds to a packed feature
RENAMED = {"position": "positions", "segmentation": "segment_ids"}


def to_rows(
    sequences: grain.IterDataset,
    packing: str | None,
    length: int,
    max_segments: int,
    shuffle_seed: int | None,
) -> grain.IterDataset:
    """Rows with all FIELDS, each [length]. `packing` None: one sequence a row. `max_segments` -1:
    any number.
    """
    lengths = {"inputs": length, "targets": length}
    if packing is None:
        return sequences.map(partial(pad_row, length=length))
    if packing == "concat_then_split":
        if max_segments != -1:
            raise ConfigError(
                f"max_segments_per_seq={max_segments} cannot be kept by grain_packing_type=concat_then_split, "
                "which leaves no place empty: use first_fit or best_fit"
            )
        return grain.experimental.ConcatThenSplitIterDataset(sequences, length_struct=lengths).map(
            rename
        )
    most = length if max_segments == -1 else max_segments
    return FitRows(sequences, length, packing == "best_fit", most, shuffle_seed)


class FitRows(grain.IterDataset):
    """`best`: a sequence goes to the fullest row that has room, not to the first. `most`: sequences
    in a row.
    """

    def __init__(
        self,
        parent: grain.IterDataset,
        length: int,
        best: bool,
        most: int,
        shuffle_seed: int | None,
    ):
        super().__init__(parent)
        self.parent, self.length, self.best, self.most, self.seed = (
            parent,
            length,
            best,
            most,
            shuffle_seed,
        )

    def __iter__(self) -> "FittedRows":
        return FittedRows(iter(self.parent), self)


class FittedRows(grain.DatasetIterator):
    def __init__(self, parent: grain.DatasetIterator, settings: FitRows):
        super().__init__(parent)
        self.parent, self.settings = parent, settings
        self.counting = np.arange(settings.length, dtype=np.int32)
        self.move(parent.get_state())

    def move(self, start: Any) -> None:
        """To the group that begins where the parent is now."""
        self.group, self.place = 0, 0
        self.rows: list[Batch] = []
        self.start = self.next_start = start
        self.waiting: TokenPairs | None = None  # had no room in the last group, begins the next

    def __next__(self) -> Batch:
        if self.place == len(self.rows):
            self.group, self.place = self.group + 1, 0
            self.fill()
            if not self.rows:
                raise StopIteration
        self.place += 1
        return self.rows[self.place - 1]

    def fill(self) -> None:
        count, length = OPEN_ROWS, self.settings.length
        self.start = self.next_start
        inputs, targets, position, segmentation = (
            np.zeros((count, length), np.int32) for _ in range(4)
        )
        used, segments = [0] * count, [0] * count
        room = np.full(count, length)
        while True:
            before, sequence = self.start, self.waiting
            if sequence is None:
                before = self.parent.get_state()
                sequence = next(self.parent, None)
            self.waiting = None
            if sequence is None:
                break
            size = len(sequence["inputs"])
            row = self.row_for(size, room)
            if room[row] < size:
                assert any(segments), "sequences are not longer than a row"
                self.waiting = sequence
                break
            begin, end = used[row], used[row] + size
            segments[row] += 1
            inputs[row, begin:end], targets[row, begin:end] = (
                sequence["inputs"],
                sequence["targets"],
            )
            position[row, begin:end], segmentation[row, begin:end] = (
                self.counting[:size],
                segments[row],
            )
            used[row] = end
            room[row] = length - end if segments[row] < self.settings.most else 0
        self.next_start = before
        filled = np.flatnonzero(segments)
        if self.settings.seed is not None:
            # The rows that were opened first are the fullest: shuffled, so that this does not show
            # in the batches.
            filled = np.random.default_rng([self.settings.seed, self.group]).permutation(filled)
        self.rows = [
            row_of(inputs[at], targets[at], position[at], segmentation[at]) for at in filled
        ]

    def row_for(self, size: int, room: np.ndarray) -> int:
        if self.settings.best:
            return int(np.where(room >= size, room, self.settings.length + 1).argmin())
        return int((room >= size).argmax())

    def get_state(self) -> dict[str, Any]:
        if self.place == len(self.rows):
            return {"parent": self.next_start, "group": self.group, "place": 0}
        return {"parent": self.start, "group": self.group - 1, "place": self.place}

    def set_state(self, state: dict[str, Any]) -> None:
        self.parent.set_state(state["parent"])
        self.move(state["parent"])
        self.group = state["group"]
        if state["place"]:
            self.group += 1
            self.fill()
            check_position(state["place"], len(self.rows))
            self.place = state["place"]


def row_of(
    inputs: np.ndarray, targets: np.ndarray, position: np.ndarray, segmentation: np.ndarray
) -> Batch:
    return dict(
        zip(FIELDS, (inputs, position, segmentation, targets, position, segmentation), strict=True)
    )


def rename(row: dict[str, np.ndarray]) -> Batch:
    return {field: row[grain_name(field)] for field in FIELDS}


def grain_name(field: str) -> str:
    feature, _, added = field.partition("_")
    return f"{feature}_{RENAMED[added]}" if added else feature


def pad_row(sequence: TokenPairs, length: int) -> Batch:
    size = len(sequence["inputs"])
    inputs, targets, position, segmentation = (np.zeros(length, np.int32) for _ in range(4))
    inputs[:size], targets[:size] = sequence["inputs"], sequence["targets"]
    position[:size], segmentation[:size] = np.arange(size), 1
    return row_of(inputs, targets, position, segmentation)


def to_batches(rows: grain.IterDataset, shard: ShardSpec, keep_last: bool) -> grain.IterDataset:
    """Batches of `shard.rows` rows. With `shard.min_rows` the remaining rows make a smaller batch.
    Without it they are dropped or, with `keep_last`, padded to a full batch.
    """
    if shard.min_rows or not keep_last:
        return rows.batch(shard.rows, drop_remainder=not shard.min_rows)
    batch_and_pad: Any = partial(grain.experimental.batch_and_pad, batch_size=shard.rows)
    return rows.batch(shard.rows, batch_fn=batch_and_pad)
