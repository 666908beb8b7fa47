"""Helpers of all tokenizers: invalid Unicode, unknown ids and the number of CPU cores."""

import os
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

UNKNOWN = "\ufffd"


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which a broken command line or JSON may hold, by question marks."""
    return text if text.isascii() else text.encode("utf-8", errors="replace").decode("utf-8")


def chars_of_bytes(text: str, spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Convert (start, end) in the UTF-8 bytes of a text to its characters. A character belongs to
    every span that has one of its bytes.
    """
    if text.isascii():
        return list(spans)
    char_of_byte = [
        index for index, char in enumerate(text) for _ in char.encode("utf-8", errors="replace")
    ]
    char_of_byte.append(len(text))
    return [
        (char_of_byte[start], char_of_byte[end - 1] + 1 if end > start else char_of_byte[start])
        for start, end in spans
    ]


def decode_with_unknown_ids(
    token_ids: Sequence[int],
    is_known: Callable[[int], bool],
    decode: Callable[[list[int]], str],
) -> str:
    """Decode runs of known ids; each id outside the vocabulary becomes U+FFFD.

    A model whose vocabulary is padded can produce such ids. They are shown, not skipped.
    """
    runs = groupby(map(int, token_ids), is_known)
    return "".join(decode(list(run)) if known else UNKNOWN * len(list(run)) for known, run in runs)


def num_cores() -> int:
    """CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
