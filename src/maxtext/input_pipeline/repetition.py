"""OLMo's published repetition filter.

A sequence is repetitive if some n-gram of 1 to 13 tokens occurs in it 32 or more times in direct
succession. Equivalently, for some period p there are at least 31 p consecutive positions whose
token equals the token p positions before. OLMo masks the loss of such a sequence; it stays in its
batch.
"""

import numpy as np

PERIODS = range(1, 14)
TOO_MANY_TIMES = 32


def is_repetitive(tokens: np.ndarray) -> bool:
    """`tokens` [n] of any integer type."""
    return any(repeats(tokens, period) for period in PERIODS)


def repeats(tokens: np.ndarray, period: int) -> bool:
    """Whether some n-gram of `period` tokens occurs TOO_MANY_TIMES in succession."""
    equal = tokens[period:] == tokens[:-period]
    # A run of true values is a substring of their bytes, and bytes have the fastest search.
    return b"\1" * ((TOO_MANY_TIMES - 1) * period) in equal.tobytes()
