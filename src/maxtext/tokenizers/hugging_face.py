"""Hugging Face tokenizers: tokenizer.json, read by the `tokenizers` library, and the files next to
it.

The text of a special token in a document is encoded as plain text: a page that shows `</s>` does
not end there. Added tokens that are not special stay tokens, as in the library.
"""

import functools
import json
import re
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from maxtext.common.errors import ConfigError
from maxtext.common.types import Json
from maxtext.tokenizers.interface import (
    ENDS_CHARACTER,
    BoundaryDetector,
    byte_run_boundaries,
    every_boundary,
    read_chat_template,
    read_tokenizer_config,
    special_token_texts,
    utf8_boundaries,
)
from maxtext.tokenizers.pretoken_cache import PretokenCache
from maxtext.tokenizers.text_utils import decode_with_unknown_ids, replace_surrogates

MIN_BATCH_CHARS = 2000  # for less, another thread would take longer than the text
MIN_BATCH_IDS = 1000
BYTE_TOKEN = re.compile("<0x[0-9a-fA-F]{2}>")  # a byte, for the decoder `ByteFallback`


class HuggingFaceTokenizer:
    kind = "huggingface"

    def __init__(self, path: Path):
        """`path`: tokenizer.json, under any name."""
        self.path = path
        self.name = str(path)
        self.inner = open_library_tokenizer(path)
        self.inner.encode_special_tokens = True  # as plain text
        tokenizer_config = read_tokenizer_config(path.parent)
        self.special_tokens = special_token_texts(tokenizer_config)
        self.chat_template = read_chat_template(path.parent, tokenizer_config)
        self.bos_id = self.special_id("bos_token")
        self.eos_id = self.special_id("eos_token")
        pad_id = self.special_id("pad_token")
        self.pad_id = 0 if pad_id is None else pad_id
        self.token_ids = frozenset(self.inner.get_vocab(with_added_tokens=True).values())
        self.vocab_size = max(self.token_ids, default=-1) + 1
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        # The library's own pickle loses encode_special_tokens.
        return type(self), (self.path.absolute(),)

    @cached_property
    def with_specials(self) -> Tokenizer:
        """A second copy, since encode_special_tokens is a state of the tokenizer."""
        return open_library_tokenizer(self.path)

    def special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.inner.token_to_id(text)

    def encode(self, text: str) -> list[int]:
        return encode_text(self.inner, text)

    @cached_property
    def pretoken_cache(self) -> PretokenCache | None:
        return PretokenCache.from_tokenizer(self.inner)

    def encode_batch(self, texts: Sequence[str], specials: bool = False) -> list[np.ndarray]:
        if specials:
            return encode_batch(self.with_specials, texts)
        with self.lock:
            cache = self.pretoken_cache
        if cache is None:
            return encode_batch(self.inner, texts)
        ids = cache.encode_batch(texts)
        uncached = [text for text, cached in zip(texts, ids, strict=True) if cached is None]
        rest = iter(encode_batch(self.inner, uncached))
        return [next(rest) if cached is None else cached for cached in ids]

    def encode_with_specials(self, text: str) -> list[int]:
        return encode_text(self.with_specials, text)

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = self.with_specials.encode(replace_surrogates(text), add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def encode_prompt(self, text: str) -> list[int]:
        return encode_text(self.with_specials, text, add_special_tokens=True)

    def decode(self, ids: Sequence[int]) -> str:
        return decode_with_unknown_ids(
            ids,
            self.token_ids.__contains__,
            lambda run: decode_ids(self.inner, run),
        )

    def boundary_detector(self) -> BoundaryDetector:
        if "ByteFallback" in self.decoder_steps:
            return byte_run_boundaries(self.is_byte, self.special_ids.__contains__)
        if "ByteLevel" in self.decoder_steps:
            return utf8_boundaries(self.cached_token_bytes)
        return every_boundary()

    @cached_property
    def decoder_steps(self) -> list[str]:
        """The types of the decoder's steps; empty without a decoder."""
        if self.inner.decoder is None:
            return []
        return step_types(json.loads(self.inner.decoder.__getstate__()))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        added = self.inner.get_added_tokens_decoder()
        return frozenset(token for token, entry in added.items() if entry.special)

    def is_byte(self, token: int) -> bool:
        return token in self.token_ids and BYTE_TOKEN.fullmatch(self.id_to_token(token)) is not None

    @cached_property
    def cached_token_bytes(self) -> Callable[[int], bytes]:
        return functools.cache(self.token_bytes)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a byte-level token, whose letters stand for bytes. A token with any other
        letter is plain text.
        """
        if token in self.special_ids:
            return b""
        if token not in self.token_ids:
            return ENDS_CHARACTER
        text = self.id_to_token(token)
        try:
            return bytes(BYTE_OF_LETTER[letter] for letter in text)
        except KeyError:
            return text.encode()

    def id_to_token(self, token: int) -> str:
        return self.inner.id_to_token(token) or ""


def byte_letters() -> dict[str, int]:
    """The byte of each letter in byte-level vocabularies: a printable byte stands for itself, the
    others are the letters from U+0100 on, in order.
    """
    letters = set(ByteLevel.alphabet())
    unprintable = iter(sorted(letter for letter in letters if ord(letter) >= 0x100))
    return {chr(byte) if chr(byte) in letters else next(unprintable): byte for byte in range(256)}


BYTE_OF_LETTER = byte_letters()


def step_types(decoder: Json) -> list[str]:
    nested = [name for step in decoder.get("decoders", ()) for name in step_types(step)]
    return [decoder["type"], *nested]


def encode_text(tokenizer: Tokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
    """The ids of a text. While the library encodes a batch, other threads run."""
    valid_text = replace_surrogates(text)
    if len(valid_text) < MIN_BATCH_CHARS:
        return tokenizer.encode(valid_text, add_special_tokens=add_special_tokens).ids
    encodings = tokenizer.encode_batch_fast([valid_text], add_special_tokens=add_special_tokens)
    return encodings[0].ids


def decode_ids(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of ids without special tokens. While the library decodes a batch, other threads
    run.
    """
    if len(ids) < MIN_BATCH_IDS:
        return tokenizer.decode(ids, skip_special_tokens=True)
    return tokenizer.decode_batch([ids], skip_special_tokens=True)[0]


def encode_batch(tokenizer: Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    valid_texts = [replace_surrogates(text) for text in texts]
    encodings = tokenizer.encode_batch_fast(valid_texts, add_special_tokens=False)
    return [np.array(encoding.ids, np.int32) for encoding in encodings]


def open_library_tokenizer(path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exceptions
        raise ConfigError(f"{path} is not a Hugging Face tokenizer: {error}") from error
    # Some files have truncation or padding of earlier batches; documents need neither.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
