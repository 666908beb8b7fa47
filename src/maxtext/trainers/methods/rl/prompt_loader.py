"""The prompts of each step of reinforcement learning. num_iterations steps share their prompts."""

from collections import deque
from typing import TYPE_CHECKING

import jax

from maxtext.input_pipeline import Batch, BatchIterator
from maxtext.input_pipeline.interface import State
from maxtext.trainers.data_loader import DeviceBatch, TrainDataLoader, max_segments, to_devices
from maxtext.trainers.methods.rl.shared_prompts import shared_prefix

if TYPE_CHECKING:
    from maxtext.trainers.run_context import RunContext


class Lookahead(BatchIterator):
    """The batches of another iterator, of which the next ones can be seen before they are
    taken."""

    def __init__(self, iterator: BatchIterator):
        self.iterator = iterator
        self.seen: deque[tuple[State, Batch]] = deque()  # with the positions before them

    def __next__(self) -> Batch:
        return self.seen.popleft()[1] if self.seen else next(self.iterator)

    def peek(self, count: int) -> list[Batch]:
        """The next batches, fewer if the data ends."""
        while len(self.seen) < count:
            position = self.iterator.get_state()
            batch = next(self.iterator, None)
            if batch is None:
                break
            self.seen.append((position, batch))
        return [batch for _, batch in list(self.seen)[:count]]

    def get_state(self) -> State:
        return self.seen[0][0] if self.seen else self.iterator.get_state()

    def set_state(self, state: State) -> None:
        self.seen.clear()
        self.iterator.set_state(state)

    def reset(self) -> None:
        self.seen.clear()
        self.iterator.reset()

    def close(self) -> None:
        self.iterator.close()


class PromptLoader(TrainDataLoader):
    """A step's batch on the host. It is empty in a run that resumes between the updates of one
    batch of rollouts, which the run's folder holds."""

    def __init__(self, context: "RunContext"):
        super().__init__(context)
        self.source: Lookahead = Lookahead(self.source)
        self.step = 0  # of the next batch

    def __next__(self) -> Batch:  # type: ignore[override]
        if self.step % self.context.config.num_iterations == 0:
            self.host_batch = next(self.source)
        self.step += 1
        return self.host_batch or {}

    def peek(self, count: int) -> list[Batch]:
        """The prompts of the steps after those of the last batch."""
        return self.source.peek(count)

    def first_shared_prefix(self) -> int:
        segments = [batch["inputs_segmentation"] for batch in self.peek(1)]
        lengths = [int(length) for rows in segments for length in (rows != 0).sum(axis=1)]
        return shared_prefix(self.context, lengths)

    def to_device(self, batch: Batch) -> DeviceBatch:
        """All rows of a batch, which this process has: it is the only one."""
        assert jax.process_count() == 1
        return DeviceBatch(to_devices(self.context, batch), max_segments(batch))
