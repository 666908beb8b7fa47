"""The prompts of each step of reinforcement learning. num_iterations steps share their prompts."""

import jax

from maxtext.input_pipeline import Batch
from maxtext.trainers.data_loader import DeviceBatch, TrainDataLoader, max_segments, to_devices
from maxtext.trainers.run_context import RunContext


class PromptLoader(TrainDataLoader):
    """A step's batch on the host. It is empty in a run that resumes between the updates of one
    batch of rollouts, which the run's folder holds."""

    def __init__(self, context: RunContext):
        super().__init__(context)
        self.step = 0  # of the next batch

    def __next__(self) -> Batch:  # type: ignore[override]
        if self.step % self.context.config.num_iterations == 0:
            self.host_batch = next(self.source)
        self.step += 1
        return self.host_batch or {}

    def to_device(self, batch: Batch) -> DeviceBatch:
        """All rows of a batch, which this process has: it is the only one."""
        assert jax.process_count() == 1
        return DeviceBatch(to_devices(self.context, batch), max_segments(batch))
