"""Tokenizers as Hugging Face ships them: tokenizer.json, read by the `tokenizers` library, and the
files beside it.

Text of special tokens in a document is plain text: a page that shows `</s>` does not end there.
Added tokens that are not special stay tokens, as everywhere in that library.
"""

import json
import re
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from maxtext.common.errors import ConfigError
from maxtext.tokenizers.beside import own_template, read_settings, special_texts
from maxtext.tokenizers.boundaries import (
    ENDS_CHARACTER,
    BoundaryDetector,
    byte_run_boundaries,
    every_boundary,
    utf8_boundaries,
)
from maxtext.tokenizers.text import decode_known, valid
from maxtext.tokenizers.words import Words, words_of

BYTE_TOKEN = re.compile("<0x[0-9a-fA-F]{2}>")  # what the decoder `ByteFallback` takes for a byte


class HuggingFaceTokenizer:
    kind = "huggingface"

    def __init__(self, path: Path):
        """`path`: of tokenizer.json, whatever its name."""
        self.path = path
        self.name = str(path)
        self.inner = opened(path)
        self.inner.encode_special_tokens = True  # means: as plain text
        settings = read_settings(path.parent)
        self.special_tokens = special_texts(settings)
        self.chat_template = own_template(path.parent, settings)
        self.bos_id, self.eos_id = self.special("bos_token"), self.special("eos_token")
        pad = self.special("pad_token")
        self.pad_id = 0 if pad is None else pad
        self.known = frozenset(self.inner.get_vocab(with_added_tokens=True).values())
        self.vocab_size = max(self.known, default=-1) + 1
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (
            self.path.absolute(),
        )  # the library's own pickle forgets what special text means

    @cached_property
    def with_specials(self) -> Tokenizer:
        """A second copy, since the meaning of special text is a state of the whole tokenizer."""
        return opened(self.path)

    def special(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.inner.token_to_id(text)

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(valid(text), add_special_tokens=False).ids

    @cached_property
    def remembered(self) -> Words | None:
        return words_of(self.inner)

    def encode_batch(self, texts: Sequence[str], specials: bool = False) -> list[np.ndarray]:
        if specials:
            return encoded(self.with_specials, texts)
        with self.lock:
            words = self.remembered
        if words is None:
            return encoded(self.inner, texts)
        found = words.encode_batch(texts)
        others = iter(
            encoded(
                self.inner, [text for text, ids in zip(texts, found, strict=True) if ids is None]
            )
        )
        return [next(others) if ids is None else ids for ids in found]

    def encode_with_specials(self, text: str) -> list[int]:
        return self.with_specials.encode(valid(text), add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        return self.with_specials.encode(valid(text), add_special_tokens=True).ids

    def decode(self, ids: Sequence[int]) -> str:
        return decode_known(
            ids,
            self.known.__contains__,
            lambda run: self.inner.decode(run, skip_special_tokens=True),
        )

    def boundaries(self) -> BoundaryDetector:
        if "ByteFallback" in self.decoder_steps:
            return byte_run_boundaries(self.is_byte, self.skipped.__contains__)
        if "ByteLevel" in self.decoder_steps:
            return utf8_boundaries(self.token_bytes)
        return every_boundary()

    @cached_property
    def decoder_steps(self) -> list[str]:
        """The types of the steps that turn pieces into text; empty without a decoder."""
        return (
            []
            if self.inner.decoder is None
            else step_types(json.loads(self.inner.decoder.__getstate__()))
        )

    @cached_property
    def skipped(self) -> frozenset[int]:
        """The ids of special tokens, which `decode` leaves out."""
        added = self.inner.get_added_tokens_decoder()
        return frozenset(token for token, entry in added.items() if entry.special)

    def is_byte(self, token: int) -> bool:
        return token in self.known and BYTE_TOKEN.fullmatch(self.piece(token)) is not None

    def token_bytes(self, token: int) -> bytes:
        """Of a byte-level piece: its letters stand for bytes; if one of them does not, all are
        text.
        """
        if token in self.skipped:
            return b""
        if token not in self.known:
            return ENDS_CHARACTER
        piece = self.piece(token)
        try:
            return bytes(BYTE_OF_LETTER[letter] for letter in piece)
        except KeyError:
            return piece.encode()

    def piece(self, token: int) -> str:
        return self.inner.id_to_token(token) or ""


def byte_letters() -> dict[str, int]:
    """The letter that stands for each byte in byte-level vocabularies: a printable byte is its own,
    the others have the letters from U+0100 on, in order."""
    letters = set(ByteLevel.alphabet())
    others = iter(sorted(letter for letter in letters if ord(letter) >= 0x100))
    return {chr(byte) if chr(byte) in letters else next(others): byte for byte in range(256)}


BYTE_OF_LETTER = byte_letters()


def step_types(decoder: dict[str, Any]) -> list[str]:
    nested = [name for step in decoder.get("decoders", ()) for name in step_types(step)]
    return [decoder["type"], *nested]


def encoded(inner: Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    found = inner.encode_batch_fast([valid(text) for text in texts], add_special_tokens=False)
    return [np.array(one.ids, np.int32) for one in found]


def opened(path: Path) -> Tokenizer:
    try:
        inner = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exceptions
        raise ConfigError(f"{path} is not a tokenizer of Hugging Face: {error}") from error
    # Some files keep the length that batches once had; a document is neither cut nor filled here.
    inner.no_truncation()
    inner.no_padding()
    return inner
