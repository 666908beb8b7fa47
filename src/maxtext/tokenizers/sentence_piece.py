"""SentencePiece models (*.model), read by the `sentencepiece` library.

The text of control symbols (`<s>`, `</s>`) in a document is encoded as plain text; user-defined
symbols of the model are always tokens. In chat text each part between control symbols is encoded on
its own, as Llama 2 does.
"""

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from maxtext.common.errors import ConfigError
from maxtext.common.extras import require
from maxtext.tokenizers.interface import (
    ENDS_CHARACTER,
    BoundaryDetector,
    read_chat_template,
    read_tokenizer_config,
    utf8_boundaries,
)
from maxtext.tokenizers.text_utils import (
    chars_of_bytes,
    decode_with_unknown_ids,
    replace_surrogates,
)


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
        self.chat_template = read_chat_template(path.parent, read_tokenizer_config(path.parent))
        self.vocab_size = self.inner.get_piece_size()
        ids = {
            "bos_token": self.inner.bos_id(),
            "eos_token": self.inner.eos_id(),
            "pad_token": self.inner.pad_id(),
        }
        present = {name: token for name, token in ids.items() if token >= 0}
        self.bos_id = present.get("bos_token")
        self.eos_id = present.get("eos_token")
        self.pad_id = present.get("pad_token", 0)
        present["unk_token"] = self.inner.unk_id()
        self.special_tokens = {
            name: self.inner.id_to_piece(token) for name, token in present.items()
        }

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.path.absolute(),)

    @cached_property
    def controls(self) -> dict[str, int]:
        """Ids of control symbols, longest symbol first, so that a regex prefers it to its
        prefix.
        """
        tokens = filter(self.inner.is_control, range(self.vocab_size))
        ids = {self.inner.id_to_piece(token): token for token in tokens}
        return dict(sorted(ids.items(), key=lambda item: -len(item[0])))

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(replace_surrogates(text))

    def encode_batch(self, texts: Sequence[str], specials: bool = False) -> list[np.ndarray]:
        if specials and self.controls:
            return self.encode_parts([self.split_controls(text) for text in texts])
        valid_texts = [replace_surrogates(text) for text in texts]
        return self.inner.encode(valid_texts, return_type="numpy")  # multithreaded

    def encode_parts(self, texts: list[list[str]]) -> list[np.ndarray]:
        """Encode texts that are split into control symbols and ordinary parts."""
        ordinary = [part for parts in texts for part in parts if part not in self.controls]
        ordinary_ids = iter(self.encode_batch(ordinary))

        def ids(part: str) -> np.ndarray:
            if part in self.controls:
                return np.array([self.controls[part]], np.int32)
            return next(ordinary_ids)

        return [np.concatenate([ids(part) for part in parts]) for parts in texts]

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self.controls.values())

    def split_controls(self, text: str) -> list[str]:
        """The text as ordinary parts and control symbols, alternating."""
        return re.split(f"({'|'.join(map(re.escape, self.controls))})", text)

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        start = 0
        for part in self.split_controls(text) if self.controls else [text]:
            if part in self.controls:
                ids.append(self.controls[part])
                offsets.append((start, start + len(part)))
            else:
                pieces = self.inner.encode(replace_surrogates(part), return_type="proto").pieces
                spans = chars_of_bytes(part, ((piece.begin, piece.end) for piece in pieces))
                ids += [piece.id for piece in pieces]
                offsets += [(start + first, start + end) for first, end in spans]
            start += len(part)
        return ids, offsets

    def encode_with_specials(self, text: str) -> list[int]:
        return self.encode_batch([text], specials=True)[0].tolist()

    def encode_prompt(self, text: str) -> list[int]:
        return [*([] if self.bos_id is None else [self.bos_id]), *self.encode_with_specials(text)]

    def decode(self, ids: Sequence[int]) -> str:
        return decode_with_unknown_ids(
            ids, lambda token: 0 <= token < self.vocab_size, self.inner.decode
        )

    def boundary_detector(self) -> BoundaryDetector:
        return utf8_boundaries(self.token_bytes)

    def token_bytes(self, token: int) -> bytes:
        """The byte of a byte token; all other tokens, control symbols too, end a character."""
        if 0 <= token < self.vocab_size and self.inner.is_byte(token):
            return bytes.fromhex(self.inner.id_to_piece(token)[len("<0x") : -1])
        return ENDS_CHARACTER

    def id_to_token(self, token: int) -> str:
        return self.inner.id_to_piece(token)
