"""Converts the tokens of documents to sequences of (input, target) pairs, and splits long
documents.

n tokens make n - 1 pairs: each token but the last is an input, each but the first a target. The
shift precedes any truncation, so that every remaining input has its target. Documents of no token
or one token give no sequence.
"""

import sys
from enum import Enum

import grain
import numpy as np

TokenPairs = dict[str, np.ndarray]  # inputs and targets, both [pairs]


class LongDocuments(Enum):
    """What happens to a document with more pairs than fit in a row."""

    CUT = "cut"  # it is truncated
    SPLIT = "split"  # it becomes several sequences, each with positions from 0
    WHOLE = "whole"  # it stays one sequence, for a packer that splits sequences


class ToSequences(grain.experimental.FlatMapTransform):
    """Maps the token ids of a chunk of documents to their sequences."""

    max_fan_out = sys.maxsize  # Grain requires a bound

    def __init__(self, length: int, long: LongDocuments):
        self.length = length
        self.long = long

    def flat_map(self, chunk: list[np.ndarray]) -> list[TokenPairs]:
        return [sequence for tokens in chunk for sequence in self.sequences(tokens)]

    def sequences(self, tokens: np.ndarray) -> list[TokenPairs]:
        inputs, targets = tokens[:-1], tokens[1:]
        if self.long is LongDocuments.CUT:
            inputs, targets = inputs[: self.length], targets[: self.length]
        step = max(len(inputs), 1) if self.long is LongDocuments.WHOLE else self.length
        return [
            {"inputs": inputs[start : start + step], "targets": targets[start : start + step]}
            for start in range(0, len(inputs), step)
        ]
