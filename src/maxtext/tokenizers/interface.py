"""The interface of all tokenizers.

`encode` adds no special tokens; the input pipeline does. Any str can be encoded and any ids can be
decoded without an error. A tokenizer is thread-safe. It can be pickled, and is then opened again
from its file in the other process.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from maxtext.tokenizers.boundaries import BoundaryDetector
from maxtext.tokenizers.tokenizer_config import ChatTemplateSource


class Tokenizer(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str:
        """byte, sentencepiece, huggingface or tiktoken."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, special tokens included."""

    @property
    def bos_id(self) -> int | None:
        """Beginning of a sequence; None, like `eos_id`, if the vocabulary has no such token."""

    @property
    def eos_id(self) -> int | None: ...

    @property
    def pad_id(self) -> int: ...

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of special tokens, which no ordinary text contains and `decode` skips."""

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """The texts of bos_token, eos_token …, as chat templates use them."""

    @property
    def chat_template(self) -> ChatTemplateSource:
        """The template that came with the vocabulary, as Jinja text; if there are several, by
        name.
        """

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str], specials: bool = False) -> list[np.ndarray]:
        """The ids of each text as int32, computed on all cores: as by `encode`, or with `specials`
        as by `encode_with_specials`. The arrays may be read-only.
        """

    def encode_with_specials(self, text: str) -> list[int]:
        """Like `encode`, but the text of a special token, as in the output of a chat template,
        becomes that token.
        """

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of `encode_with_specials`, and the (start, end) in `text` of the characters that
        each comes from. Tokens that are parts of one character have equal offsets.
        """

    def encode_prompt(self, text: str) -> list[int]:
        """Like `encode_with_specials`, after the special tokens that start a text in this
        vocabulary.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """The text of any ids without special tokens; incomplete characters become U+FFFD."""

    def boundary_detector(self) -> BoundaryDetector:
        """A new detector of the positions where a sequence of ids can be split for decoding: there,
        `decode` of the ids before is a prefix of `decode` of all.
        """

    def id_to_token(self, token: int) -> str:
        """A token as its vocabulary writes it."""
