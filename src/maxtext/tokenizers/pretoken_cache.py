"""A cache of pre-tokens and their ids for byte-level BPE: most pre-tokens of a text repeat.

Byte-level BPE splits a text into pre-tokens by a regular expression and encodes each pre-token on
its own, so that a pre-token always has the same ids. Here Python's `re` splits, a dictionary holds
the ids, and the `tokenizers` library encodes new pre-tokens only. The ids are the same, in a
fraction of the time.

The two regular-expression engines must agree on every text. Therefore only texts of SUPPORTED
characters are split here, and the members of classes such as \\p{L} and \\s among these characters
come from the library itself. Other texts, and other kinds of tokenizers, are left to the library.
"""

import json
import re
import threading
import unicodedata
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain

import numpy as np
from tokenizers import Regex, Tokenizer, normalizers
from tokenizers.pre_tokenizers import ByteLevel

from maxtext.common.types import Json

# The pattern of ByteLevel(use_regex=True).
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Latin, Greek, Cyrillic, punctuation, symbols, emoji: no combining marks.
BLOCKS = ((0, 0x300), (0x370, 0x530), (0x2000, 0x2C00), (0x1F000, 0x1FB00))
ASCII = "".join(map(chr, range(128)))
CASE_MISMATCHES = "\u0130\u0131\u017f"  # one engine equates them to i or s when it ignores case
UNMATCHED = "\ue000"  # is not supported, so a class of it never matches
CLASS = re.compile(r"\\[pP]\{\^?\w+\}|\\[sSdDwW]")
# After classes are replaced, the escapes that mean the same in both engines are r, n, t, f, v.
ESCAPE = re.compile(r"\\([^\W_])")
MAX_CHARS = 2**25  # characters of all cached pre-tokens


@cache
def supported_characters() -> str:
    """Characters that NFC normalization keeps, whatever their neighbours."""
    characters = (chr(code) for start, end in BLOCKS for code in range(start, end))
    return "".join(
        character
        for character in characters
        if unicodedata.category(character)[0] != "M"
        and unicodedata.category(character) != "Cn"
        and unicodedata.normalize("NFC", character) == character
        and character not in CASE_MISMATCHES
    )


class PretokenCache:
    """Ids of pre-tokens. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, pattern: str, added_tokens: Sequence[str]):
        """`pattern` splits text into pre-tokens; raises re.error if `re` cannot express it.
        `added_tokens` are the texts of added tokens that are not special.
        """
        supported = supported_characters()
        self.split_unicode = re.compile(to_python_regex(pattern, supported)).findall
        # Most texts are ASCII, and smaller character classes match faster.
        self.split_ascii = re.compile(to_python_regex(pattern, ASCII)).findall
        unsupported = f"[^{char_class(supported)}]"
        alternatives = [unsupported, *map(re.escape, sorted(added_tokens))]
        self.find_unsupported = re.compile("|".join(alternatives)).search
        self.has_added_tokens = bool(added_tokens)
        self.encoder = Tokenizer.from_str(tokenizer.to_str())  # encodes a pre-token, without split
        self.encoder.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
        self.encoder.encode_special_tokens = True
        self.ids: dict[str, bytes] = {}  # pre-token -> int32 ids
        self.num_chars = 0
        self.lock = threading.Lock()

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> "PretokenCache | None":
        """None if the tokenizer does not encode pre-tokens independently, or if `re` cannot express
        its pattern.
        """
        settings = json.loads(tokenizer.to_str())
        pattern = pretoken_pattern(settings)
        if pattern is None:
            return None
        added = [token["content"] for token in settings["added_tokens"] if not token["special"]]
        try:
            return cls(tokenizer, pattern, added)
        except re.error:
            return None

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray | None]:
        """The ids of each text; None for a text that the library must encode."""
        pretokens = [self.split(text) for text in texts]
        ids = self.insert(set(chain.from_iterable(split for split in pretokens if split)))
        return [None if split is None else concatenate(ids, split) for split in pretokens]

    def split(self, text: str) -> list[str] | None:
        """The pre-tokens of a text, or None if `re` might split it otherwise than the library."""
        ascii_only = text.isascii()
        if (self.has_added_tokens or not ascii_only) and self.find_unsupported(text):
            return None
        pretokens = (self.split_ascii if ascii_only else self.split_unicode)(text)
        # What lies between matches is also a pre-token of the library; findall leaves it out.
        return pretokens if sum(map(len, pretokens)) == len(text) else None

    def insert(self, pretokens: set[str]) -> dict[str, bytes]:
        """Encode the pre-tokens that are not cached; return a dictionary that has all of them."""
        with self.lock:
            if self.num_chars > MAX_CHARS:
                self.ids = {}  # a new dictionary: other threads may still read the old one
                self.num_chars = 0
            ids = self.ids
        new = [pretoken for pretoken in pretokens if pretoken not in ids]
        encodings = self.encoder.encode_batch_fast(new, add_special_tokens=False)
        ids.update(
            (pretoken, np.array(encoding.ids, np.int32).tobytes())
            for pretoken, encoding in zip(new, encodings, strict=True)
        )
        with self.lock:
            self.num_chars += sum(map(len, new))
        return ids


def concatenate(ids: dict[str, bytes], pretokens: list[str]) -> np.ndarray:
    return np.frombuffer(b"".join(map(ids.__getitem__, pretokens)), np.int32)


def pretoken_pattern(settings: Json) -> str | None:
    """The pattern by which a byte-level BPE (the JSON of its tokenizer) splits; None for others."""
    model, normalizer = settings["model"], settings["normalizer"]
    pre_tokenizer = settings["pre_tokenizer"]
    if model["type"] != "BPE" or model.get("dropout") or not pre_tokenizer:
        return None
    if normalizer and normalizer != {"type": "NFC"}:
        return None
    is_sequence = pre_tokenizer["type"] == "Sequence"
    steps = pre_tokenizer["pretokenizers"] if is_sequence else [pre_tokenizer]
    last = steps[-1]
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return None
    if len(steps) == 1:
        return GPT2 if last["use_regex"] else None
    first = steps[0]
    if len(steps) > 2 or last["use_regex"] or first["type"] != "Split":
        return None
    if first["behavior"] != "Isolated" or first["invert"] or "Regex" not in first["pattern"]:
        return None
    return first["pattern"]["Regex"]


def to_python_regex(pattern: str, characters: str) -> str:
    """Translate an Oniguruma pattern to `re`, for texts of `characters` only.

    Raises re.error if the pattern has no equivalent.
    """
    if re.search(r"&&|\\[\[\]]|\[[^\]]*\[", pattern) or re.search(r"\((?!\?)", pattern):
        raise re.error("nested sets or capturing groups")
    without_classes = CLASS.sub("", pattern)
    if set(ESCAPE.findall(without_classes)) - set("rntfv"):
        raise re.error("an escape that the engines interpret differently")

    def expand_class(match: re.Match) -> str:
        remaining = normalizers.Replace(Regex(match[0]), "").normalize_str(characters)
        members = char_class(sorted(set(characters).difference(remaining)) or UNMATCHED)
        before = pattern[: match.start()]
        in_brackets = before.rfind("[") > before.rfind("]")
        return members if in_brackets else f"[{members}]"

    return CLASS.sub(expand_class, pattern)


def char_class(characters: Iterable[str]) -> str:
    """The inside of a bracket expression that matches `characters`, as ranges."""
    codes = np.array(sorted(map(ord, characters)))
    ends = np.flatnonzero(np.append(np.diff(codes) > 1, True))
    starts = np.concatenate([[0], ends[:-1] + 1])
    return "".join(
        f"\\U{codes[a]:08x}-\\U{codes[b]:08x}" for a, b in zip(starts, ends, strict=True)
    )
