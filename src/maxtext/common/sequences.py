"""Sequences of any elements."""

from collections.abc import Sequence


def common_prefix_length(first: Sequence[object], second: Sequence[object]) -> int:
    """The number of leading elements that two sequences have in common."""
    shorter = min(len(first), len(second))
    return next((index for index in range(shorter) if first[index] != second[index]), shorter)
