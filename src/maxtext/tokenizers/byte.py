"""The built-in tokenizer: one token per UTF-8 byte. It needs no file and encodes any text.

With special tokens: 0 = padding, 1 = beginning, 2 = end, byte b = b + 3 (259 ids).
Plain, for a model with exactly 256 ids: byte b = b, and padding shares id 0 with the byte 0.
Special tokens have no text, so no text contains one.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from maxtext.tokenizers.interface import BoundaryDetector, utf8_boundaries
from maxtext.tokenizers.text_utils import chars_of_bytes

BYTES = 256
SPECIALS = ("<pad>", "<bos>", "<eos>")  # only as names of ids 0, 1 and 2
UNKNOWN = 0xFF  # never part of UTF-8, so it decodes to the replacement character


class ByteTokenizer:
    name = "byte"
    kind = "byte"
    pad_id = 0
    special_tokens: Mapping[str, str] = MappingProxyType({})
    chat_template = None

    def __init__(self, specials: bool = True):
        self.first_byte = len(SPECIALS) if specials else 0
        self.vocab_size = BYTES + self.first_byte
        self.bos_id = 1 if specials else None
        self.eos_id = 2 if specials else None
        self.special_ids = frozenset(range(self.first_byte))

    def encode(self, text: str) -> list[int]:
        return self.array(text).tolist()

    def encode_batch(self, texts: Sequence[str], specials: bool = False) -> list[np.ndarray]:
        return [self.array(text) for text in texts]  # a memory copy: threads would not pay

    def encode_with_specials(self, text: str) -> list[int]:
        return self.encode(text)

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ids = self.encode(text)
        return ids, chars_of_bytes(text, ((start, start + 1) for start in range(len(ids))))

    def encode_prompt(self, text: str) -> list[int]:
        return [*([] if self.bos_id is None else [self.bos_id]), *self.encode(text)]

    def array(self, text: str) -> np.ndarray:
        # Lone surrogates, which a broken command line may hold, become question marks.
        data = np.frombuffer(text.encode("utf-8", errors="replace"), np.uint8)
        return data.astype(np.int32) + self.first_byte

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def boundary_detector(self) -> BoundaryDetector:
        return utf8_boundaries(self.token_bytes)

    def token_bytes(self, token: int) -> bytes:
        if 0 <= token < self.first_byte:
            return b""
        # A model with a larger vocabulary may produce other ids: they are shown, not skipped.
        byte = int(token) - self.first_byte
        return bytes([byte if 0 <= byte < BYTES else UNKNOWN])

    def id_to_token(self, token: int) -> str:
        if 0 <= token < self.first_byte:
            return SPECIALS[token]
        byte = token - self.first_byte
        return chr(byte) if 0x20 <= byte < 0x7F else f"<0x{byte:02X}>"
