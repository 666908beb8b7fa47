"""dataset_type=synthetic: endless random tokens, to measure speed and to try a model without data.

Batch n depends on data_shuffle_seed, split, stream and n alone, so the position is n.
"""

import sys

import numpy as np

from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline.interface import Batch, BatchIterator, Share, Split, State, seal, unseal

MADE_BY = {"dataset_type": "synthetic"}


def synthetic_source(config: MaxTextConfig, split: Split, share: Share) -> BatchIterator:
    stream = [config.data_shuffle_seed, list(Split).index(split), share.index]
    return SyntheticBatches(stream, share.rows, config.max_target_length, config.vocab_size)


def most_streams(config: MaxTextConfig, split: Split) -> int:
    return sys.maxsize


class SyntheticBatches(BatchIterator):
    """`stream` is the part of the random key that stays the same from batch to batch."""

    def __init__(self, stream: list[int], rows: int, length: int, vocab_size: int):
        self.stream, self.rows, self.length, self.vocab_size = stream, rows, length, vocab_size
        self.step = 0

    def __next__(self) -> Batch:
        generator = np.random.default_rng([*self.stream, self.step])
        tokens = generator.integers(self.vocab_size, size=(self.rows, self.length + 1), dtype=np.int32)
        self.step += 1
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

    def get_state(self) -> State:
        return seal(MADE_BY, {"step": self.step})

    def set_state(self, state: State) -> None:
        self.step = unseal(MADE_BY, state)["step"]

    def reset(self) -> None:
        self.step = 0
