"""A Grain dataset of batches as a BatchIterator with a JSON state.

The first batch is read at construction, so that too little data is detected before the model is
built.
"""

from typing import Any

import grain

from maxtext.input_pipeline.interface import Batch, BatchIterator, State, seal, unseal


class GrainBatches(BatchIterator):
    """`settings` are those that a position in this dataset is valid for."""

    def __init__(self, dataset: grain.IterDataset, settings: dict[str, Any]):
        self.dataset = dataset
        self.settings = settings
        self.iterator = iter(dataset)
        # The position after the batch last delivered. It is taken now, since at the end of the data
        # Grain's flat_map returns one that would skip sequences if a resumed run had more epochs.
        self.position: State = self.iterator.get_state()
        self.start = self.position
        self.first: Batch | None = next(self.iterator, None)
        self.first_rows = 0 if self.first is None else len(next(iter(self.first.values())))

    def __next__(self) -> Batch:
        if self.first is None:
            batch = next(self.iterator)
        else:
            batch, self.first = self.first, None
        self.position = self.iterator.get_state()
        return batch

    def get_state(self) -> State:
        return seal(self.settings, self.position)

    def set_state(self, state: State) -> None:
        self.move(with_tuples(unseal(self.settings, state)))

    def reset(self) -> None:
        self.move(self.start)

    def move(self, position: State) -> None:
        # A new iterator each time: some of Grain's iterators keep their buffers when they are
        # moved to the end.
        self.iterator.close()
        self.iterator = iter(self.dataset)
        self.iterator.set_state(position)
        self.position, self.first = position, None

    def close(self) -> None:
        self.iterator.close()


def with_tuples(value: Any) -> Any:
    """Convert lists, which JSON has in place of tuples, to tuples. Grain's concat-then-split
    compares its slices with tuples, and would drop the document of a list.
    """
    if isinstance(value, dict):
        return {key: with_tuples(entry) for key, entry in value.items()}
    return (
        tuple(with_tuples(entry) for entry in value) if isinstance(value, list | tuple) else value
    )
