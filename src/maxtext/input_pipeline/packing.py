"""From sequences to rows of max_target_length, and from rows to batches, with Grain's own packers.

first_fit and best_fit keep each sequence in one row and pad the rest; concat_then_split fills every row and cuts a
sequence where the row ends; without packing a row is one sequence and padding.
"""

from functools import partial
from typing import Any

import grain
import numpy as np

from maxtext.common.errors import ConfigError
from maxtext.input_pipeline.interface import FIELDS, Batch
from maxtext.input_pipeline.sequences import TokenPairs

# Rows that first_fit and best_fit fill at a time: more leave less padding, and cost memory and a later first batch.
# Not tied to the batch size, so that the order of rows, and with it a saved position, holds for any batch size.
OPEN_ROWS = 64
# Grain's names of what it adds to a packed feature
RENAMED = {"position": "positions", "segmentation": "segment_ids"}


def to_rows(
    sequences: grain.IterDataset, packing: str | None, length: int, max_segments: int, shuffle_seed: int | None
) -> grain.IterDataset:
    """Rows with all FIELDS, each [length]. `packing` None: one sequence a row. `max_segments` -1: any number."""
    lengths = {"inputs": length, "targets": length}
    if packing is None:
        return sequences.map(partial(pad_row, length=length))
    if packing == "concat_then_split":
        if max_segments != -1:
            raise ConfigError(
                f"max_segments_per_seq={max_segments} cannot be kept by grain_packing_type=concat_then_split, "
                "which leaves no place empty: use first_fit or best_fit"
            )
        return grain.experimental.ConcatThenSplitIterDataset(sequences, length_struct=lengths).map(rename)
    packers = {
        "first_fit": grain.experimental.FirstFitPackIterDataset,
        "best_fit": grain.experimental.BestFitPackIterDataset,
    }
    packed = packers[packing](
        sequences,
        length_struct=lengths,
        num_packing_bins=OPEN_ROWS,
        # The rows that were opened first are the fullest: shuffled, so that this does not show in the batches.
        shuffle_bins=shuffle_seed is not None,
        seed=shuffle_seed or 0,
        max_sequences_per_bin=None if max_segments == -1 else max_segments,
    )
    return packed.map(rename)


def rename(row: dict[str, np.ndarray]) -> Batch:
    return {field: row[grain_name(field)] for field in FIELDS}


def grain_name(field: str) -> str:
    feature, _, added = field.partition("_")
    return f"{feature}_{RENAMED[added]}" if added else feature


def pad_row(sequence: TokenPairs, length: int) -> Batch:
    row = {field: np.zeros(length, np.int32) for field in FIELDS}
    for feature, tokens in sequence.items():
        row[feature][: len(tokens)] = tokens
        row[f"{feature}_position"][: len(tokens)] = np.arange(len(tokens))
        row[f"{feature}_segmentation"][: len(tokens)] = 1
    return row


def to_batches(rows: grain.IterDataset, batch_size: int, keep_last: bool) -> grain.IterDataset:
    """Full batches only; with `keep_last` the rows left over make one more, filled up with rows of padding."""
    if not keep_last:
        return rows.batch(batch_size, drop_remainder=True)
    fill_up: Any = partial(grain.experimental.batch_and_pad, batch_size=batch_size)
    return rows.batch(batch_size, batch_fn=fill_up)
