"""The executor: runs the engine's programs on the device, and holds the device's state."""

from typing import TypeVar

import jax
import numpy as np

from maxtext.common.errors import ConfigError, out_of_memory
from maxtext.common.types import Tree
from maxtext.inference.engine.batches import (
    DecodeBatch,
    EngineState,
    ForkBatch,
    PrefillBatch,
    Sampled,
)
from maxtext.inference.engine.layout import EngineLayout
from maxtext.inference.engine.model_runner import select_caches
from maxtext.inference.engine.program_cache import ProgramCache
from maxtext.inference.engine.programs import Programs, StepResult
from maxtext.inference.engine.sequence import Sequence
from maxtext.inference.sampling.sampler import ProcessorState
from maxtext.layers.cache import CacheConfig

BATCH = TypeVar("BATCH", PrefillBatch, DecodeBatch)


class Executor(EngineLayout):
    """One device state and the weights that extend it.

    `prefill` and `decode` take host arrays and return device arrays that are still being computed.
    Later programs are queued behind them, so the host can process the tokens of one step while the
    device computes the next.
    """

    def __init__(
        self,
        programs: Programs,
        weights: Tree,
        cache_config: CacheConfig,
        decode_weights: Tree | None = None,
    ):
        """`decode_weights`: those of `programs.decode_weights`, if there are any yet. Raises
        ConfigError if the device has no memory for the state."""
        super().__init__(programs, cache_config)
        if decode_weights is None:
            self.set_weights(weights)
        else:
            self.weights, self.decode_weights = weights, decode_weights
        self.processors: ProcessorState | None = None  # once a request uses one
        try:
            with programs.context():
                self.state = programs.init_state(cache_config)
        except jax.errors.JaxRuntimeError as error:
            if (reason := out_of_memory(error)) is None:
                raise
            raise ConfigError(str(reason)) from error

    def set_weights(self, weights: Tree) -> None:
        """Use these weights in all programs that are dispatched from now on."""
        self.weights = weights
        with self.programs.context():
            self.decode_weights = self.programs.decode_weights(weights)

    def release(self) -> None:
        """Delete the device state immediately, even if references remain. The weights stay."""
        for array in jax.tree.leaves((self.state, self.processors)):
            array.delete()

    def prefill(self, batch: PrefillBatch) -> Sampled:
        return self.run(self.programs.prefill, batch)

    def fork(self, logits: jax.Array, batch: ForkBatch) -> Sampled:
        with self.programs.context():
            self.state, sampled = self.programs.fork(self.state, logits, batch)
        return sampled

    def decode(self, batch: DecodeBatch) -> Sampled:
        return self.run(self.programs.decode, batch)

    def run(
        self,
        program: "ProgramCache[[Tree, EngineState, BATCH, ProcessorState | None], StepResult]",
        batch: BATCH,
    ) -> Sampled:
        processors = self.processors if batch.has_processors else None
        weights = self.decode_weights if isinstance(batch, DecodeBatch) else self.weights
        weights = self.programs.with_draft_weights(weights)
        with self.programs.context():
            self.state, processors, sampled = program(weights, self.state, batch, processors)
        if processors is not None:
            self.processors = processors
        return sampled

    def set_processors(self, sequence: Sequence) -> None:
        """Write the state of a sequence's logits processors into its slot."""
        vocab_size = self.programs.config.vocab_size
        prompt_ids = sequence.prompt_ids
        output_ids = sequence.token_ids[len(prompt_ids) :]
        row = ProcessorState.from_tokens(prompt_ids, output_ids, sequence.params, vocab_size)
        with self.programs.context():
            if self.processors is None:
                self.processors = self.programs.init_processors(self.cache_config.slots, vocab_size)
            slot = np.int32(sequence.slot)
            self.processors = self.programs.set_processors(self.processors, slot, row)

    # Copies of cache contents, for the prefix cache.

    def read_slot(self, slot: int) -> Tree:
        """A copy of the per-slot caches of a slot, on the device."""
        return self.programs.read_caches(self.state, np.int32(slot), False)

    def write_slot(self, slot: int, data: Tree) -> None:
        self.state = self.programs.write_caches(self.state, np.int32(slot), data, False)

    def read_block(self, block: int) -> Tree:
        """A copy of a block in all layers, in host memory."""
        return jax.device_get(self.programs.read_caches(self.state, np.int32(block), True))

    def write_block(self, block: int, data: Tree) -> None:
        self.state = self.programs.write_caches(self.state, np.int32(block), data, True)

    def to_host(self, snapshot: Tree) -> Tree:
        return jax.device_get(snapshot)

    def clear_block(self, block: int) -> None:
        self.write_block(block, self.zeros(paged=True))

    def clear_slot(self, slot: int) -> None:
        self.write_slot(slot, self.zeros(paged=False))

    def zeros(self, paged: bool) -> Tree:
        caches = select_caches(self.state.caches, paged)
        return jax.tree.map(lambda x: np.zeros(x.shape[1:], x.dtype), caches)
