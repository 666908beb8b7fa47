"""Where a sequence of ids can be split without breaking a character, for incremental
detokenization.

A boundary detector is called with each id of a sequence in turn. It returns True if the text of the
ids so far is final: no later id can change it. A detector has state, so each sequence has its own.
"""

import codecs
from collections.abc import Callable

BoundaryDetector = Callable[[int], bool]

# A byte that is never part of UTF-8: an id without bytes ends the character before it.
ENDS_CHARACTER = b"\xff"


def utf8_boundaries(token_bytes: Callable[[int], bytes]) -> BoundaryDetector:
    """For vocabularies of bytes: a boundary is where no UTF-8 character is incomplete.

    `token_bytes` returns the bytes of an id: empty for ids that decoding skips, `ENDS_CHARACTER`
    for ids that decode to something else than bytes.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def is_boundary(token: int) -> bool:
        decoder.decode(token_bytes(token))
        incomplete_bytes, _ = decoder.getstate()
        return not incomplete_bytes

    return is_boundary


def byte_run_boundaries(
    is_byte: Callable[[int], bool], is_skipped: Callable[[int], bool]
) -> BoundaryDetector:
    """For decoders that validate a run of byte tokens at once: a boundary is where no run is open.

    The `ByteFallback` decoder of Hugging Face replaces every byte of a run, valid characters too,
    if any of them is invalid. `is_skipped`: ids that decoding removes before it looks for runs.
    """
    open_run = False

    def is_boundary(token: int) -> bool:
        nonlocal open_run
        if not is_skipped(token):
            open_run = is_byte(token)
        return not open_run

    return is_boundary


def every_boundary() -> BoundaryDetector:
    """For vocabularies whose tokens are whole characters."""
    return lambda token: True
