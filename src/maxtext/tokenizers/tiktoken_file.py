"""tiktoken vocabularies: a file with a line `base64-of-the-token rank` for each token, or the name
of an encoding that tiktoken downloads.

The file has neither the pre-token pattern nor the special tokens: see tiktoken_encodings.py. The
text of a special token in a document is encoded as plain text.
"""

import base64
import binascii
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from maxtext.common.errors import ConfigError
from maxtext.common.extras import require
from maxtext.tokenizers.boundaries import ENDS_CHARACTER, BoundaryDetector, utf8_boundaries
from maxtext.tokenizers.text_utils import (
    chars_of_bytes,
    decode_with_unknown_ids,
    num_cores,
    replace_surrogates,
)
from maxtext.tokenizers.tiktoken_encodings import ENDOFTEXT, EncodingSpec, encoding_spec
from maxtext.tokenizers.tokenizer_config import (
    ChatTemplateSource,
    read_chat_template,
    read_tokenizer_config,
)

RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+")
# Longer runs of white space are split: the library's regex engine overflows on a few hundred
# thousand characters.
MAX_WHITESPACE_RUN = 100_000


class TiktokenTokenizer:
    kind = "tiktoken"
    chat_template: ChatTemplateSource = None

    def __init__(self, path: Path | str, quiet: bool = False):
        """`path`: a file as a Path, or the name of a published encoding as a str. `quiet`
        suppresses the warning about an unknown encoding.
        """
        library = require("tiktoken", f"the tokenizer {path}")
        self.path = path
        self.name = str(path)
        if isinstance(path, str):
            self.inner = download_encoding(library, path)
            texts = self.inner.special_tokens_set
            specials = {text: self.inner.encode_single_token(text) for text in texts}
            spec = EncodingSpec("", specials, bos=None, eos=ENDOFTEXT)
        else:
            ranks = read_ranks(path)
            tokenizer_config = read_tokenizer_config(path.parent)
            spec = encoding_spec(path, len(ranks), tokenizer_config, warn=not quiet)
            self.chat_template = read_chat_template(path.parent, tokenizer_config)
            self.inner = library.Encoding(
                path.name,
                pat_str=spec.pattern,
                mergeable_ranks=ranks,
                special_tokens=spec.specials,
            )
        self.special_ids = frozenset(spec.specials.values())
        self.vocab_size = self.inner.n_vocab
        roles = {"bos_token": spec.bos, "eos_token": spec.eos, "pad_token": spec.pad}
        self.special_tokens = {name: text for name, text in roles.items() if text is not None}
        self.bos_id = None if spec.bos is None else spec.specials[spec.bos]
        self.eos_id = spec.specials[spec.eos]
        self.pad_id = 0 if spec.pad is None else spec.specials[spec.pad]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path if isinstance(self.path, str) else self.path.absolute(), True)

    def encode(self, text: str) -> list[int]:
        return self.array(text).tolist()

    def encode_batch(self, texts: Sequence[str], specials: bool = False) -> list[np.ndarray]:
        threads = min(num_cores(), len(texts))
        if threads < 2:
            return [self.array(text, specials) for text in texts]
        num_chunks = threads * 4  # balances threads when some texts are long
        bounds = [len(texts) * index // num_chunks for index in range(num_chunks + 1)]
        chunks = [texts[start:end] for start, end in pairwise(bounds)]
        with ThreadPoolExecutor(threads) as pool:
            arrays = pool.map(lambda chunk: [self.array(text, specials) for text in chunk], chunks)
            return list(chain.from_iterable(arrays))

    def encode_with_specials(self, text: str) -> list[int]:
        return self.array(text, specials=True).tolist()

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ids = self.encode_with_specials(text)
        sizes = (len(self.inner.decode_single_token_bytes(token)) for token in ids)
        return ids, chars_of_bytes(text, pairwise(accumulate(sizes, initial=0)))

    def encode_prompt(self, text: str) -> list[int]:
        return [*([] if self.bos_id is None else [self.bos_id]), *self.encode_with_specials(text)]

    def array(self, text: str, specials: bool = False) -> np.ndarray:
        allowed = self.inner.special_tokens_set if specials else set()
        arrays = [
            self.inner.encode_to_numpy(part, allowed_special=allowed, disallowed_special=())
            for part in split_long_whitespace(replace_surrogates(text))
        ]
        return (arrays[0] if len(arrays) == 1 else np.concatenate(arrays)).astype(np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        # The bytes of a run of ids are joined before they are decoded, so that characters may span
        # tokens. An unknown id ends the run.
        ordinary = [token for token in map(int, ids) if token not in self.special_ids]
        return decode_with_unknown_ids(ordinary, self.is_known, self.decode_run)

    def boundary_detector(self) -> BoundaryDetector:
        return utf8_boundaries(self.token_bytes)

    def token_bytes(self, token: int) -> bytes:
        if token in self.special_ids:
            return b""
        return (
            self.inner.decode_single_token_bytes(token) if self.is_known(token) else ENDS_CHARACTER
        )

    def decode_run(self, ids: list[int]) -> str:
        return self.inner.decode_bytes(ids).decode("utf-8", errors="replace")

    def is_known(self, token: int) -> bool:
        if not 0 <= token < self.vocab_size:
            return False
        try:
            self.inner.decode_single_token_bytes(token)
        except KeyError:  # a gap between the ranks and the special tokens
            return False
        return True

    def id_to_token(self, token: int) -> str:
        return self.inner.decode_single_token_bytes(token).decode(
            "utf-8", errors="backslashreplace"
        )


def split_long_whitespace(text: str) -> list[str]:
    """Split a text after each MAX_WHITESPACE_RUN characters of white space."""
    if len(text) < MAX_WHITESPACE_RUN:
        return [text]
    runs = re.finditer(rf"\s{{{MAX_WHITESPACE_RUN}}}", text)
    ends = [0, *(run.end() for run in runs), len(text)]
    return [text[start:end] for start, end in pairwise(ends)]


def is_rank_file(head: bytes) -> bool:
    """Whether a file that starts with `head` is a list of ranks."""
    return RANK_LINE.fullmatch(head.split(b"\n", 1)[0].strip()) is not None


def read_ranks(path: Path) -> dict[bytes, int]:
    """Ranks by token. Raises ConfigError unless all bytes are tokens and ranks have no gaps."""
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
            f"{path} is not a complete tiktoken vocabulary: {missing} of the 256 bytes are no token"
        )
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ConfigError(
            f"{path} is not a complete tiktoken vocabulary: its ranks are not 0 to {len(ranks) - 1}"
        )
    return ranks


def download_encoding(library: Any, name: str) -> Any:
    try:
        return library.get_encoding(name)
    except Exception as error:  # network and cache errors have no common base class
        raise ConfigError(
            f"tiktoken could not fetch {name} ({type(error).__name__}): download {name}.tiktoken "
            "and name that file, or set TIKTOKEN_CACHE_DIR to a folder that has it"
        ) from error
