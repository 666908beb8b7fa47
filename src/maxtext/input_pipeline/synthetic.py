"""dataset_type=synthetic: endless random tokens, to measure speed and to try a model without data.

Row n of a stream depends on data_shuffle_seed, split, stream and n alone, so the position is n.
The two sequences of a preference pair share their first half, the prompt.
"""

import sys

import numpy as np

from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline.interface import (
    PAIR_FIELDS,
    PAIR_SIDES,
    Batch,
    BatchIterator,
    ShardSpec,
    Split,
    State,
    seal,
    unseal,
)
from maxtext.input_pipeline.row_formats import RowFormat

MADE_BY = {"dataset_type": "synthetic"}


def synthetic_source(
    config: MaxTextConfig, split: Split, row_format: RowFormat, shard: ShardSpec
) -> BatchIterator:
    seeds = np.random.SeedSequence([config.data_shuffle_seed % 2**32, list(Split).index(split)])
    key = seeds.generate_state(2, np.uint64)
    kind = SyntheticPairs if row_format.fields == PAIR_FIELDS else SyntheticBatches
    return kind(key, shard.index, shard.rows, config.max_target_length, config.vocab_size)


def max_data_streams(config: MaxTextConfig, split: Split, row_format: RowFormat) -> int:
    return sys.maxsize


class SyntheticBatches(BatchIterator):
    """`key` is the generator's key, the same for all streams of a split."""

    def __init__(self, key: np.ndarray, stream: int, rows: int, length: int, vocab_size: int):
        self.key = key
        self.stream = stream
        self.rows = rows
        self.length = length
        self.vocab_size = vocab_size
        self.row = 0

    def __next__(self) -> Batch:
        tokens = self.next_tokens()
        self.row += self.rows
        return self.to_batch(tokens)

    def next_tokens(self, sequence: int = 0) -> np.ndarray:
        rows = range(self.row, self.row + self.rows)
        return np.stack([self.tokens(row, sequence) for row in rows])

    def to_batch(self, tokens: np.ndarray) -> Batch:
        position = np.tile(np.arange(self.length, dtype=np.int32), (self.rows, 1))
        segmentation = np.ones_like(position)
        return {
            "inputs": tokens[:, :-1],
            "inputs_position": position,
            "inputs_segmentation": segmentation,
            "targets": tokens[:, 1:],
            "targets_position": position,
            "targets_segmentation": segmentation,
        }

    def tokens(self, row: int, sequence: int) -> np.ndarray:
        # The generator counts in the first word; the others make the rows independent.
        generator = np.random.Generator(
            np.random.Philox(key=self.key, counter=[0, sequence, row, self.stream])
        )
        return generator.integers(self.vocab_size, size=self.length + 1, dtype=np.int32)

    def get_state(self) -> State:
        return seal(MADE_BY, {"row": self.row})

    def set_state(self, state: State) -> None:
        position = unseal(MADE_BY, state)
        # Older positions counted batches; none of their rows comes again either way.
        self.row = position["row"] if "row" in position else position["step"] * self.rows

    def reset(self) -> None:
        self.row = 0


class SyntheticPairs(SyntheticBatches):
    def __next__(self) -> Batch:
        chosen, rejected = (self.next_tokens(sequence) for sequence in range(len(PAIR_SIDES)))
        prompt = (self.length + 1) // 2
        rejected[:, :prompt] = chosen[:, :prompt]
        self.row += self.rows
        batch: Batch = {}
        for side, tokens in zip(PAIR_SIDES, (chosen, rejected), strict=True):
            fields = self.to_batch(tokens)
            loss_mask = np.arange(1, self.length + 1) >= prompt
            fields["targets_segmentation"] = fields["targets_segmentation"] * loss_mask
            batch |= {f"{side}_{name}": field for name, field in fields.items()}
        return batch
