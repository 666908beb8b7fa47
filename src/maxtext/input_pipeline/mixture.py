"""The order of documents in a weighted mixture, and where it ends.

Grain interleaves the components by their weights. The mixture ends with `first_exhausted` when the
first component has been read `epochs` times, and with `all_exhausted` when the last has, while the
others are repeated.
"""

from collections.abc import Sequence

import grain


class Tag:
    """Maps an index to (number of its component, index)."""

    def __init__(self, number: int):
        self.number = number

    def __call__(self, index: int) -> tuple[int, int]:
        return self.number, index


def mix_orders(
    orders: Sequence[grain.MapDataset], weights: Sequence[float], epochs: int, strategy: str
) -> grain.MapDataset:
    """(component, index) of every document that is read. `orders` are those of one epoch."""
    if strategy == "first_exhausted":
        repeated = [order.repeat(epochs).map(Tag(number)) for number, order in enumerate(orders)]
        return grain.MapDataset.mix(repeated, weights=list(weights))
    counts = [len(order) for order in orders]
    read = documents_read(counts, weights, epochs, strategy)
    # One epoch more than is read, so that Grain does not end the mixture.
    repeated = [
        order.repeat(number // count + 2).map(Tag(part))
        for part, (order, number, count) in enumerate(zip(orders, read, counts, strict=True))
    ]
    return grain.MapDataset.mix(repeated, weights=list(weights))[: sum(read)]


def documents_read(
    counts: Sequence[int], weights: Sequence[float], epochs: int, strategy: str
) -> list[int]:
    """How many documents of each component the mixture reads."""
    # Grain rounds weights to these integers
    proportions = [int(weight * 100 / min(weights)) for weight in weights]
    total = sum(proportions)
    ends = [
        count * epochs / (proportion / total)
        for count, proportion in zip(counts, proportions, strict=True)
    ]
    if strategy == "first_exhausted":
        return component_counts(int(min(ends)), proportions)
    length = int(max(ends))
    while any(
        read < count * epochs
        for read, count in zip(component_counts(length, proportions), counts, strict=True)
    ):
        length += 1
    return component_counts(length, proportions)


def component_counts(length: int, proportions: Sequence[int]) -> list[int]:
    """How many of the first `length` documents of Grain's mixture come from each component."""
    read, rest, remaining = [], length, sum(proportions)
    for proportion in proportions:
        left = rest * (remaining - proportion) // remaining
        read.append(rest - left)
        rest, remaining = left, remaining - proportion
    return read
