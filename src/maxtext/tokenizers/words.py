"""The ids of words, remembered: most of a text is words that were seen before.

A byte-level BPE cuts a text into words with a pattern and looks at each word alone, so a word has
the same ids wherever it stands. Here the standard library's `re` cuts, a dictionary knows the ids,
and the `tokenizers` library is asked for new words only: the same ids in a fraction of the time.

The two regular-expression engines must agree on every text. So only texts of KNOWN characters are
cut here, and what \\p{L}, \\s and the like are among those is asked of the library itself. Other
texts, and other kinds of tokenizers, are left to the library.
"""

import json
import re
import threading
import unicodedata
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
from tokenizers import Regex, Tokenizer, normalizers
from tokenizers.pre_tokenizers import ByteLevel

# What ByteLevel does with use_regex
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Latin, Greek, Cyrillic, signs and symbols, pictures: no marks that join what stands before them
BLOCKS = ((0, 0x300), (0x370, 0x530), (0x2000, 0x2C00), (0x1F000, 0x1FB00))
ASCII = "".join(map(chr, range(128)))
FOLDED = (
    "\u0130\u0131\u017f"  # equal to i or s in one engine and not in the other when case is ignored
)
NOTHING = "\ue000"  # is not known, so a class of it never matches
CLASS = re.compile(r"\\[pP]\{\^?\w+\}|\\[sSdDwW]")
# Escapes that mean the same in both, once classes are replaced: signs, and the usual white space
ESCAPE = re.compile(r"\\([^\W_])")
MOST = 2**25  # characters of words that are remembered


def known_characters() -> str:
    """Characters that stay what they are under normalization, whatever stands beside them."""
    every = (chr(code) for start, end in BLOCKS for code in range(start, end))
    return "".join(
        one
        for one in every
        if unicodedata.category(one)[0] != "M"
        and unicodedata.category(one) != "Cn"
        and unicodedata.normalize("NFC", one) == one
        and one not in FOLDED
    )


class Words:
    """`inner`: a tokenizer for which `pattern_of` gave a pattern. Used by many threads at once."""

    def __init__(self, inner: Tokenizer, pattern: str, added: Sequence[str]):
        known = known_characters()
        self.cut = re.compile(translated(pattern, known)).findall
        # Most texts need no more, and small classes are matched faster.
        self.cut_ascii = re.compile(translated(pattern, ASCII)).findall
        # A text with one of these is not for us: a character that is not known, an added token that
        # is not special.
        others = "|".join(map(re.escape, sorted(added)))
        self.strange = re.compile(
            f"[^{char_class(known)}]" + (f"|{others}" if others else "")
        ).search
        self.plain = not added
        self.whole = Tokenizer.from_str(inner.to_str())
        self.whole.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
        self.whole.encode_special_tokens = True
        self.ids: dict[str, bytes] = {}
        self.size = 0
        self.lock = threading.Lock()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray | None]:
        """The ids of each text; None for a text that the library must cut."""
        cut = [self.words(text) for text in texts]
        ids = self.learn(set(chain.from_iterable(words for words in cut if words is not None)))
        return [None if words is None else joined(ids, words) for words in cut]

    def words(self, text: str) -> list[str] | None:
        simple = text.isascii()
        if not (self.plain and simple) and self.strange(text):
            return None
        words = (self.cut_ascii if simple else self.cut)(text)
        return (
            words if sum(map(len, words)) == len(text) else None
        )  # between matches the library has words too

    def learn(self, words: set[str]) -> dict[str, bytes]:
        """The dictionary that knows these words."""
        with self.lock:
            if self.size > MOST:
                self.ids, self.size = {}, 0  # a new one: other threads may still read from the old
            ids = self.ids
        new = [word for word in words if word not in ids]
        encoded = self.whole.encode_batch_fast(new, add_special_tokens=False)
        ids.update(
            (word, np.array(one.ids, np.int32).tobytes())
            for word, one in zip(new, encoded, strict=True)
        )
        with self.lock:
            self.size += sum(map(len, new))
        return ids


def joined(ids: dict[str, bytes], words: list[str]) -> np.ndarray:
    return np.frombuffer(b"".join(map(ids.__getitem__, words)), np.int32)


def words_of(inner: Tokenizer) -> Words | None:
    """None when this tokenizer does not look at each word alone, or how it cuts cannot be said in
    `re`.
    """
    settings = json.loads(inner.to_str())
    pattern = pattern_of(settings)
    if pattern is None:
        return None
    added = [one["content"] for one in settings["added_tokens"] if not one["special"]]
    try:
        return Words(inner, pattern, added)
    except re.error:
        return None


def pattern_of(settings: dict) -> str | None:
    model, cutter, normalizer = settings["model"], settings["pre_tokenizer"], settings["normalizer"]
    if model["type"] != "BPE" or model.get("dropout") or not cutter:
        return None
    if normalizer and normalizer != {"type": "NFC"}:
        return None
    steps = cutter["pretokenizers"] if cutter["type"] == "Sequence" else [cutter]
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


def translated(pattern: str, known: str) -> str:
    """The pattern in the words of `re`, for texts of known characters; re.error if it cannot be
    said.
    """
    if re.search(r"&&|\\[\[\]]|\[[^\]]*\[", pattern) or re.search(r"\((?!\?)", pattern):
        raise re.error("sets of sets, or groups")
    left = CLASS.sub("", pattern)
    if set(ESCAPE.findall(left)) - set("rntfv"):
        raise re.error("an escape with a meaning of its own")

    def replace(found: re.Match) -> str:
        without = normalizers.Replace(Regex(found[0]), "").normalize_str(known)
        inside = char_class(sorted(set(known).difference(without)) or NOTHING)
        before = pattern[: found.start()]
        return inside if before.rfind("[") > before.rfind("]") else f"[{inside}]"

    return CLASS.sub(replace, pattern)


def char_class(characters: Iterable[str]) -> str:
    """What stands between the brackets of a set of characters, as ranges."""
    codes = np.array(sorted(map(ord, characters)))
    ends = np.flatnonzero(np.append(np.diff(codes) > 1, True))
    starts = np.concatenate([[0], ends[:-1] + 1])
    return "".join(
        f"\\U{codes[a]:08x}-\\U{codes[b]:08x}" for a, b in zip(starts, ends, strict=True)
    )
