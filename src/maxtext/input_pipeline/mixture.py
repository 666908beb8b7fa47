"""The documents of several parts in one order, by weights: which part comes when, and where the
mixture ends.

The order is Grain's, which deals the parts by their weights alone. Its end is ours: with
`first_exhausted` where the first part has been read `epochs` times; with `all_exhausted` where the
last has, while the others are repeated.
"""

from collections.abc import Sequence

import grain


class Tag:
    """An index together with the number of its part."""

    def __init__(self, number: int):
        self.number = number

    def __call__(self, index: int) -> tuple[int, int]:
        return self.number, index


def mix(
    orders: Sequence[grain.MapDataset], weights: Sequence[float], epochs: int, strategy: str
) -> grain.MapDataset:
    """(part, index) of every document that is read. `orders`: of one epoch of each part."""
    if strategy == "first_exhausted":
        repeated = [order.repeat(epochs).map(Tag(number)) for number, order in enumerate(orders)]
        return grain.MapDataset.mix(repeated, weights=list(weights))
    counts = [len(order) for order in orders]
    read = documents_read(counts, weights, epochs, strategy)
    # An epoch more than is read, so that Grain does not end the mixture.
    repeated = [
        order.repeat(number // count + 2).map(Tag(part))
        for part, (order, number, count) in enumerate(zip(orders, read, counts, strict=True))
    ]
    return grain.MapDataset.mix(repeated, weights=list(weights))[: sum(read)]


def documents_read(
    counts: Sequence[int], weights: Sequence[float], epochs: int, strategy: str
) -> list[int]:
    """How many documents of each part the mixture reads."""
    # The whole numbers to which Grain rounds weights
    proportions = [int(weight * 100 / min(weights)) for weight in weights]
    total = sum(proportions)
    ends = [
        count * epochs / (share / total) for count, share in zip(counts, proportions, strict=True)
    ]
    if strategy == "first_exhausted":
        return dealt(int(min(ends)), proportions)
    length = int(max(ends))
    while any(
        read < count * epochs
        for read, count in zip(dealt(length, proportions), counts, strict=True)
    ):
        length += 1
    return dealt(length, proportions)


def dealt(length: int, proportions: Sequence[int]) -> list[int]:
    """How many of the first `length` documents of a mixture come from each part, as Grain deals
    them.
    """
    read, rest, remaining = [], length, sum(proportions)
    for share in proportions:
        left = rest * (remaining - share) // remaining
        read.append(rest - left)
        rest, remaining = left, remaining - share
    return read
