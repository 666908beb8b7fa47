"""reuse_example_batch: repeats the first batch, to measure a step without the data pipeline.

The position never changes, so that a run without the key continues from where this one started.
"""

from maxtext.input_pipeline.interface import Batch, BatchIterator, State


class ReusedBatch(BatchIterator):
    def __init__(self, iterator: BatchIterator):
        self.iterator = iterator
        self.state = iterator.get_state()
        self.batch: Batch | None = None

    def __next__(self) -> Batch:
        if self.batch is None:
            self.batch = next(self.iterator)
        # The fields are shared, the dict is not: a consumer may add to it.
        return dict(self.batch)

    def get_state(self) -> State:
        return self.state

    def set_state(self, state: State) -> None:
        self.iterator.set_state(state)
        self.state, self.batch = state, None

    def reset(self) -> None:
        self.iterator.reset()
        self.state, self.batch = self.iterator.get_state(), None

    def close(self) -> None:
        self.iterator.close()
