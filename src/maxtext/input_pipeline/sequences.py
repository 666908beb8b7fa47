"""Converts the tokens of documents to sequences of (input, target) pairs, and splits long
documents.

n tokens make n - 1 pairs: each token but the last is an input, each but the first a target. The
shift precedes any truncation, so that every remaining input has its target. Documents of no token
or one token give no sequence. Rows of fine-tuning also have the mask of their targets. They are
truncated when they are encoded, and never split.
"""

import sys
from typing import Any

import grain
import numpy as np

from maxtext.input_pipeline.encode_rows import EncodedPair, EncodedPrompt, EncodedRow
from maxtext.input_pipeline.interface import LongDocuments

# token ids, or a row of fine-tuning
Document = np.ndarray | EncodedRow | EncodedPair | EncodedPrompt
TokenPairs = dict[str, np.ndarray]  # inputs, targets and for rows `learned`, each [pairs]


class ToSequences(grain.experimental.FlatMapTransform):
    """Maps the token ids of a chunk of documents to their sequences."""

    max_fan_out = sys.maxsize  # Grain requires a bound

    def __init__(self, length: int, long: LongDocuments):
        self.length = length
        self.long = long

    def flat_map(self, chunk: list[np.ndarray | EncodedRow]) -> list[TokenPairs]:
        return [sequence for document in chunk for sequence in self.sequences(document)]

    def sequences(self, document: np.ndarray | EncodedRow) -> list[TokenPairs]:
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


class ToPairs(grain.experimental.FlatMapTransform):
    """Maps a chunk of preference pairs to their (chosen, rejected) sequences."""

    max_fan_out = sys.maxsize

    def flat_map(self, chunk: list[EncodedPair]) -> list[tuple[TokenPairs, TokenPairs]]:
        return [pair_sequences(pair) for pair in chunk]


class ToRecords(grain.experimental.FlatMapTransform):
    """Maps a chunk of encoded records to the records."""

    max_fan_out = sys.maxsize

    def flat_map(self, chunk: list[Any]) -> list[Any]:
        return chunk


def pair_sequences(pair: EncodedPair) -> tuple[TokenPairs, TokenPairs]:
    return (
        completion_sequence(pair.prompt, pair.chosen),
        completion_sequence(pair.prompt, pair.rejected),
    )


def completion_sequence(prompt: np.ndarray, completion: np.ndarray) -> TokenPairs:
    """The sequence of a prompt and its completion, of which the completion is trained on."""
    mask = np.arange(len(prompt) + len(completion)) >= len(prompt)
    return masked_sequence(np.concatenate([prompt, completion]), mask)


def masked_sequence(ids: np.ndarray, mask: np.ndarray) -> TokenPairs:
    return {"inputs": ids[:-1], "targets": ids[1:], "learned": mask[1:]}


def num_targets(document: Document) -> int:
    """The number of (input, target) pairs of a document, or of the longer one of a pair."""
    if isinstance(document, EncodedPair):
        tokens = len(document.prompt) + max(len(document.chosen), len(document.rejected))
    else:
        tokens = len(document if isinstance(document, np.ndarray) else document.ids)
    return max(tokens - 1, 0)
