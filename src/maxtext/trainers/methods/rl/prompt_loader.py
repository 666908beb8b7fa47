"""The prompts of each step of reinforcement learning, and the tokens that their completions share.

`PromptLoader` loads prompts. num_iterations steps have the same ones.

`shared_prefix` says how many tokens of the prompts an update computes once for all completions of a
group. Every length is a compiled program, so there are few: multiples of an eighth of
max_prefill_predict_length, less one, since the output of a prompt's last token predicts the first
of each completion. The choice depends on nothing but the batch, so that a resumed run computes the
same bits.
"""

from collections import deque
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from maxtext.common.trees import common_prefix_length
from maxtext.input_pipeline import Batch, BatchIterator
from maxtext.input_pipeline.interface import State
from maxtext.layers.specs import AttentionSpec, LayerSpec
from maxtext.models.registry import layers
from maxtext.trainers.data_loader import DeviceBatch, TrainDataLoader, max_segments, to_devices
from maxtext.trainers.run_context import RunContext

NUM_LENGTHS = 8


def shared_prefix(context: RunContext, prompt_lengths: Iterable[int]) -> int:
    """How many tokens the step computes once for the completions of a prompt, for prompts of these
    lengths."""
    config = context.config
    if not supports_shared_prompts(context):
        return 0
    unit = max(config.max_prefill_predict_length // NUM_LENGTHS, 1)
    length = min(prompt_lengths, default=1) // unit * unit - 1
    # The logits of the tokens between these and a row's last are computed in tiles of equal size.
    while length > 0 and (config.max_target_length - length - 1) % config.num_vocab_tiling:
        length -= unit
    return max(length, 0)


def common_lengths(prompts: Sequence[tuple[int, ...]], rows: int) -> list[int]:
    """How many tokens the prompts of each group of `rows` begin with together: all of a prompt,
    unless an environment begins the conversations of a group differently."""
    groups = (prompts[start : start + rows] for start in range(0, len(prompts), rows))
    # All prompts of a group begin as the first and the last of them in lexicographic order do.
    return [common_prefix_length(min(group), max(group)) for group in groups]


def supports_shared_prompts(context: RunContext) -> bool:
    """Whether all layers but attention compute each token by itself, and the rows of a group are on
    one device. Experts with a capacity, and their balance, depend on the tokens of a batch."""
    config = context.config
    rows = config.global_batch_size_to_train_on // config.gradient_accumulation_steps
    if context.rules.mesh.size > 1 or rows % config.num_generations:
        return False
    if config.compiled_trainstep_file or config.quantization or config.num_experts > 1:
        return False
    return all(
        isinstance(layer, LayerSpec)
        and type(layer.attention) is AttentionSpec
        and not layer.attention.has_selection
        and layer.engram is None
        for layer in layers(config)
    )


def group_microbatches(fields: dict[str, np.ndarray], microbatches: int) -> dict[str, np.ndarray]:
    """The rows [B, ...] in the order in which microbatch i has the i-th B / microbatches of them:
    row b goes to microbatch b % microbatches (see step.py)."""
    order = np.arange(len(next(iter(fields.values())))).reshape(microbatches, -1).T.ravel()
    return {name: field[order] for name, field in fields.items()}


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

    def __init__(self, context: RunContext):
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
