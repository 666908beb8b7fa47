"""From the tokens of documents to sequences of (input, target) pairs: the one shift, and long
documents.

n tokens make n - 1 pairs: each token but the last is an input, each but the first a target. The
shift comes before any cutting, so a document that is cut keeps the target of every input that it
keeps. A document without text is no document, and one token alone has nothing to predict: both give
no sequence.
"""

import sys
from enum import Enum

import grain
import numpy as np

TokenPairs = dict[str, np.ndarray]  # inputs and targets, both [pairs]


class LongDocuments(Enum):
    """What happens to a document with more pairs than a row has places."""

    CUT = "cut"  # its beginning is used, the rest is not
    SPLIT = "split"  # it becomes several sequences, each with positions from 0
    WHOLE = "whole"  # it stays one sequence, for a packer that splits by itself


class ToSequences(grain.experimental.FlatMapTransform):
    """Token ids of some documents to their sequences."""

    max_fan_out = sys.maxsize  # Grain asks for a bound; a book in one file has none worth naming

    def __init__(self, length: int, long: LongDocuments):
        self.length, self.long = length, long

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
