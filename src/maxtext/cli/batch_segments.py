"""The rows of a batch as decoded text for the terminal. In fine-tuning, tokens that are trained on
have another colour or, if the output is no terminal, stand between ⟦ and ⟧.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np

COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red")
# Characters that move the cursor, change colours or the direction of a line; not newlines and tabs.
CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
LEARNED, NOT_LEARNED = "green", "bright_black"  # colours in fine-tuning
MARKS = ("⟦", "⟧")


@dataclass(frozen=True)
class Segment:
    """A document in a row. `learned` is a mask of the targets, or None if all of them are. `side`
    is chosen or rejected in a preference pair.
    """

    inputs: np.ndarray
    targets: np.ndarray
    learned: np.ndarray | None = None
    side: str = ""

    def tokens(self) -> np.ndarray:
        """All tokens: the inputs and the last target, since targets are inputs shifted by one."""
        return np.append(self.inputs, self.targets[-1:])

    def learned_tokens(self) -> np.ndarray:
        """The mask of `tokens`."""
        if self.learned is None:
            return np.ones(len(self.targets) + 1, bool)
        return np.append(False, self.learned)


Row = list[Segment]


def sides(batch: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """The fields of the chosen and the rejected sequences of pairs, or of the batch itself."""
    from maxtext.input_pipeline.interface import FIELDS, PAIR_SIDES

    if "inputs" in batch:
        return {"": batch}
    return {side: {field: batch[f"{side}_{field}"] for field in FIELDS} for side in PAIR_SIDES}


def segments(batch: dict[str, np.ndarray], row: int, masked: bool) -> Row:
    """The segments of a row; of a pair, the chosen and the rejected sequence."""
    result = []
    for side, fields in sides(batch).items():
        segment_ids = fields["inputs_segmentation"][row]
        learned = fields["targets_segmentation"][row] != 0
        for number in range(1, int(segment_ids.max()) + 1):
            where = segment_ids == number
            result.append(
                Segment(
                    fields["inputs"][row][where],
                    fields["targets"][row][where],
                    learned=learned[where] if masked else None,
                    side=side,
                )
            )
    return result


class TextDecoder:
    """Decodes tokens to text; special tokens are shown by name."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.is_special = lru_cache(None)(self.is_special_token)

    def is_special_token(self, token: int) -> bool:
        if token in (self.tokenizer.bos_id, self.tokenizer.eos_id):
            return True
        # Decoding drops a leading space, too, but a space is not a special token.
        return not self.tokenizer.decode([token]) and bool(
            self.tokenizer.id_to_token(token).strip("▁ ")
        )

    def spans(self, segment: Segment) -> Iterator[tuple[str, bool, bool]]:
        """(text, whether it is the name of a special token, whether it is learned) of runs of
        tokens.
        """
        tokens = zip(segment.tokens().tolist(), segment.learned_tokens().tolist(), strict=True)
        for (special, learned), run in groupby(
            tokens, lambda token: (self.is_special(token[0]), token[1])
        ):
            if special:
                yield from ((self.tokenizer.id_to_token(token), True, learned) for token, _ in run)
            else:
                yield self.tokenizer.decode([token for token, _ in run]), False, learned


class IdPrinter:
    """Shows token ids, for tokenized data whose tokenizer is not set."""

    def spans(self, segment: Segment) -> Iterator[tuple[str, bool, bool]]:
        yield " ".join(map(str, segment.tokens().tolist())), False, True


def visible(text: str) -> str:
    """The text with control characters escaped as in Python."""
    return CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def segment_text(
    segment: Segment, decoder: TextDecoder | IdPrinter, index: int, is_plain: bool
) -> Any:
    """The decoded tokens in the colour of the segment or, if it has a mask, of learned and other
    tokens.
    """
    from rich.text import Text

    line, masked, inside = Text(), segment.learned is not None, False
    for text, special, learned in decoder.spans(segment):
        colour = COLOURS[index % len(COLOURS)]
        if masked:
            colour = LEARNED if learned else NOT_LEARNED
        if masked and is_plain and learned != inside:
            line.append(MARKS[inside])
            inside = learned
        line.append(visible(text), style=f"bold reverse {colour}" if special else colour)
    return line.append(MARKS[1]) if inside else line
