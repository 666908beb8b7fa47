"""tiktoken vocabularies: a file with a line `base64-of-the-token rank` for each token, or a name
that tiktoken knows.

How text is split and which special tokens there are is not in the file: see schemes.py. Text of
special tokens in a document is plain text.
"""

import base64
import binascii
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from maxtext.common.errors import ConfigError
from maxtext.common.extras import require
from maxtext.tokenizers.beside import own_template, read_settings
from maxtext.tokenizers.boundaries import ENDS_CHARACTER, BoundaryDetector, utf8_boundaries
from maxtext.tokenizers.schemes import ENDOFTEXT, Scheme, scheme_of
from maxtext.tokenizers.text import cores, decode_known, valid

LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+")
# A run of more white space than this is cut: the library's regular expressions overflow on some
# hundred thousand.
RUN = 100_000


class TiktokenTokenizer:
    kind = "tiktoken"
    chat_template: str | None = None

    def __init__(self, path: Path | str, quiet: bool = False):
        """`path`: a file; a str is a name that tiktoken knows. `quiet`: what is to be said was
        said.
        """
        library = require("tiktoken", f"the tokenizer {path}")
        self.path = path
        self.name = str(path)
        if isinstance(path, str):
            self.inner = published(library, path)
            texts = self.inner.special_tokens_set
            scheme = Scheme(
                "", {text: self.inner.encode_single_token(text) for text in texts}, None, ENDOFTEXT
            )
        else:
            ranks = read_ranks(path)
            settings = read_settings(path.parent)
            scheme = scheme_of(path, len(ranks), settings, quiet)
            self.chat_template = own_template(path.parent, settings)
            self.inner = library.Encoding(
                path.name,
                pat_str=scheme.pattern,
                mergeable_ranks=ranks,
                special_tokens=scheme.specials,
            )
        self.specials = frozenset(scheme.specials.values())
        self.vocab_size = self.inner.n_vocab
        named = {"bos_token": scheme.bos, "eos_token": scheme.eos, "pad_token": scheme.pad}
        self.special_tokens = {name: text for name, text in named.items() if text is not None}
        self.bos_id = None if scheme.bos is None else scheme.specials[scheme.bos]
        self.eos_id = scheme.specials[scheme.eos]
        self.pad_id = 0 if scheme.pad is None else scheme.specials[scheme.pad]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path if isinstance(self.path, str) else self.path.absolute(), True)

    def encode(self, text: str) -> list[int]:
        return self.array(text).tolist()

    def encode_batch(self, texts: Sequence[str], specials: bool = False) -> list[np.ndarray]:
        threads = min(cores(), len(texts))
        if threads < 2:
            return [self.array(text, specials) for text in texts]
        parts = threads * 4  # some texts are long: a thread that is done early takes another part
        slices = [
            texts[len(texts) * part // parts : len(texts) * (part + 1) // parts]
            for part in range(parts)
        ]
        with ThreadPoolExecutor(threads) as pool:
            arrays = pool.map(lambda some: [self.array(text, specials) for text in some], slices)
            return list(chain.from_iterable(arrays))

    def encode_with_specials(self, text: str) -> list[int]:
        return self.array(text, specials=True).tolist()

    def encode_prompt(self, text: str) -> list[int]:
        return [*([] if self.bos_id is None else [self.bos_id]), *self.encode_with_specials(text)]

    def array(self, text: str, specials: bool = False) -> np.ndarray:
        allowed = self.inner.special_tokens_set if specials else set()
        parts = bounded(valid(text))
        runs = [
            self.inner.encode_to_numpy(part, allowed_special=allowed, disallowed_special=())
            for part in parts
        ]
        return (runs[0] if len(runs) == 1 else np.concatenate(runs)).astype(np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        # Bytes of a run are joined before they become characters; an id without meaning ends a
        # character.
        return decode_known(
            [token for token in map(int, ids) if token not in self.specials], self.knows, self.text
        )

    def boundaries(self) -> BoundaryDetector:
        return utf8_boundaries(self.token_bytes)

    def token_bytes(self, token: int) -> bytes:
        if token in self.specials:
            return b""
        return self.inner.decode_single_token_bytes(token) if self.knows(token) else ENDS_CHARACTER

    def text(self, ids: list[int]) -> str:
        return self.inner.decode_bytes(ids).decode("utf-8", errors="replace")

    def knows(self, token: int) -> bool:
        if not 0 <= token < self.vocab_size:
            return False
        try:
            self.inner.decode_single_token_bytes(token)
        except KeyError:  # a hole between ranks and special tokens
            return False
        return True

    def piece(self, token: int) -> str:
        return self.inner.decode_single_token_bytes(token).decode(
            "utf-8", errors="backslashreplace"
        )


def bounded(text: str) -> list[str]:
    """The text in parts without endless white space; the whole text, but for very few."""
    if len(text) < RUN:
        return [text]
    ends = [0, *(run.end() for run in re.finditer(rf"\s{{{RUN}}}", text)), len(text)]
    return [text[start:end] for start, end in pairwise(ends)]


def looks_like_ranks(first: bytes) -> bool:
    """Whether a file that begins so is a list of ranks."""
    return LINE.fullmatch(first.split(b"\n", 1)[0].strip()) is not None


def read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ConfigError(
                f"{path}, line {number}: not a token in base64 and its rank ({error})"
            ) from error
    missing = sum(bytes([value]) not in ranks for value in range(256))
    if missing:
        raise ConfigError(
            f"{path} is not a whole vocabulary of tiktoken: {missing} of the 256 bytes are no token"
        )
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ConfigError(
            f"{path} is not a whole vocabulary of tiktoken: its ranks are not 0 to {len(ranks) - 1}"
        )
    return ranks


def published(library: Any, name: str) -> Any:
    try:
        return library.get_encoding(name)
    except Exception as error:  # of the network, of the cache
        raise ConfigError(
            f"tiktoken could not fetch {name} ({type(error).__name__}): download {name}.tiktoken and name that file, "
            "or let TIKTOKEN_CACHE_DIR be a folder that has it"
        ) from error
