"""What every tokenizer offers. `encode` adds no special tokens: whether documents have them the pipeline decides."""

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    @property
    def name(self) -> str: ...

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

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of any ids, special tokens left out; never raises, even in the middle of a character."""
