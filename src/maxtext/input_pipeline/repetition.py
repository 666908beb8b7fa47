"""Which sequences say the same thing over and over: OLMo's published repetition filter.

A sequence is repetitive when some n-gram of 1 to 13 tokens stands in it 32 times or more, one
directly after the other. In other words: for some period p there are at least 31 p places in a row
whose token equals the one p places before. OLMo trains on such a sequence with no loss at all; it
stays in its batch.
"""

import numpy as np

PERIODS = range(1, 14)
TOO_MANY_TIMES = 32


def is_repetitive(tokens: np.ndarray) -> bool:
    """`tokens` [n] of any integer type."""
    return any(repeats(tokens, period) for period in PERIODS)


def repeats(tokens: np.ndarray, period: int) -> bool:
    """Whether some n-gram of `period` tokens stands TOO_MANY_TIMES in a row."""
    equal = tokens[period:] == tokens[:-period]
    # A run of true values is a substring of their bytes, and no search in numpy is as fast as that
    # of bytes.
    return b"\1" * ((TOO_MANY_TIMES - 1) * period) in equal.tobytes()
