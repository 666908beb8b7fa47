"""Shuffles elements within windows of a fixed size, for data that can only be read in order.

Like Grain's WindowShuffleIterDataset, but with one permutation for each window: Grain computes each
index by a cipher for large ranges, which takes a millisecond for each row of a window of a hundred.
The state is the parent's state at the start of the window and the position in it, so the window is
read again after a restart.
"""

from itertools import islice
from typing import Any

import grain
import numpy as np

from maxtext.input_pipeline.interface import check_position


class WindowShuffle(grain.IterDataset):
    def __init__(self, parent: grain.IterDataset, window: int, seed: int):
        super().__init__(parent)
        self.parent = parent
        self.window = window
        self.seed = seed

    def __iter__(self) -> grain.DatasetIterator:
        return WindowShuffled(iter(self.parent), self.window, self.seed)


class WindowShuffled(grain.DatasetIterator):
    def __init__(self, parent: grain.DatasetIterator, window: int, seed: int):
        super().__init__(parent)
        self.parent = parent
        self.window = window
        self.seed = seed
        self.number = -1
        self.position = 0
        self.elements: list[Any] = []
        self.start = parent.get_state()

    def __next__(self) -> Any:
        if self.position == len(self.elements):
            self.fill(self.number + 1, self.parent.get_state())
            if not self.elements:
                raise StopIteration
        self.position += 1
        return self.elements[self.position - 1]

    def fill(self, number: int, start: Any) -> None:
        self.number = number
        self.start = start
        self.position = 0
        elements = list(islice(self.parent, self.window))
        order = np.random.default_rng([self.seed, number]).permutation(len(elements))
        self.elements = [elements[position] for position in order]

    def get_state(self) -> dict[str, Any]:
        return {"window": self.number, "place": self.position, "parent": self.start}

    def set_state(self, state: dict[str, Any]) -> None:
        self.parent.set_state(state["parent"])
        if state["window"] < 0:
            self.number = -1
            self.position = 0
            self.elements = []
            self.start = state["parent"]
        else:
            self.fill(state["window"], state["parent"])
            check_position(state["place"], len(self.elements))
            self.position = state["place"]
