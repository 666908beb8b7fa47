"""The built-in tokenizer: one token a byte of UTF-8, so it needs no file and no text is outside its vocabulary.

With special tokens: 0 = padding, 1 = beginning, 2 = end, byte b = b + 3 (259 ids).
Plain, for a model with exactly 256 ids: byte b = b, and padding shares id 0 with the byte 0.
"""

from collections.abc import Sequence

import numpy as np

BYTES = 256
SPECIALS = 3
UNKNOWN = 0xFF  # a byte that UTF-8 never has, so that it decodes to the replacement character


class ByteTokenizer:
    name = "byte"
    pad_id = 0

    def __init__(self, specials: bool = True):
        self.first_byte = SPECIALS if specials else 0
        self.vocab_size = BYTES + self.first_byte
        self.bos_id = 1 if specials else None
        self.eos_id = 2 if specials else None

    def encode(self, text: str) -> list[int]:
        # Half a surrogate pair, as a broken command line may hold, is not UTF-8: it becomes a question mark.
        data = np.frombuffer(text.encode("utf-8", errors="replace"), np.uint8)
        return (data.astype(np.int32) + self.first_byte).tolist()

    def decode(self, ids: Sequence[int]) -> str:
        # A model may know more ids than there are bytes, and may produce them: shown, not skipped.
        data = bytes(
            byte if 0 <= (byte := int(token) - self.first_byte) < BYTES else UNKNOWN
            for token in ids
            if not 0 <= int(token) < self.first_byte
        )
        return data.decode("utf-8", errors="replace")
