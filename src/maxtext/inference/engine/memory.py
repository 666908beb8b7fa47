"""The size of an engine: slots, blocks and tokens of a prefill batch that fit in memory.

All bytes are those of one device. Let F be its free bytes (`free_memory`), T the temporaries of the
largest program, and f kv_cache_memory_fraction: caches may take f (F - T). A state of N slots and P
blocks takes N s + P b bytes. Sizes that the configuration leaves open follow from that, and sizes
that a user chose are refused if they do not fit.

T is estimated without a compiler first. Only where the estimate, which is several times too large
as a rule, leaves too little are the largest programs of prefill and decode compiled to know it; the
engine runs these programs later.
"""

import bisect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import jax

from maxtext.checkpoint.multihost import allgather_int
from maxtext.common.errors import ConfigError, out_of_memory
from maxtext.common.hardware import format_bytes
from maxtext.common.log import LOGGER
from maxtext.common.types import Tree
from maxtext.configs.types import MaxTextConfig
from maxtext.inference.engine import shapes
from maxtext.inference.engine.batches import (
    MAX_DECODE_STEPS,
    BatchBuilder,
    DecodeBatch,
    PrefillBatch,
)
from maxtext.inference.engine.cache_config import (
    block_range,
    make_cache_config,
    prefill_chunk_size,
)
from maxtext.inference.engine.layout import EngineLayout
from maxtext.inference.engine.programs import Programs
from maxtext.inference.engine.sequence import Sequence
from maxtext.inference.sampling.params import SamplingParams
from maxtext.layers.cache import CacheConfig
from maxtext.sharding.memory import shard_bytes
from maxtext.sharding.topology import device_memory

MIB = 2**20
# Nothing is compiled to size an engine if its state and the estimated temporaries take less than
# this part of the free memory.
OBVIOUS_PART = 0.5
# While not all caches that sequences can use fit, prefill batches shrink until their temporaries
# take no more than this part of the free memory.
MAX_TEMPORARIES_PART = 0.25
MIN_BATCHED_TOKENS = 128
# Sizes that errors name leave the rest of the memory for caches: less is free at the next start, as
# on CPUs, where compilation takes host memory.
ADVISED_PART = 0.95
UNKNOWN = sys.maxsize


def free_memory(utilization: float) -> int:
    """Bytes of a device that an engine may take: those that are free for this process, and no more
    than this part of the whole memory less what the process uses. The least of all local devices
    and all processes; UNKNOWN if the platform does not report it.
    """
    devices, free = jax.local_devices(), []
    for device in devices:
        memory = device_memory(device, len(devices))
        if memory is not None:
            free.append(min(memory.free, int(utilization * memory.total) - memory.used))
    least = max(min(free), 0) // MIB if free else UNKNOWN // MIB
    return min(allgather_int(least)) * MIB if jax.process_count() > 1 else least * MIB


class Capacity(NamedTuple):
    """The size that an engine is asked for. `fits_slots`: fewer slots do as well, if the caches of
    all do not fit in `memory_fraction`, by default kv_cache_memory_fraction, of the memory for
    them."""

    slots: int
    length: int  # the most tokens of a sequence
    fits_slots: bool = False
    memory_fraction: float | None = None

    @staticmethod
    def from_config(config: MaxTextConfig) -> "Capacity":
        """Of requests that come at any time. A default per_device_batch_size is a limit; sequences
        share paged caches, which need not have blocks for all at a time."""
        is_chosen = config.source("per_device_batch_size").is_user or config.attention == "paged"
        slots, length = config.global_batch_size_to_load, config.max_target_length
        return Capacity(slots, length, fits_slots=not is_chosen)


@dataclass(frozen=True)
class EngineSize:
    cache_config: CacheConfig
    max_batched_tokens: int | None = None  # of a prefill batch; None: the default


@dataclass(frozen=True)
class Temporaries:
    """Bytes that the largest programs take besides weights and state."""

    prefill: int
    decode: int

    @property
    def most(self) -> int:
        return max(self.prefill, self.decode)


@dataclass
class EngineSizer:
    """Sizes an engine for sequences of up to `length` tokens. `fits_slots`: the number of slots is
    a limit, so fewer do as well. `memory_fraction` replaces kv_cache_memory_fraction.
    """

    programs: Programs
    weights: Tree
    decode_weights: Tree
    length: int
    fits_slots: bool = False
    memory_fraction: float | None = None
    shared_prompts: bool = False
    decode_bytes: dict[int, int] = field(default_factory=dict)  # temporaries, by slots

    def size(self, slots: int, max_batched_tokens: int | None) -> EngineSize:
        """Raises ConfigError if sizes that the user chose do not fit, with one that does."""
        layout = self.layout(slots)
        wanted = EngineSize(layout.cache_config, max_batched_tokens)
        needed = layout.total_bytes + self.estimate(layout, max_batched_tokens)
        if needed <= OBVIOUS_PART * self.for_caches(0):
            return wanted
        while self.fits_slots and slots > 1 and self.least_bytes(slots) > self.for_caches(0):
            slots //= 2
        tokens, temporaries = self.fit_tokens(slots, max_batched_tokens)
        while self.least_bytes(slots) > self.for_caches(temporaries.most):
            if not self.fits_slots or slots == 1:
                raise self.refusal(slots, temporaries.most)
            slots //= 2
            if temporaries.decode > MAX_TEMPORARIES_PART * self.free:  # fewer slots take less
                tokens, temporaries = self.fit_tokens(slots, max_batched_tokens)
        layout = self.layout(slots, self.for_caches(temporaries.most))
        size = EngineSize(layout.cache_config, tokens)
        self.report(wanted, size, temporaries.most)
        return size

    # The closed form.

    @cached_property
    def free(self) -> int:
        return free_memory(self.config.gpu_memory_utilization)

    @property
    def config(self) -> MaxTextConfig:
        return self.programs.config

    def for_caches(self, temporaries: int) -> int:
        """The bytes that caches may take."""
        fraction = self.memory_fraction
        if fraction is None:
            fraction = self.config.kv_cache_memory_fraction
        return int(fraction * max(self.free - temporaries, 0))

    def layout(self, slots: int, available: int | None = None) -> EngineLayout:
        """The layout with as many blocks as can be used, and as fit into `available` bytes."""
        least, most = self.blocks(slots)
        if available is not None and most > least:
            blocks = (available - slots * self.slot_bytes) // max(self.block_bytes, 1)
            most = max(least, min(most, blocks))
        return EngineLayout(
            self.programs, make_cache_config(self.programs, slots, self.length, most)
        )

    def blocks(self, slots: int) -> tuple[int, int]:
        """The fewest blocks of an engine with these slots, and the most."""
        entry_bytes = 1
        if self.config.enable_prefix_caching:
            entry_bytes = self.unit.block_bytes + self.unit.slot_bytes
        return block_range(
            self.config, slots, self.length, all_at_once=self.fits_slots, entry_bytes=entry_bytes
        )

    @cached_property
    def unit(self) -> EngineLayout:
        """The layout of a single slot with its blocks."""
        return EngineLayout(self.programs, make_cache_config(self.programs, 1, self.length))

    @cached_property
    def block_bytes(self) -> int:
        return -(-self.unit.block_bytes * self.shard_part[0] // self.shard_part[1])

    @cached_property
    def slot_bytes(self) -> int:
        """The bytes of a slot besides blocks."""
        blocks = self.unit.block_bytes * self.unit.cache_config.total_blocks
        rest = self.unit.total_bytes - blocks
        return -(-rest * self.shard_part[0] // self.shard_part[1])

    @cached_property
    def shard_part(self) -> tuple[int, int]:
        """The part of a state that one device has, as (numerator, denominator)."""
        if self.programs.rules.mesh.size == 1:
            return 1, 1
        slots = self.config.global_batch_size_to_load
        cache_config = make_cache_config(self.programs, slots, self.length)
        layout = EngineLayout(self.programs, cache_config)
        return shard_bytes(sharded_state(layout)).device, layout.total_bytes

    def state_bytes(self, slots: int, blocks: int) -> int:
        return slots * self.slot_bytes + blocks * self.block_bytes

    def least_bytes(self, slots: int) -> int:
        return self.state_bytes(slots, self.blocks(slots)[0])

    # Temporaries.

    def estimate(self, layout: EngineLayout, max_batched_tokens: int | None) -> int:
        """More than the temporaries of programs as a rule: two copies of the inputs and outputs of
        all matmuls in float32, the logits of attention over the keys of a row, those of the
        vocabulary, and a copy of all caches that the program reads.
        """
        config, slots = self.config, layout.cache_config.slots
        row = shapes.row_tokens(self.length)
        limit = max(max_batched_tokens or shapes.MAX_PREFILL_TOKENS, row)
        tokens = min(limit, shapes.next_power_of_two(slots) * row)
        widths = sum(sum(weight.shape) for weight in jax.tree.leaves(self.weights))
        widths *= max(config.num_experts_per_tok, 1)
        heads = config.num_query_heads * min(row, tokens)
        return (
            tokens * 8 * (widths + heads) + slots * 16 * config.vocab_size + 2 * layout.total_bytes
        )

    def fit_tokens(self, slots: int, tokens: int | None) -> tuple[int | None, Temporaries]:
        """The tokens of a prefill batch, halved until its temporaries leave enough for the caches,
        and the temporaries. Enough is all that the slots can use, or else MAX_TEMPORARIES_PART.
        Limits whose temporaries, in proportion to the tokens, would be too large are not compiled.
        """
        least, most = (self.state_bytes(slots, blocks) for blocks in self.blocks(slots))
        measured = max(tokens or shapes.MAX_PREFILL_TOKENS, shapes.row_tokens(self.length))
        temporaries = self.temporaries(slots, tokens)
        for smaller in smaller_limits(tokens):
            available = self.for_caches(temporaries.most)
            is_small = temporaries.prefill <= MAX_TEMPORARIES_PART * self.free
            if most <= available or temporaries.prefill <= temporaries.decode:
                break
            if is_small and least <= available:
                break
            predicted = temporaries.prefill * smaller // measured
            is_large = predicted > MAX_TEMPORARIES_PART * self.free
            if is_large and most > self.for_caches(predicted) and smaller > MIN_BATCHED_TOKENS:
                continue
            tokens, measured, temporaries = smaller, smaller, self.temporaries(slots, smaller)
        return tokens, temporaries

    def temporaries(self, slots: int, max_batched_tokens: int | None) -> Temporaries:
        """Of the compiled programs of an engine that has all free memory for its caches."""
        layout = self.layout(slots, self.for_caches(0))
        chunk_size = prefill_chunk_size(self.programs, layout, max_batched_tokens)
        limit = max_batched_tokens or shapes.MAX_PREFILL_TOKENS
        largest = LargestBatches(layout, limit, chunk_size, self.shared_prompts)
        state = sharded_state(layout)

        def compiled_bytes(batch: PrefillBatch | DecodeBatch) -> int:
            is_decode = isinstance(batch, DecodeBatch)
            program = self.programs.decode if is_decode else self.programs.prefill
            weights = self.decode_weights if is_decode else self.weights
            weights = self.programs.with_draft_weights(weights)
            try:
                with self.programs.context():
                    return temporary_bytes(program.compile(weights, state, batch, None))
            except jax.errors.JaxRuntimeError as error:
                if out_of_memory(error) is None:
                    raise
                return self.free  # the compiler has seen that it does not fit

        if slots not in self.decode_bytes:
            self.decode_bytes[slots] = compiled_bytes(largest.decode())
        return Temporaries(
            prefill=max(map(compiled_bytes, largest.prefills())), decode=self.decode_bytes[slots]
        )

    # Messages.

    def report(self, wanted: EngineSize, size: EngineSize, temporaries: int) -> None:
        free, reasons = format_bytes(self.free), []
        old, new = wanted.cache_config, size.cache_config
        if new.slots < old.slots:
            reasons.append(f"{new.slots} sequences at a time instead of {old.slots}")
        if new.block_size is not None and new.total_blocks < self.blocks(new.slots)[1]:
            reasons.append(f"{new.total_blocks} blocks of {new.block_size} tokens")
        if size.max_batched_tokens != wanted.max_batched_tokens:
            reasons.append(f"up to {size.max_batched_tokens} tokens in a prefill batch")
        if reasons:
            LOGGER.info(
                "memory: %s, as %s are free and programs take %s of them",
                ", ".join(reasons),
                free,
                format_bytes(temporaries),
            )

    def refusal(self, slots: int, temporaries: int) -> ConfigError:
        """Names a size that fits."""
        config, blocks = self.config, self.blocks(slots)[0]
        if is_pool_size_chosen(config):
            caches = f"pagedattn_num_pages={blocks} of {config.pagedattn_tokens_per_page} tokens"
        else:
            count = "a sequence" if slots == 1 or blocks < slots else f"{slots} sequences"
            caches = f"caches for {count} of {self.length} tokens"
        return ConfigError(
            f"{caches} need {format_bytes(self.state_bytes(slots, blocks))} on each device, but "
            f"{format_bytes(self.for_caches(temporaries))} are left for caches, as "
            f"{format_bytes(self.free)} are free and programs take "
            f"{format_bytes(temporaries)}: {self.advice(slots, temporaries)}"
        )

    def advice(self, slots: int, temporaries: int) -> str:
        available = int(ADVISED_PART * self.for_caches(temporaries))
        if is_pool_size_chosen(self.config):
            blocks = (available - slots * self.slot_bytes) // max(self.block_bytes, 1)
            if blocks >= 1:
                return f"pagedattn_num_pages={blocks} fits"
        while slots > 1:
            if (fitting := self.most_slots(slots, available)) > 0:
                return f"per_device_batch_size={fitting:g} fits, or lower max_target_length"
            slots //= 2
            smallest = self.temporaries(slots, MIN_BATCHED_TOKENS)
            available = int(ADVISED_PART * self.for_caches(smallest.most))
        if length := self.most_length(available):
            return f"max_target_length={length} fits"
        return (
            "no max_target_length fits: use more devices, a smaller model, or quantization=int8 "
            "for its weights"
        )

    def most_slots(self, slots: int, available: int) -> float:
        """The largest per_device_batch_size whose caches take no more than `available` bytes."""
        config = self.config
        counts = range(slots + 1)
        fitting = bisect.bisect_right(counts, available, key=self.least_bytes) - 1
        devices = max(round(config.global_batch_size_to_load / config.per_device_batch_size), 1)
        if fitting >= devices:
            return fitting // devices
        return max(fitting, 0) / devices

    def most_length(self, available: int) -> int:
        """The longest sequence whose caches take no more than `available` bytes; 0: none."""

        def needed(length: int) -> int:
            return replace_length(self, length).least_bytes(1)

        return bisect.bisect_right(range(1, self.length), available, key=needed)


def replace_length(sizer: EngineSizer, length: int) -> EngineSizer:
    return EngineSizer(
        sizer.programs,
        sizer.weights,
        sizer.decode_weights,
        length,
        fits_slots=sizer.fits_slots,
        memory_fraction=sizer.memory_fraction,
    )


def is_pool_size_chosen(config: MaxTextConfig) -> bool:
    return config.attention == "paged" and config.pagedattn_num_pages > 0


def smaller_limits(tokens: int | None) -> Iterator[int]:
    """Limits of a prefill batch below `tokens`; None is no limit for a single prompt."""
    if tokens is None:
        yield shapes.MAX_PREFILL_TOKENS
    limit = (tokens or shapes.MAX_PREFILL_TOKENS) // 2
    while limit >= MIN_BATCHED_TOKENS:
        yield limit
        limit //= 2


def sharded_state(layout: EngineLayout) -> Tree:
    """The shapes of a state with its shardings, which a mesh of several devices takes from the
    program that creates it."""
    programs = layout.programs
    if programs.rules.mesh.size == 1:
        shardings = jax.tree.map(lambda _: programs.rules.replicated(), layout.state)
    else:
        with programs.context():
            created = programs.init_state.lower(layout.cache_config).compile()
        shardings = created.output_shardings
    return jax.tree.map(
        lambda array, sharding: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding),
        layout.state,
        shardings,
    )


def temporary_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes that a program takes besides its arguments; 0 if the compiler does not report them."""
    memory = compiled.memory_analysis()
    if memory is None:
        return 0
    new_outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return int(memory.temp_size_in_bytes + max(new_outputs, 0))


@dataclass(frozen=True)
class LargestBatches:
    """The batches of an engine whose programs take the most memory: as many rows as a prefill batch
    may have, the longest ones, and the last chunk of the longest prompt; and decode steps of all
    slots at their full length."""

    layout: EngineLayout
    max_batched_tokens: int
    chunk_size: shapes.ChunkSize | None
    shared_prompts: bool = False

    @cached_property
    def builder(self) -> BatchBuilder:
        return self.layout.batch_builder(self.shared_prompts, self.max_batched_tokens)

    @property
    def longest(self) -> int:
        return max(self.layout.cache_config.length - 1, 1)

    def prefills(self) -> list[PrefillBatch]:
        chunk_size, slots = self.chunk_size, self.layout.cache_config.slots
        packed = [shape for shape in shapes.PACKED_SHAPES if shape[0] <= self.max_batched_tokens]
        if self.layout.supports_packing and packed:
            tokens, prompts = max(packed)
            count = min(prompts, slots)
            batches = [self.prefill(count, min(tokens // count, self.longest), packed=True)]
        else:
            batches = []
        longest = self.longest
        if chunk_size is not None and not chunk_size.only_online:
            longest = min(longest, chunk_size.tokens)
        shortest = self.max_batched_tokens // shapes.next_power_of_two(slots)
        sizes = [longest] if batches else [longest, min(longest, max(shortest, 1))]
        if not batches or longest > max(tokens for tokens, _ in packed):
            batches += [self.prefill(self.rows(size), size) for size in dict.fromkeys(sizes)]
        if chunk_size is not None and self.longest > chunk_size.tokens:
            size = chunk_size.at(self.longest)
            rows = self.rows(size, min(self.max_batched_tokens, size))
            batches.append(self.prefill(rows, size, start=self.longest - size))
        return batches

    def rows(self, size: int, max_tokens: int | None = None) -> int:
        width = shapes.row_tokens(size)
        rows = shapes.max_prefill_rows(width, max_tokens or self.max_batched_tokens)
        return min(rows, self.layout.cache_config.slots)

    def prefill(self, count: int, size: int, start: int = 0, packed: bool = False) -> PrefillBatch:
        chunks = [(self.sequence(slot, size, start), size) for slot in range(count)]
        return self.builder.prefill(chunks, packed)

    def decode(self) -> DecodeBatch:
        slots = range(self.layout.cache_config.slots)
        batch, _ = self.builder.decode(
            [self.sequence(slot, self.longest, start=self.longest) for slot in slots],
            MAX_DECODE_STEPS,
            finished_slots=(),
        )
        return batch

    def sequence(self, slot: int, size: int, start: int = 0) -> Sequence:
        """One that has computed `start` tokens and prefills `size` more, in blocks of its own."""
        config = self.layout.programs.config
        new = Sequence(slot, (0,) * (start + size), SamplingParams.from_config(config))
        new.slot, new.num_computed, new.prefill_length = slot, start, start + size
        new.blocks = list(
            range(slot * self.builder.max_blocks, (slot + 1) * self.builder.max_blocks)
        )
        return new
