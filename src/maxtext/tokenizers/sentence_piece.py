"""SentencePiece models (*.model), read by the `sentencepiece` library.

Text of control symbols (`<s>`, `</s>`) in a document is plain text; user-defined symbols of the
model are tokens wherever they stand. In chat text each stretch between control symbols is encoded
by itself, as Llama 2 does.
"""

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from maxtext.common.errors import ConfigError
from maxtext.common.extras import require
from maxtext.tokenizers.beside import own_template, read_settings
from maxtext.tokenizers.boundaries import ENDS_CHARACTER, BoundaryDetector, utf8_boundaries
from maxtext.tokenizers.text import decode_known, valid


class SentencePieceTokenizer:
    kind = "sentencepiece"

    def __init__(self, path: Path):
        library = require("sentencepiece", f"the tokenizer {path}")
        self.path = path
        self.name = str(path)
        try:
            self.inner = library.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise ConfigError(f"{path} is not a SentencePiece model: {error}") from error
        self.chat_template = own_template(path.parent, read_settings(path.parent))
        self.vocab_size = self.inner.get_piece_size()
        ids = {
            "bos_token": self.inner.bos_id(),
            "eos_token": self.inner.eos_id(),
            "pad_token": self.inner.pad_id(),
        }
        present = {name: token for name, token in ids.items() if token >= 0}
        self.bos_id, self.eos_id = present.get("bos_token"), present.get("eos_token")
        self.pad_id = present.get("pad_token", 0)
        named = present | {"unk_token": self.inner.unk_id()}
        self.special_tokens = {name: self.inner.id_to_piece(token) for name, token in named.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path.absolute(),)

    @cached_property
    def controls(self) -> dict[str, int]:
        """Control symbols, longest first, so that none hides another that starts like it."""
        tokens = filter(self.inner.is_control, range(self.vocab_size))
        pieces = {self.inner.id_to_piece(token): token for token in tokens}
        return dict(sorted(pieces.items(), key=lambda item: -len(item[0])))

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(valid(text))

    def encode_batch(self, texts: Sequence[str], specials: bool = False) -> list[np.ndarray]:
        if specials and self.controls:
            return self.join(
                [re.split(f"({'|'.join(map(re.escape, self.controls))})", text) for text in texts]
            )
        return self.inner.encode(
            [valid(text) for text in texts], return_type="numpy"
        )  # by all cores

    def join(self, texts: list[list[str]]) -> list[np.ndarray]:
        """The ids of texts in parts, of which some are control symbols."""
        runs = iter(
            self.encode_batch(
                [part for parts in texts for part in parts if part not in self.controls]
            )
        )
        return [
            np.concatenate(
                [
                    np.array([self.controls[part]], np.int32)
                    if part in self.controls
                    else next(runs)
                    for part in parts
                ]
            )
            for parts in texts
        ]

    def encode_with_specials(self, text: str) -> list[int]:
        return self.encode_batch([text], specials=True)[0].tolist()

    def encode_prompt(self, text: str) -> list[int]:
        return [*([] if self.bos_id is None else [self.bos_id]), *self.encode_with_specials(text)]

    def decode(self, ids: Sequence[int]) -> str:
        return decode_known(ids, lambda token: 0 <= token < self.vocab_size, self.inner.decode)

    def boundaries(self) -> BoundaryDetector:
        return utf8_boundaries(self.token_bytes)

    def token_bytes(self, token: int) -> bytes:
        """Of a byte piece, its byte; every other piece, control symbols too, ends a character."""
        if 0 <= token < self.vocab_size and self.inner.is_byte(token):
            return bytes.fromhex(self.inner.id_to_piece(token)[len("<0x") : -1])
        return ENDS_CHARACTER

    def piece(self, token: int) -> str:
        return self.inner.id_to_piece(token)
