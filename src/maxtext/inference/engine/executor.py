"""The executor: runs the engine's programs on the device, and holds the device's state.

`warmup_requests` yields requests that compile, before real ones arrive, the programs for them.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import TypeVar

import jax
import numpy as np

from maxtext.common.types import Tree
from maxtext.configs.types import MaxTextConfig
from maxtext.inference.engine import shapes
from maxtext.inference.engine.batches import (
    MAX_DECODE_STEPS,
    BatchBuilder,
    DecodeBatch,
    EngineState,
    ForkBatch,
    PrefillBatch,
    Sampled,
)
from maxtext.inference.engine.model_runner import select_caches
from maxtext.inference.engine.program_cache import ProgramCache
from maxtext.inference.engine.programs import Programs, StepResult
from maxtext.inference.engine.sequence import Sequence
from maxtext.inference.requests import GenerationRequest
from maxtext.inference.sampling.params import SamplingParams
from maxtext.inference.sampling.sampler import ProcessorState
from maxtext.kernels import attention
from maxtext.layers.attention_sharding import packed_request
from maxtext.layers.cache import CacheConfig, PagedKVCache, view_backend
from maxtext.layers.specs import AttentionSpec, MlaSpec
from maxtext.models.common import backend
from maxtext.models.registry import layers
from maxtext.models.transformer import Caches

BATCH = TypeVar("BATCH", PrefillBatch, DecodeBatch)
MIN_DECODE_ROWS = 64  # of a program for some of the slots: fewer would cost about as much


class Executor:
    """One device state and the weights that extend it.

    `prefill` and `decode` take host arrays and return device arrays that are still being computed.
    Later programs are queued behind them, so the host can process the tokens of one step while the
    device computes the next.
    """

    def __init__(self, programs: Programs, weights: Tree, cache_config: CacheConfig):
        self.programs = programs
        self.set_weights(weights)
        self.cache_config = cache_config
        with programs.context():
            self.state: EngineState = programs.init_state(cache_config)
            self.processors: ProcessorState | None = None  # once a request uses one
            self.reads_in_place = reads_blocks_in_place(self.state.caches)
        self.contiguous = cache_config.block_size is None  # slot n has block n, and no other
        # On accelerators compilation is slow, so there are few programs; and in a loop that may end
        # early, a GPU waits for the host before each step.
        self.few_programs = programs.build.platform != "cpu"

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

    def batch_builder(self, shared_prompts: bool) -> BatchBuilder:
        """`shared_prompts`: many sequences have the prompt of another."""
        block_size = self.cache_config.tokens_per_block
        return BatchBuilder(
            num_slots=self.cache_config.slots,
            max_blocks=-(-self.cache_config.length // block_size),
            block_size=block_size,
            contiguous=self.contiguous,
            few_programs=self.few_programs,
            reads_in_place=self.reads_in_place,
            decode_rows=self.decode_rows,
            vocab_size=self.programs.config.vocab_size,
            has_adapters=self.programs.build.adapters is not None,
            can_roll_back=not self.has_slot_caches,
            groups_prefixes=shared_prompts and self.reads_in_place,
            forks_prompts=shared_prompts and not self.contiguous and not self.has_slot_caches,
        )

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

    # What the programs can do.

    @cached_property
    def has_slot_caches(self) -> bool:
        """Whether some layer has a cache per slot: a sliding window or a recurrent state."""
        return bool(select_caches(self.state.caches, paged=False))

    @cached_property
    def supports_packing(self) -> bool:
        """Whether several prompts can share a row of a prefill batch, which needs no padding."""
        config, rules = self.programs.config, self.programs.rules
        if not self.few_programs or self.contiguous or self.has_slot_caches or rules.mesh.size > 1:
            return False
        mixers = [getattr(layer, "attention", None) for layer in layers(config)]
        specs = [mixer for mixer in mixers if isinstance(mixer, AttentionSpec)]
        if len(specs) < len(mixers) or backend(config) != attention.AUTOSELECTED:
            return False
        dtype = config.dtype.value
        requests = [
            packed_request(spec, tokens, dtype, self.programs.build.platform)
            for spec in specs
            for tokens, _ in shapes.PACKED_SHAPES
        ]
        return all(attention.fastest_backend(request) != "dot_product" for request in requests)

    def chunk_logits_heads(self, tokens: int) -> int:
        """The most heads of a layer whose attention between `tokens` tokens of a prompt and their
        cache materializes its logits; layers with a window are not counted."""
        config, build = self.programs.config, self.programs.build
        length, heads = self.cache_config.length, 0
        for spec in (getattr(layer, "attention", None) for layer in layers(config)):
            if not isinstance(spec, AttentionSpec | MlaSpec):
                continue
            if min(spec.mask.window or length, spec.mask.chunk or length) < length:
                continue
            request = packed_request(spec, tokens, config.dtype.value, build.platform)
            request = replace(request, k_length=2 * tokens, custom_positions=True)
            with self.programs.context():
                backend = view_backend(spec.backend, tokens)
            if backend == attention.AUTOSELECTED:
                backend = attention.fastest_backend(request)
            if backend == "dot_product":
                heads = max(heads, request.q_heads)
        return heads

    @cached_property
    def decode_rows(self) -> tuple[int, ...]:
        """How many slots a decode program may have, in increasing order. If all caches are paged, a
        program can leave out inactive slots.
        """
        slots, devices = self.cache_config.slots, self.programs.rules.mesh.size
        if self.contiguous or self.has_slot_caches:
            return (slots,)
        rows = [slots * part // 4 for part in (1, 2, 3) if slots * part % (4 * devices) == 0]
        return (*(n for n in rows if min(n, slots - n) >= MIN_DECODE_ROWS), slots)

    @cached_property
    def block_bytes(self) -> int:
        """The bytes of one block, in all layers."""
        return self.bytes_per_entry(paged=True)

    @cached_property
    def slot_bytes(self) -> int:
        """The bytes of the per-slot caches of one slot, in all layers."""
        return self.bytes_per_entry(paged=False)

    def bytes_per_entry(self, paged: bool) -> int:
        caches = select_caches(self.state.caches, paged)
        return sum(array.nbytes // array.shape[0] for array in jax.tree.leaves(caches))


def reads_blocks_in_place(caches: Caches) -> bool:
    """Whether decode attention reads blocks in place, as far as they are filled. Then a program
    does not depend on the length of sequences.
    """
    pools = [cache for cache in caches if isinstance(cache, PagedKVCache)]
    return bool(pools) and all(pool.in_place for pool in pools)


def warmup_requests(
    config: MaxTextConfig, params: SamplingParams, executor: Executor
) -> Iterator[list[GenerationRequest]]:
    """Lists of requests for prompts up to max_prefill_predict_length, or of any length where they
    share rows, sequences up to max_target_length, and tokens that are sampled as with `params`.
    """
    length, vocab_size = config.max_target_length, config.vocab_size
    params = replace(params, ignore_eos=True, logprobs=0 if config.return_log_prob else None)
    # Where decode programs have a fixed number of steps, a completion ends with another one.
    new_tokens = MAX_DECODE_STEPS + 2 if executor.few_programs else 2
    prompt_index = 0
    for size, count in dict.fromkeys(prompt_shapes(config, executor)):
        params = replace(params, max_new_tokens=min(new_tokens, length - size))
        requests = []
        for _ in range(count):
            prompt_index += 1  # a new first token, so that no prefix is cached
            prompt = [prompt_index // vocab_size % vocab_size] * size
            prompt[0] = prompt_index % vocab_size
            requests.append(GenerationRequest(prompt, params))
        yield requests


def prompt_shapes(config: MaxTextConfig, executor: Executor) -> Iterator[tuple[int, int]]:
    """The length of prompts and their number, for each program."""
    slots, length = config.global_batch_size_to_load, config.max_target_length
    longest = min(config.max_prefill_predict_length, length - 2)
    counts = {min(1 << bit, slots) for bit in range(shapes.next_power_of_two(slots).bit_length())}
    counts |= set(executor.decode_rows)
    beyond = [
        size - 1 for size in map(shapes.next_power_of_two, range(longest, length)) if size < length
    ]
    if executor.supports_packing:
        for tokens, prompts in shapes.PACKED_SHAPES:
            count = min(prompts, slots)
            yield min(tokens // count, length - 2), count
        # Decode programs that read blocks in place do not depend on lengths.
        sizes = [1] if executor.reads_in_place else powers_of_two(longest) + beyond
        counts = set(executor.decode_rows)
    else:
        sizes = [min(shapes.row_tokens(size), longest) for size in range(1, longest + 1)] + beyond
    for size in sizes:
        for count in sorted(counts):
            yield size, count


def powers_of_two(limit: int) -> list[int]:
    return [1 << bit for bit in range(limit.bit_length())]
