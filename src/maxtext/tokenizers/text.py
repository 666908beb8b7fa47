"""What the tokenizers share: text that libraries accept, ids that mean nothing, and work for every
core.
"""

import os
from collections.abc import Callable, Sequence
from itertools import groupby

UNKNOWN = "\ufffd"


def valid(text: str) -> str:
    """Half a surrogate pair, as a broken command line or JSON may hold, is not Unicode: it becomes
    a question mark.
    """
    return text if text.isascii() else text.encode("utf-8", errors="replace").decode("utf-8")


def decode_known(
    ids: Sequence[int], known: Callable[[int], bool], decode: Callable[[list[int]], str]
) -> str:
    """Text of ids of which some may be outside the vocabulary: a model may produce them; shown, not
    skipped.
    """
    runs = groupby(map(int, ids), known)
    return "".join(
        decode(list(run)) if inside else UNKNOWN * len(list(run)) for inside, run in runs
    )


def cores() -> int:
    """Of this process, which may be confined to some of the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
