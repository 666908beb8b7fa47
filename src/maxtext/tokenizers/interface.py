"""What every tokenizer offers.

`encode` adds no special tokens: whether documents have them the pipeline decides. Any str can be
encoded and any ids decoded; neither raises. A tokenizer may be used by many threads at once, and
can be pickled: it is opened again from its file in the other process.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from maxtext.tokenizers.boundaries import BoundaryDetector


class Tokenizer(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str:
        """byte, sentencepiece, huggingface or tiktoken."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that `encode` or a special token can be."""

    @property
    def bos_id(self) -> int | None:
        """Beginning of a sequence; None when this vocabulary has no such token. So too `eos_id`."""

    @property
    def eos_id(self) -> int | None: ...

    @property
    def pad_id(self) -> int: ...

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """What chat templates know: bos_token, eos_token … to the text of the token."""

    @property
    def chat_template(self) -> str | None:
        """The template that came with the vocabulary, as Jinja text."""

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str], specials: bool = False) -> list[np.ndarray]:
        """The ids of each text as int32, by all cores: as `encode`, or with `specials` as
        `encode_with_specials`. The arrays may be read-only."""

    def encode_with_specials(self, text: str) -> list[int]:
        """As `encode`, but the text of a special token, as chat templates write it, becomes that
        token.
        """

    def encode_prompt(self, text: str) -> list[int]:
        """As `encode_with_specials`, after the special tokens that a text starts with in this
        vocabulary.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """The text of any ids, special tokens left out; never raises, even in the middle of a
        character.
        """

    def boundaries(self) -> BoundaryDetector:
        """A new detector of the positions where a sequence of ids can be cut for decoding: there,
        `decode` of the ids before is a prefix of `decode` of all."""

    def piece(self, token: int) -> str:
        """One token as its vocabulary writes it."""
