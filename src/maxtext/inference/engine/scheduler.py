"""Continuous batching: which sequences have slots and blocks, and which run next.

A sequence needs a slot, and blocks for its tokens as it grows. When blocks run out, the youngest
sequence is preempted: it frees its blocks and waits. Later its prompt and its sampled tokens are
prefilled together, and it goes on unchanged, since a token depends on its own sequence only.

Prompts are prefilled before running sequences go on. While requests may arrive, `chunk_size`
bounds the tokens that are prefilled between two decode programs, and long prompts share that budget
with shorter ones. The scheduler does not touch the device.
"""

import itertools
import time
from collections import deque
from collections.abc import Hashable

from maxtext.common.types import Tree
from maxtext.inference.engine import shapes
from maxtext.inference.engine.prefix_cache import PrefixCache
from maxtext.inference.engine.sequence import Sequence

# Steps of a decode program that is cut short because requests or a chunk of a prompt wait, or
# because a grammar has to check tokens.
MIN_DECODE_STEPS = 4
# Divides the number of decode steps while most slots are free and requests may arrive.
LOW_LOAD_DIVISOR = 8
Chunks = list[tuple[Sequence, int]]  # sequences, and how many of their tokens to prefill


class Scheduler:
    """`contiguous`: slot n has block n and no other, so a slot is allocated with its block.
    `snapshots`: prefixes are cached together with a copy of the per-slot caches.
    `chunk_size`: of a prompt in a prefill batch; None: all of it.
    `max_batched_tokens`: of a prefill batch, unless a single chunk has more.
    """

    def __init__(
        self,
        num_slots: int,
        prefix_cache: PrefixCache,
        *,
        contiguous: bool,
        supports_packing: bool = False,
        snapshots: bool = False,
        chunk_size: shapes.ChunkSize | None = None,
        max_batched_tokens: int = shapes.MAX_PREFILL_TOKENS,
    ):
        self.prefix_cache = prefix_cache
        self.max_batched_tokens = max_batched_tokens
        self.contiguous = contiguous
        self.supports_packing = supports_packing
        self.snapshots = snapshots
        self.max_chunk = chunk_size
        self.block_size = prefix_cache.block_size
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # the oldest first
        self.unfinished: dict[int, Sequence] = {}  # waiting and running, by request id
        self.num_slots = num_slots
        self.free_slots = list(range(num_slots))[::-1]
        self.expects_requests = False  # they may arrive at any time
        # Slots whose sequence the host has finished, while the device may still extend it.
        self.finished_slots: set[int] = set()
        self.out_of_blocks = False  # too few blocks are free for the next waiting sequence
        self.shortest_next = False  # since the last prefill batch began with a chunk
        self.num_preemptions = 0

    @property
    def num_available_slots(self) -> int:
        """Free slots that no waiting sequence will take; negative if more wait."""
        return len(self.free_slots) - len(self.waiting)

    @property
    def has_full_batch(self) -> bool:
        """Whether the waiting sequences take all free slots or fill a prefill batch."""
        if len(self.waiting) >= len(self.free_slots):
            return True
        return sum(len(seq.token_ids) for seq in self.waiting) >= self.max_batched_tokens

    @property
    def has_low_load(self) -> bool:
        """Whether most slots are free, and requests that could take them may arrive."""
        return self.expects_requests and 2 * len(self.free_slots) > self.num_slots

    @property
    def has_decoding(self) -> bool:
        return any(sequence.is_decoding for sequence in self.running)

    @property
    def chunk_size(self) -> shapes.ChunkSize | None:
        """How much of a prompt a prefill batch has now; None: all of it."""
        is_whole = self.max_chunk is None or (
            self.max_chunk.only_online and not self.expects_requests
        )
        return None if is_whole else self.max_chunk

    @property
    def interleaves(self) -> bool:
        """Whether a prefill batch may delay sequences that decode by one chunk at most."""
        return self.chunk_size is not None and self.expects_requests

    @property
    def has_long_prompt(self) -> bool:
        """Whether a prompt in prefill needs several chunks."""
        return any(
            self.next_chunk(sequence) < sequence.prefill_length - sequence.num_computed
            for sequence in self.running
            if not sequence.is_decoding
        )

    @property
    def waits_for_slots(self) -> bool:
        """Whether sequences that wait should start together, when the running ones have ended. They
        fill all slots and want equally many tokens, so they also end together. Where groups of them
        start one after the other, each group needs a prefill, and cuts the decode programs of the
        others short, from then on. Running sequences must be in the last third of their tokens.
        """
        if not self.running or len(self.waiting) < self.num_slots:
            return False
        first = itertools.islice(self.waiting, self.num_slots)
        if len({sequence.params.max_new_tokens for sequence in first}) > 1:
            return False
        return all(seq.num_decoded >= max(1, 2 * seq.num_remaining) for seq in self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)
        self.unfinished[sequence.request_id] = sequence

    def abort(self, request_id: int) -> None:
        """Drop a request; its slot and blocks are free at once. Programs in flight may still
        compute tokens for it.
        """
        sequence = self.unfinished.pop(request_id, None)
        if sequence is None:
            return
        sequence.finished = True
        if sequence.slot >= 0:
            self.finished_slots.add(sequence.slot)
            self.release(sequence)
        else:
            self.waiting.remove(sequence)
            self.out_of_blocks = False

    def uses_prefix_cache(self, sequence: Sequence) -> bool:
        """Whether a sequence looks for its prefix in the cache, and inserts its prompt. Choices of
        one request share the blocks of their prompt even if prefixes are not cached otherwise.
        """
        cache = self.prefix_cache
        shares_blocks = sequence.shares_prompt and not self.contiguous and not cache.snapshots
        return cache.enabled or shares_blocks

    # Admission.

    def admit(self) -> list[tuple[Sequence, Tree]]:
        """Give slots and blocks to waiting sequences, but for those whose first block another one
        prefills: afterwards they share it. Returns those that resume from a snapshot of the
        per-slot caches, with the snapshot.
        """
        restored: list[tuple[Sequence, Tree]] = []
        if self.waits_for_slots:
            return restored
        prefilling = {self.first_block_key(each) for each in self.running if self.adds_blocks(each)}
        for sequence in list(self.waiting) if self.free_slots else ():
            if not self.free_slots or self.out_of_blocks:
                break
            uses_cache = self.uses_prefix_cache(sequence)
            first_key = self.first_block_key(sequence)
            if uses_cache and first_key is not None and first_key in prefilling:
                continue
            match = (
                self.prefix_cache.match(sequence.token_ids, sequence.cache_namespace)
                if uses_cache and not sequence.wants_prompt_logprobs
                else None
            )
            matched = list(match.blocks) if match else []
            needed = -(-len(sequence.token_ids) // self.block_size) - len(matched)
            # Every running sequence keeps a spare block: otherwise a new one would soon be
            # preempted.
            spare = 0 if self.contiguous else len(self.running)
            enough = self.prefix_cache.num_free_blocks >= needed + spare
            allocated = self.prefix_cache.allocate(needed) if enough else None
            if allocated is None:
                self.prefix_cache.free(matched)
                self.out_of_blocks = True  # until a sequence frees its blocks
                break
            self.waiting.remove(sequence)
            self.start(sequence, matched + allocated)
            if match:
                sequence.num_computed = match.length
                if not sequence.num_output_tokens:
                    sequence.num_cached_tokens = match.length
                sequence.common_length = match.common_length
                if match.snapshot is not None:
                    restored.append((sequence, match.snapshot))
            if self.adds_blocks(sequence):
                prefilling.add(first_key)
        return restored

    def start(self, sequence: Sequence, blocks: list[int]) -> None:
        sequence.blocks = blocks
        if self.contiguous:
            sequence.slot = blocks[0]
            self.free_slots.remove(sequence.slot)
        else:
            sequence.slot = self.free_slots.pop()
        sequence.started_at = sequence.started_at or time.monotonic()
        sequence.num_computed = 0
        sequence.prefill_length = len(sequence.token_ids)
        sequence.common_length = 0
        self.running.append(sequence)

    def first_block_key(self, sequence: Sequence) -> Hashable:
        """Key that is equal for sequences whose first block can be shared; None if a sequence is
        too short to share a block."""
        if len(sequence.token_ids) <= self.block_size:
            return None
        return sequence.cache_namespace, tuple(sequence.token_ids[: self.block_size])

    def adds_blocks(self, sequence: Sequence) -> bool:
        """Whether full blocks of a sequence are still to be prefilled, which others may share."""
        return sequence.num_computed < self.shareable_length(sequence)

    def shareable_length(self, sequence: Sequence) -> int:
        """The length of the prefix that others can share: the full blocks without the last token
        to prefill, which every sequence computes itself."""
        return (sequence.prefill_length - 1) // self.block_size * self.block_size

    # Prefill.

    def next_chunk(self, sequence: Sequence) -> int:
        """How many tokens of a sequence are prefilled next. The chunks of a prompt have about the
        same size, so that their rows have few shapes."""
        count = sequence.prefill_length - sequence.num_computed
        if self.chunk_size:
            num_chunks = -(-count // self.chunk_limit(sequence))
            count = -(-count // num_chunks)
        if self.snapshots:
            # The per-slot caches are saved where the prefix departs from cached ones, and at the
            # last full block of the prompt.
            for position in (sequence.common_length, self.shareable_length(sequence)):
                if position > sequence.num_computed:
                    return min(count, position - sequence.num_computed)
        return count

    def next_prefill(self) -> tuple[Chunks, bool] | None:
        """The chunks of the next prefill batch, and whether they share one row: the oldest
        sequence in prefill, with others that fill up its row or have about its size. While requests
        may arrive, every second batch begins with the shortest sequence, if the oldest one needs
        several: it does not block the others, and they do not starve it.
        """
        pending = [sequence for sequence in self.running if not sequence.is_decoding]
        if not pending:
            return None
        if self.interleaves and self.shortest_next:
            shortest = min(pending, key=lambda seq: seq.prefill_length - seq.num_computed)
            pending.remove(shortest)
            pending.insert(0, shortest)
            self.shortest_next = False
        else:
            first = pending[0]
            self.shortest_next = self.next_chunk(first) < first.prefill_length - first.num_computed
        if packed := self.pack(pending):
            return self.chunks(packed), True
        shape = self.row_shape(pending[0])
        same_shape = [sequence for sequence in pending if self.row_shape(sequence) == shape]
        max_tokens = self.max_batched_tokens
        is_later_chunk = not shape[1]
        if self.chunk_size and (is_later_chunk or (self.interleaves and self.has_decoding)):
            max_tokens = min(max_tokens, *map(self.chunk_limit, same_shape))
        rows = shapes.max_prefill_rows(shape[0], max_tokens)
        return self.chunks(same_shape[:rows]), False

    def chunk_limit(self, sequence: Sequence) -> int:
        """The most tokens of a prefill batch with the next chunk of a sequence."""
        assert self.chunk_size is not None
        end = min(sequence.num_computed + self.chunk_size.tokens, sequence.prefill_length)
        return self.chunk_size.at(end if sequence.num_computed else 0)

    def chunks(self, sequences: list[Sequence]) -> Chunks:
        return [(sequence, self.next_chunk(sequence)) for sequence in sequences]

    def row_shape(self, sequence: Sequence) -> tuple[int, bool]:
        """The length of the row for the next chunk, and whether the chunk is the first."""
        return shapes.row_tokens(self.next_chunk(sequence)), sequence.num_computed == 0

    def pack(self, pending: list[Sequence]) -> list[Sequence]:
        """The oldest sequence and others that fit in its row; empty if it needs its own row."""
        allowed = [shape for shape in shapes.PACKED_SHAPES if shape[0] <= self.max_batched_tokens]
        capacity = max((tokens for tokens, _ in allowed), default=0)
        first, *others = [seq for seq in pending if seq.num_computed == 0] or pending[:1]
        too_long = self.next_chunk(first) > capacity
        if not self.supports_packing or first is not pending[0] or first.num_computed or too_long:
            return []
        packed, budget = [first], capacity - self.next_chunk(first)
        # The longest first: short ones fit in what they leave.
        for sequence in sorted(others, key=self.next_chunk, reverse=True):
            count = self.next_chunk(sequence)
            if count <= budget and len(packed) < max(prompts for _, prompts in allowed):
                packed.append(sequence)
                budget -= count
        return packed

    def forkable(self) -> list[Sequence]:
        """Sequences in prefill that lack nothing but the last block of their prompt, and whose
        first token no grammar or processor constrains."""
        return [
            seq
            for seq in self.running
            if not seq.is_decoding
            and seq.num_computed == self.shareable_length(seq)
            and not seq.num_output_tokens
            and not seq.wants_prompt_logprobs
            and not seq.params.has_processors
            and seq.grammar is None
        ]

    def share_last_block(self, source: Sequence, fork: Sequence) -> None:
        """Let sequences with one prompt share its last block if it is full: both write behind it.
        Otherwise the fork has a block for a copy."""
        count, rest = divmod(len(fork.prompt_ids), self.block_size)
        if rest:
            return
        own, fork.blocks[count - 1] = fork.blocks[count - 1], source.blocks[count - 1]
        self.prefix_cache.share(fork.blocks[count - 1])
        self.prefix_cache.free([own])
        self.out_of_blocks = False

    # Decode.

    def decodable(self) -> list[Sequence]:
        """Running sequences for which another decode step can be dispatched."""
        return [
            seq
            for seq in self.running
            if seq.is_decoding and seq.num_remaining > 0 and not seq.awaits_grammar
        ]

    def decode_steps(self, sequences: list[Sequence], limit: int) -> int:
        """How many steps to decode these sequences in one program, at most `limit`."""
        if self.has_low_load:  # a long program would delay requests that arrive meanwhile
            limit = max(1, limit // LOW_LOAD_DIVISOR)
        steps = min(limit, max((seq.num_remaining for seq in sequences), default=0))
        if self.interleaves and any(not seq.is_decoding for seq in self.running):
            steps = min(steps, MIN_DECODE_STEPS)  # the next chunk follows
        if any(seq.grammar is not None for seq in sequences):
            steps = min(steps, MIN_DECODE_STEPS)  # tokens after one that is not allowed are lost
        if self.waiting and sequences:
            # The sequence that finishes first makes its slot available.
            shortest = min(seq.num_remaining for seq in self.running if seq.is_decoding)
            steps = min(steps, max(MIN_DECODE_STEPS, shortest))
        return steps

    def should_collect_first(self, sequences: list[Sequence]) -> bool:
        """Whether a decode program for these sequences would delay more of those that wait: the
        programs in flight make more slots available than it would use.
        """
        num_finishing = sum(seq.is_decoding and seq.num_remaining <= 0 for seq in self.running)
        return min(num_finishing, len(self.waiting)) > len(sequences)

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate the blocks that a sequence lacks for `num_tokens` tokens; False if too few are
        free.
        """
        needed = -(-num_tokens // self.block_size) - len(sequence.blocks)
        blocks = self.prefix_cache.allocate(needed) if needed > 0 else []
        if blocks is None:
            return False
        sequence.blocks += blocks
        return True

    def preempt_youngest(self) -> None:
        """Return the youngest sequence to the head of the waiting queue. No program is in flight,
        so the host has all of its tokens.
        """
        sequence = self.running[-1]
        self.num_preemptions += 1
        self.finished_slots.add(sequence.slot)
        self.release(sequence)
        self.waiting.appendleft(sequence)

    def finish(self, sequence: Sequence, cacheable: bool = True) -> None:
        sequence.finished = True
        del self.unfinished[sequence.request_id]
        self.release(sequence, cacheable)

    def release(self, sequence: Sequence, cacheable: bool = True) -> None:
        """Free the slot and the blocks of a sequence, for programs that are dispatched from now on.
        Its full blocks stay in the prefix cache if `cacheable`.
        """
        if self.prefix_cache.enabled and not self.snapshots and sequence.is_decoding and cacheable:
            computed = sequence.token_ids[:-1]
            blocks = sequence.blocks[: len(computed) // self.block_size]
            self.prefix_cache.insert(computed, blocks, namespace=sequence.cache_namespace)
        self.prefix_cache.free(sequence.blocks)
        self.out_of_blocks = False
        self.free_slots.append(sequence.slot)
        self.running.remove(sequence)
        sequence.blocks = []
        sequence.slot = -1
        sequence.num_computed = 0
