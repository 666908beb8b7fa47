"""A Grain dataset of batches as a BatchIterator: its position as JSON, and the first batch read at
once.

The first batch is read at construction so that data which cannot fill one is found before the model
is built.
"""

from typing import Any

import grain

from maxtext.input_pipeline.interface import Batch, BatchIterator, State, seal, unseal


class GrainBatches(BatchIterator):
    """`made_by`: the settings without which a position in this dataset means nothing."""

    def __init__(self, dataset: grain.IterDataset, made_by: dict[str, Any]):
        self.dataset, self.made_by = dataset, made_by
        self.iterator = iter(dataset)
        # The position after the batch last delivered. Not asked of Grain later on: at the end of
        # the data its flat_map gives a position that would skip sequences if a resumed run had more
        # epochs.
        self.position: State = self.iterator.get_state()
        self.start = self.position
        self.first: Batch | None = next(self.iterator, None)
        self.first_rows = 0 if self.first is None else len(self.first["inputs"])

    def __next__(self) -> Batch:
        if self.first is None:
            batch = next(self.iterator)
        else:
            batch, self.first = self.first, None
        self.position = self.iterator.get_state()
        return batch

    def get_state(self) -> State:
        return seal(self.made_by, self.position)

    def set_state(self, state: State) -> None:
        self.move(with_tuples(unseal(self.made_by, state)))

    def reset(self) -> None:
        self.move(self.start)

    def move(self, position: State) -> None:
        # A fresh iterator each time: some of Grain's keep what they had buffered when they are
        # moved to the end.
        self.iterator.close()
        self.iterator = iter(self.dataset)
        self.iterator.set_state(position)
        self.position, self.first = position, None

    def close(self) -> None:
        self.iterator.close()


def with_tuples(value: Any) -> Any:
    """Lists, as JSON returns them, back to tuples: Grain's concat-then-split compares its slices
    with tuples, and would take a list for a slice of nothing and drop that document."""
    if isinstance(value, dict):
        return {key: with_tuples(entry) for key, entry in value.items()}
    return (
        tuple(with_tuples(entry) for entry in value) if isinstance(value, list | tuple) else value
    )
