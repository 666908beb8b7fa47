"""From the tokens of documents to sequences, to rows of max_target_length, and to batches.

`ToSequences` converts a document of n tokens to n - 1 (input, target) pairs: each token but the
last is an input, each but the first a target. The shift precedes any truncation, so that every
remaining input has its target. Documents of no token or one token give no sequence, and long ones
are split. Sequences of fine-tuning are truncated when they are encoded and never split. They have a
mask of their targets, and `targets_segmentation` is 0 where it is False.

`to_rows` packs sequences into rows. first_fit and best_fit keep each sequence in one row and pad
the rest; concat_then_split fills every row and splits a sequence where the row ends; without
packing a row is one sequence and padding. Preference pairs are not packed: a row has both
sequences.

`FitRowsIterator` fills a group of OPEN_ROWS rows until a sequence fits in none of them; the next
group starts with it. So its state is the parent's state at the start of a group and the position in
it, and a group is packed again after a restart. Grain's own packers do the same, but take several
times as long for each sequence.

`to_batches` stacks rows.
"""

import sys
from functools import partial
from typing import Any

import grain
import numpy as np

from maxtext.common.errors import ConfigError
from maxtext.common.types import Json
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline.encode_rows import (
    EncodedPair,
    EncodedPrompt,
    EncodedRecord,
    EncodedRow,
)
from maxtext.input_pipeline.interface import (
    FIELDS,
    MARGIN,
    PAIR_SIDES,
    RECORD,
    Batch,
    LongDocuments,
    ShardSpec,
    check_position,
    saved_position,
)

# token ids, or a row of fine-tuning
Document = np.ndarray | EncodedRecord
# inputs, targets and for fine-tuning `loss_mask`, each [tokens - 1]
TokenSequence = dict[str, np.ndarray]


class ToSequences(grain.experimental.FlatMapTransform):
    """Maps the token ids of a chunk of documents to their sequences."""

    max_fan_out = sys.maxsize  # Grain requires a bound

    def __init__(self, length: int, long: LongDocuments):
        self.length = length
        self.long = long

    def flat_map(self, chunk: list[np.ndarray | EncodedRow]) -> list[TokenSequence]:
        return [sequence for document in chunk for sequence in self.sequences(document)]

    def sequences(self, document: np.ndarray | EncodedRow) -> list[TokenSequence]:
        if isinstance(document, EncodedRow):
            return [masked_sequence(document.ids, document.mask)]
        tokens = document
        inputs, targets = tokens[:-1], tokens[1:]
        if self.long is LongDocuments.CUT:
            inputs, targets = inputs[: self.length], targets[: self.length]
        step = max(len(inputs), 1) if self.long is LongDocuments.WHOLE else self.length
        return [
            {"inputs": inputs[start : start + step], "targets": targets[start : start + step]}
            for start in range(0, len(inputs), step)
        ]


class ToPreferencePairs(grain.experimental.FlatMapTransform):
    """Maps a chunk of preference pairs to their (chosen, rejected) sequences."""

    max_fan_out = sys.maxsize

    def flat_map(self, chunk: list[EncodedPair]) -> list[tuple[TokenSequence, TokenSequence]]:
        return [pair_sequences(pair) for pair in chunk]


class ToRecords(grain.experimental.FlatMapTransform):
    """Maps a chunk of encoded records to the records."""

    max_fan_out = sys.maxsize

    def flat_map(self, chunk: list[object]) -> list[object]:
        return chunk


def pair_sequences(pair: EncodedPair) -> tuple[TokenSequence, TokenSequence]:
    return (
        completion_sequence(pair.prompt, pair.chosen),
        completion_sequence(pair.prompt, pair.rejected),
    )


def completion_sequence(prompt: np.ndarray, completion: np.ndarray) -> TokenSequence:
    """The sequence of a prompt and its completion, of which the completion is trained on."""
    mask = np.arange(len(prompt) + len(completion)) >= len(prompt)
    return masked_sequence(np.concatenate([prompt, completion]), mask)


def masked_sequence(ids: np.ndarray, mask: np.ndarray) -> TokenSequence:
    return {"inputs": ids[:-1], "targets": ids[1:], "loss_mask": mask[1:]}


def num_targets(document: Document) -> int:
    """The number of (input, target) pairs of a document, or of the longer one of a pair."""
    if isinstance(document, EncodedPair):
        tokens = len(document.prompt) + max(len(document.chosen), len(document.rejected))
    else:
        tokens = len(document if isinstance(document, np.ndarray) else document.ids)
    return max(tokens - 1, 0)


# Rows that first_fit and best_fit fill at a time: more rows leave less padding, but need memory and
# delay the first batch. With the lengths of web pages and rows of 2048 tokens, best_fit leaves 2.6%
# padding with 32 rows, 1.7% with 64 and 1.2% with 128. It does not depend on the batch size, so
# that the order of rows, and with it a saved position, is valid for any batch size.
OPEN_ROWS = 64
# Native suffixes of a packed feature's fields -> Grain's
RENAMED = {"position": "positions", "segmentation": "segment_ids"}


def packing_type(config: MaxTextConfig) -> str | None:
    """How sequences are packed; None without packing."""
    return config.grain_packing_type if config.packing else None


def to_rows(
    sequences: grain.IterDataset,
    packing: str | None,
    length: int,
    max_segments: int,
    shuffle_seed: int | None,
) -> grain.IterDataset:
    """Rows with all FIELDS, each [length]. Without `packing`, one sequence in each row.
    `max_segments` -1 allows any number of sequences in a row.
    """
    lengths = {"inputs": length, "targets": length}
    if packing is None:
        return sequences.map(partial(pad_row, length=length))
    if packing == "concat_then_split":
        if max_segments != -1:
            raise ConfigError(
                f"max_segments_per_seq={max_segments} is not supported by "
                "grain_packing_type=concat_then_split, which fills every row: use first_fit or "
                "best_fit"
            )
        return grain.experimental.ConcatThenSplitIterDataset(sequences, length_struct=lengths).map(
            rename
        )
    max_segments = length if max_segments == -1 else max_segments
    return FitRows(sequences, length, packing == "best_fit", max_segments, shuffle_seed)


class FitRows(grain.IterDataset):
    """Packs sequences into rows: with `best` into the fullest row in which they fit, otherwise into
    the first. `max_segments` limits the sequences in a row.
    """

    def __init__(
        self,
        parent: grain.IterDataset,
        length: int,
        best: bool,
        max_segments: int,
        shuffle_seed: int | None,
    ):
        super().__init__(parent)
        self.parent = parent
        self.length = length
        self.best = best
        self.max_segments = max_segments
        self.seed = shuffle_seed

    def __iter__(self) -> "FitRowsIterator":
        return FitRowsIterator(iter(self.parent), self)


class FitRowsIterator(grain.DatasetIterator):
    def __init__(self, parent: grain.DatasetIterator, settings: FitRows):
        super().__init__(parent)
        self.parent = parent
        self.settings = settings
        self.counting = np.arange(settings.length, dtype=np.int32)
        self.move(parent.get_state())

    def move(self, start: object) -> None:
        """Move to the group that starts where the parent is now."""
        self.group, self.position = 0, 0
        self.rows: list[Batch] = []
        self.start = self.next_start = start
        self.pending: TokenSequence | None = None  # it did not fit in the last group

    def __next__(self) -> Batch:
        if self.position == len(self.rows):
            self.group, self.position = self.group + 1, 0
            self.fill()
            if not self.rows:
                raise StopIteration
        self.position += 1
        return self.rows[self.position - 1]

    def fill(self) -> None:
        count, length = OPEN_ROWS, self.settings.length
        self.start = self.next_start
        inputs, targets, position, segmentation = (
            np.zeros((count, length), np.int32) for _ in range(4)
        )
        loss_mask = np.ones((count, length), bool)
        used, segments = [0] * count, [0] * count
        free_tokens = np.full(count, length)
        while True:
            before, sequence = self.start, self.pending
            if sequence is None:
                before = self.parent.get_state()
                sequence = next(self.parent, None)
            self.pending = None
            if sequence is None:
                break
            size = len(sequence["inputs"])
            row = self.row_for(size, free_tokens)
            if free_tokens[row] < size:
                assert any(segments), "sequences are not longer than a row"
                self.pending = sequence
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
            if "loss_mask" in sequence:
                loss_mask[row, begin:end] = sequence["loss_mask"]
            used[row] = end
            free_tokens[row] = length - end if segments[row] < self.settings.max_segments else 0
        self.next_start = before
        filled = np.flatnonzero(segments)
        if self.settings.seed is not None:
            # Rows that were opened first are the fullest: shuffle them over the batches.
            filled = np.random.default_rng([self.settings.seed, self.group]).permutation(filled)
        self.rows = [
            row_of(inputs[at], targets[at], position[at], segmentation[at], loss_mask[at])
            for at in filled
        ]

    def row_for(self, size: int, free_tokens: np.ndarray) -> int:
        if self.settings.best:
            return int(
                np.where(free_tokens >= size, free_tokens, self.settings.length + 1).argmin()
            )
        return int((free_tokens >= size).argmax())

    def get_state(self) -> Json:
        if self.position == len(self.rows):
            return {"parent": self.next_start, "group": self.group, "position": 0}
        return {"parent": self.start, "group": self.group - 1, "position": self.position}

    def set_state(self, state: Json) -> None:
        self.parent.set_state(state["parent"])
        self.move(state["parent"])
        self.group = state["group"]
        if position := saved_position(state):
            self.group += 1
            self.fill()
            check_position(position, len(self.rows))
            self.position = position


def row_of(
    inputs: np.ndarray,
    targets: np.ndarray,
    position: np.ndarray,
    segmentation: np.ndarray,
    loss_mask: np.ndarray,
) -> Batch:
    # Without a mask the two fields are one array.
    target_segments = segmentation if loss_mask.all() else segmentation * loss_mask
    return dict(
        zip(
            FIELDS,
            (inputs, position, segmentation, targets, position, target_segments),
            strict=True,
        )
    )


def rename(row: dict[str, np.ndarray]) -> Batch:
    return {field: row[grain_name(field)] for field in FIELDS}


def grain_name(field: str) -> str:
    feature, _, added = field.partition("_")
    return f"{feature}_{RENAMED[added]}" if added else feature


def pad_row(sequence: TokenSequence, length: int) -> Batch:
    size = len(sequence["inputs"])
    inputs, targets, position, segmentation = (np.zeros(length, np.int32) for _ in range(4))
    inputs[:size], targets[:size] = sequence["inputs"], sequence["targets"]
    position[:size], segmentation[:size] = np.arange(size), 1
    loss_mask = np.ones(length, bool)
    loss_mask[:size] = sequence.get("loss_mask", True)
    return row_of(inputs, targets, position, segmentation, loss_mask)


def pad_pair(pair: tuple[TokenSequence, TokenSequence], length: int) -> Batch:
    """A row with the fields of both sequences of a preference pair."""
    return {
        f"{side}_{field}": value
        for side, sequence in zip(PAIR_SIDES, pair, strict=True)
        for field, value in pad_row(sequence, length).items()
    }


def pad_scored_pair(pair: EncodedPair, length: int) -> Batch:
    """`pad_pair` of a pair, with its margin."""
    return pad_pair(pair_sequences(pair), length) | {MARGIN: np.array(pair.margin, np.float32)}


def pad_prompt(prompt: EncodedPrompt, length: int) -> Batch:
    """A row with the tokens of a prompt as inputs, and its columns."""
    row = pad_row({"inputs": prompt.ids, "targets": np.zeros_like(prompt.ids)}, length)
    row["targets_segmentation"] = np.zeros(length, np.int32)
    return row | {RECORD: np.array(prompt.record, object)}


def to_batches(rows: grain.IterDataset, shard: ShardSpec, keep_last: bool) -> grain.IterDataset:
    """Batches of `shard.rows` rows. With `shard.min_rows` the remaining rows make a smaller batch.
    Without it they are dropped or, with `keep_last`, padded to a full batch.
    """
    if shard.min_rows or not keep_last:
        return rows.batch(shard.rows, drop_remainder=not shard.min_rows)
    batch_and_pad: Any = partial(grain.experimental.batch_and_pad, batch_size=shard.rows)
    return rows.batch(shard.rows, batch_fn=batch_and_pad)
