"""tiktoken vocabularies: a file with a line `base64-of-the-token rank` for each token, or the name
of an encoding that tiktoken downloads.

The file has neither the pattern that splits text into pre-tokens nor the special tokens.
`encoding_spec` chooses both by the number of ranks, which identifies the published encodings: Llama
3, Kimi K2, r50k_base (GPT-2), cl100k_base, o200k_base. Any other file is read as Llama 3's, with
its pattern and its 256 special tokens, after a warning. A tokenizer_config.json next to the file
overrides the names of special tokens. The text of a special token in a document is encoded as plain
text.
"""

import base64
import binascii
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from maxtext.common.errors import ConfigError
from maxtext.common.extras import require
from maxtext.common.log import LOGGER
from maxtext.common.types import Json
from maxtext.tokenizers.interface import (
    ENDS_CHARACTER,
    BoundaryDetector,
    ChatTemplateSource,
    read_chat_template,
    read_tokenizer_config,
    special_token_texts,
    utf8_boundaries,
)
from maxtext.tokenizers.text_utils import (
    chars_of_bytes,
    decode_with_unknown_ids,
    num_cores,
    replace_surrogates,
)

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
PREFIX = r"[^\r\n\p{L}\p{N}]?"
DIGITS = r"\p{N}{1,3}"
PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
WHITESPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
NON_WHITESPACE = rf"{CONTRACTIONS}|{PREFIX}\p{{L}}+|{DIGITS}|{PUNCTUATION}"
LLAMA3_PATTERN = rf"{NON_WHITESPACE}|{WHITESPACE}"
ENDOFTEXT = "<|endoftext|>"
NUM_SPECIALS = 256  # ids after the ranks, in Llama 3 and Kimi K2
LLAMA4_RANKS = 200_000


@dataclass(frozen=True)
class EncodingSpec:
    """The pattern of pre-tokens, the ids of special tokens by text, and the roles of some."""

    pattern: str
    specials: dict[str, int]
    bos: str | None
    eos: str
    pad: str | None = None


def cased_words(intersection: str = "") -> str:
    """Words that are split before a capital letter; `intersection` narrows the letter classes."""
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{intersection}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{intersection}]"
    mixed_case = rf"{PREFIX}{upper}*{lower}+{CONTRACTIONS}?"
    upper_case = rf"{PREFIX}{upper}+{lower}*{CONTRACTIONS}?"
    return f"{mixed_case}|{upper_case}"


def llama3(num_ranks: int) -> EncodingSpec:
    """Llama 3.1. Version 3.0 has the same ids; three of them are reserved there."""
    named = {
        0: "begin_of_text",
        1: "end_of_text",
        4: "finetune_right_pad_id",
        6: "start_header_id",
        7: "end_header_id",
        8: "eom_id",
        9: "eot_id",
        10: "python_tag",
    }
    reserved = iter(range(NUM_SPECIALS))
    names = [
        named.get(index) or f"reserved_special_token_{next(reserved)}"
        for index in range(NUM_SPECIALS)
    ]
    return EncodingSpec(
        LLAMA3_PATTERN,
        specials={f"<|{name}|>": num_ranks + index for index, name in enumerate(names)},
        bos="<|begin_of_text|>",
        eos="<|end_of_text|>",
        pad="<|finetune_right_pad_id|>",
    )


def kimi(num_ranks: int) -> EncodingSpec:
    """Kimi K2 splits Han characters from other words. Its tokenizer_config.json names more special
    tokens.
    """
    reserved = {
        f"<|reserved_token_{token_id}|>": token_id
        for token_id in range(num_ranks + 2, num_ranks + NUM_SPECIALS)
    }
    not_han = r"&&[^\p{Han}]"
    return EncodingSpec(
        rf"[\p{{Han}}]+|{cased_words(not_han)}|{DIGITS}|{PUNCTUATION}|{WHITESPACE}",
        specials={"[BOS]": num_ranks, "[EOS]": num_ranks + 1, **reserved},
        bos="[BOS]",
        eos="[EOS]",
    )


def r50k(_: int) -> EncodingSpec:
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    return EncodingSpec(pattern, {ENDOFTEXT: 50256}, bos=None, eos=ENDOFTEXT)


def cl100k(_: int) -> EncodingSpec:
    specials = {
        ENDOFTEXT: 100257,
        "<|fim_prefix|>": 100258,
        "<|fim_middle|>": 100259,
        "<|fim_suffix|>": 100260,
        "<|endofprompt|>": 100276,
    }
    # Llama 3's pattern, except for white space at the end of a text.
    pattern = rf"{NON_WHITESPACE}|\s++$|{WHITESPACE}"
    return EncodingSpec(pattern, specials, bos=None, eos=ENDOFTEXT)


def o200k(_: int) -> EncodingSpec:
    pattern = rf"{cased_words()}|{DIGITS}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{WHITESPACE}"
    specials = {ENDOFTEXT: 199999, "<|endofprompt|>": 200018}
    return EncodingSpec(pattern, specials, bos=None, eos=ENDOFTEXT)


# by number of ranks
PUBLISHED = {128000: llama3, 163584: kimi, 50256: r50k, 100256: cl100k, 199998: o200k}


def encoding_spec(
    path: Path, num_ranks: int, tokenizer_config: Json, warn: bool = True
) -> EncodingSpec:
    """The spec of a file with `num_ranks` ranks; `tokenizer_config` may rename special tokens."""
    if num_ranks == LLAMA4_RANKS:
        raise ConfigError(
            f"{path} has the {num_ranks} tokens of Llama 4: "
            "use the tokenizer.json that is published with it"
        )
    if num_ranks not in PUBLISHED and warn:
        LOGGER.warning(
            "%s has %d tokens, which is no published encoding known here: reading it as Llama 3's",
            path,
            num_ranks,
        )
    spec = PUBLISHED.get(num_ranks, llama3)(num_ranks)
    return rename_special_tokens(spec, path, num_ranks, tokenizer_config)


def rename_special_tokens(
    spec: EncodingSpec, path: Path, num_ranks: int, tokenizer_config: Json
) -> EncodingSpec:
    """Apply the texts and roles that tokenizer_config.json gives to the ids after the ranks."""
    try:
        added_tokens = {
            int(token_id): str(entry["content"])
            for token_id, entry in tokenizer_config.get("added_tokens_decoder", {}).items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        file = path.parent / "tokenizer_config.json"
        raise ConfigError(
            f"{file}: added_tokens_decoder must give a content for each id ({error!r})"
        ) from error
    texts = {token_id: text for text, token_id in spec.specials.items()}
    texts |= {token_id: text for token_id, text in added_tokens.items() if token_id >= num_ranks}
    specials = {text: token_id for token_id, text in texts.items()}

    def role(name: str, default: str | None) -> str | None:
        text = special_token_texts(tokenizer_config).get(name)
        if text in specials:
            return text
        return default if default in specials else None

    eos = role("eos_token", spec.eos)
    if eos is None:
        raise ConfigError(
            f"{path.parent / 'tokenizer_config.json'} names no eos_token that is a special token"
        )
    return replace(
        spec,
        specials=specials,
        bos=role("bos_token", spec.bos),
        eos=eos,
        pad=role("pad_token", spec.pad),
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

    def __reduce__(self) -> tuple[object, ...]:
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
