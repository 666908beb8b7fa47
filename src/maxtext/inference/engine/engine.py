"""The inference engine: a scheduler, the block pool with its prefix cache, and the device state.

`step` dispatches programs for the sequences that the scheduler selects, and returns the tokens of
the programs before: the device computes one step while the host processes the last. Requests come
and go between steps. The engine works on token ids; `LLM` converts from and to text.
"""

import contextlib
import time
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

import jax
import numpy as np

from maxtext.adapters.serving import LoadedAdapter
from maxtext.common.types import Tree
from maxtext.inference.engine import shapes
from maxtext.inference.engine.acceptance import DraftControl
from maxtext.inference.engine.batches import (
    MAX_DECODE_STEPS,
    NO_TOKEN,
    NONFINITE_LOGITS,
    STATIC_DECODE_STEPS,
    PrefilledPrompt,
    Sampled,
    chunk_offsets,
)
from maxtext.inference.engine.cache_config import (
    build_prefix_cache,
    check_cache,
    make_cache_config,
    prefill_chunk_size,
)
from maxtext.inference.engine.executor import Executor
from maxtext.inference.engine.memory import Capacity, EngineSizer
from maxtext.inference.engine.programs import Programs
from maxtext.inference.engine.scheduler import Chunks, Scheduler
from maxtext.inference.engine.sequence import (
    Sequence,
    StepOutput,
    accepted_tokens,
    add_prompt_logprobs,
)
from maxtext.inference.requests import GenerationRequest, reject_reason
from maxtext.inference.sampling.bad_words import TokenMatcher
from maxtext.inference.sampling.grammar import FAILURE
from maxtext.inference.sampling.logprobs import Logprobs, TokenLogprobs, to_host
from maxtext.inference.sampling.sampler import MAX_STOP_IDS
from maxtext.inference.validation import RequestError

MIN_GPU_SLOTS = 2  # the compiler's float matmuls are slower with a single row
# A decode program has as many steps as fit, so that slow machines also stream. Between two of them,
# short prompts are prefilled for about as long.
STEP_SECONDS = 0.1


@dataclass(frozen=True)
class InFlightStep:
    """A program on the device, and the sequence of each column of its output."""

    sampled: Sampled
    columns: tuple[tuple[int, Sequence], ...]
    num_steps: int  # 0: prefill or fork
    dispatched_at: float
    num_drafts: int = 0  # of a step
    num_prefilled: int = 0  # tokens of prompts
    # Chunks of prompts whose log-probabilities the program computes, with their index in its
    # output, their first position and their length.
    scored: tuple[tuple[Sequence, tuple[int, int], int, int], ...] = ()

    @property
    def max_tokens(self) -> int:
        """The most tokens that a decode program may add to a sequence."""
        return self.num_steps * (self.num_drafts + 1)


class InferenceEngine:
    """Generates for up to `slots` requests at a time, each of up to `length` tokens, with weights
    in the layout of `programs.template`. `timed`: a decode program has as many steps as fit into
    STEP_SECONDS; otherwise the programs that run depend on the requests alone.
    `max_batched_tokens`: of a prefill batch; longer prompts are prefilled in chunks.
    """

    def __init__(
        self,
        programs: Programs,
        weights: Tree,
        slots: int,
        length: int,
        fits_slots: bool = False,
        memory_fraction: float | None = None,
        timed: bool = True,
        max_batched_tokens: int | None = None,
        shared_prompts: bool = False,
    ):
        """`shared_prompts`: nearly all requests are for several completions of a prompt. It is
        prefilled once, and decode programs always read its blocks once for all of them.
        `fits_slots` and `memory_fraction` are as in `Capacity`. Raises ConfigError if the caches do
        not fit in memory."""
        config, build = programs.config, programs.build
        check_cache(programs, make_cache_config(programs, slots, length))
        self.capacity = Capacity(slots, length, fits_slots, memory_fraction)
        fast_single_row = build.decode_rows == 1 or bool(build.quantized_weights)
        if slots < MIN_GPU_SLOTS and build.platform == "gpu" and not fast_single_row:
            slots, fits_slots = MIN_GPU_SLOTS, True
        with programs.context():
            decode_weights = programs.decode_weights(weights)
        sizer = EngineSizer(
            programs,
            weights,
            decode_weights,
            length,
            fits_slots=fits_slots,
            memory_fraction=memory_fraction,
            shared_prompts=shared_prompts,
        )
        size = sizer.size(slots, max_batched_tokens)
        cache_config, max_batched_tokens = size.cache_config, size.max_batched_tokens
        self.programs = programs
        self.cache_config = cache_config
        self.executor = Executor(programs, weights, cache_config, decode_weights)
        max_tokens = max_batched_tokens or shapes.MAX_PREFILL_TOKENS
        self.batches = self.executor.batch_builder(shared_prompts, max_tokens)
        self.prefix_cache = build_prefix_cache(config, self.executor)
        chunk_size = prefill_chunk_size(programs, self.executor, max_batched_tokens)
        self.scheduler = Scheduler(
            cache_config.slots,
            self.prefix_cache,
            contiguous=self.executor.contiguous,
            supports_packing=self.executor.supports_packing,
            snapshots=self.prefix_cache.enabled and self.executor.has_slot_caches,
            chunk_size=chunk_size,
            max_batched_tokens=max_tokens,
        )
        self.max_length = self.max_sequence_length()
        self.in_flight: deque[InFlightStep] = deque()
        self.prefilled: dict[Hashable, PrefilledPrompt] = {}  # in this step
        # That a decode program adds to a sequence, by the time that it takes.
        self.max_tokens = MAX_DECODE_STEPS
        # Tokens of short prompts between two decode programs, by the time that they take.
        self.max_interleaved_tokens = 0
        self.collected_at = 0.0
        self.drafts = DraftControl(programs.num_drafts, config.speculative_disable_by_batch_size)
        # All processes must dispatch the same programs, so time may not decide.
        self.timed = timed and jax.process_count() == 1
        self.leased = False
        self.failed = False
        self.num_prefilled = 0  # tokens

    @property
    def weights(self) -> Tree:
        return self.executor.weights

    @property
    def has_unfinished(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running or self.in_flight)

    @property
    def wants_requests(self) -> bool:
        """Whether the waiting sequences are too few to take all free slots now, and all slots
        once more when the running sequences have ended."""
        return self.scheduler.num_available_slots > -self.cache_config.slots

    def max_sequence_length(self) -> int:
        limit = self.programs.config.pagedattn_max_pages_per_group
        is_limited = self.cache_config.block_size is not None and limit > 0
        max_blocks = limit if is_limited else self.batches.max_blocks
        max_blocks = min(max_blocks, self.prefix_cache.pool.num_blocks)
        return min(self.cache_config.length, max_blocks * self.batches.block_size)

    # Requests.

    def reject_reason(self, request: GenerationRequest) -> RequestError | None:
        """Why a request of token ids cannot be served, or None if it can."""
        return reject_reason(request, self.programs.config.vocab_size, self.max_length)

    def add_request(
        self,
        request_id: int,
        request: GenerationRequest,
        adapter: LoadedAdapter | None = None,
        grammar: TokenMatcher | None = None,
    ) -> None:
        """Queue a request of token ids that `reject_reason` does not reject. `adapter` is the one
        that the request names, or None; `grammar` constrains the tokens, and belongs to the
        sequence from here on."""
        prompt_ids = tuple(map(int, request.prompt))
        sequence = Sequence(request_id, prompt_ids, request.params, grammar=grammar)
        sequence.cache_salt = request.cache_salt
        if adapter is not None:
            sequence.adapter_slot = adapter.slot
            sequence.adapter_version = adapter.version
        self.scheduler.add(sequence)

    def abort(self, request_id: int) -> None:
        """Drop a request: the caller needs no more of its tokens."""
        self.scheduler.abort(request_id)

    @contextlib.contextmanager
    def lease(self, expects_requests: bool = False) -> Iterator[None]:
        """Exclusive use of the engine. Requests that are unfinished at the end are aborted.
        `expects_requests`: they may arrive at any time, so decode programs are short while most
        slots are free.
        """
        assert not self.leased, "another caller uses this engine"
        self.leased = True
        self.scheduler.expects_requests = expects_requests
        try:
            yield
        finally:
            self.leased = False
            self.scheduler.expects_requests = False
            if not self.failed:
                for sequence in [*self.scheduler.waiting, *self.scheduler.running]:
                    self.abort(sequence.request_id)

    def generate(self, requests: list[GenerationRequest]) -> list[list[int]]:
        """The new tokens of each request. Raises RequestError if a request cannot be served."""
        for reason in map(self.reject_reason, requests):
            if reason is not None:
                raise reason
        for index, request in enumerate(requests):
            self.add_request(index, request)
        tokens: list[list[int]] = [[] for _ in requests]
        while self.has_unfinished:
            for output in self.step():
                tokens[output.request_id] += output.sampled_tokens
        return tokens

    # Steps.

    def step(self) -> list[StepOutput]:
        """Dispatch what can run now, and return the tokens of programs that were dispatched before.

        An exception inside a step, such as Ctrl-C, leaves the host's view and the device's state
        inconsistent: the engine is `failed` and cannot be used again.
        """
        try:
            return self.dispatch_and_collect()
        except BaseException:
            self.failed = True
            raise

    def dispatch_and_collect(self) -> list[StepOutput]:
        num_in_flight, num_prefilled = len(self.in_flight), self.num_prefilled
        had_decoding = self.scheduler.has_decoding
        self.admit()
        while group := self.scheduler.next_prefill():
            self.prefill(*group)
            self.admit()  # what waited for a prefix of these
            self.fork()
            if not self.scheduler.interleaves:
                continue
            # Sequences that decode, and requests that arrive, wait for a chunk of a long prompt at
            # most, or for short prompts up to the limit. Decode programs for a part of the
            # sequences would cost more than the wait.
            is_cut = any(not sequence.is_decoding for sequence, _ in group[0])
            is_full = self.num_prefilled - num_prefilled >= self.max_interleaved_tokens
            if is_cut or (had_decoding and (is_full or self.scheduler.has_long_prompt)):
                break
        self.prefilled.clear()
        outputs: list[StepOutput] = []
        if self.scheduler.has_decoding:
            outputs += self.decode()
        # The newest program may run while the host processes the tokens of the others.
        num_left = 1 if len(self.in_flight) > num_in_flight else 0
        while len(self.in_flight) > num_left:
            outputs += self.collect()
        return outputs

    def admit(self) -> None:
        for sequence, snapshot in self.scheduler.admit():
            self.executor.write_slot(sequence.slot, snapshot)

    def prefill(self, chunks: Chunks, packed: bool) -> None:
        """Dispatch the prefill of chunks, each in its own row or all in one."""
        batch = self.batches.prefill(chunks, packed)
        for sequence, count in chunks:
            is_complete = sequence.num_computed + count >= sequence.prefill_length
            if is_complete and sequence.params.has_processors:
                self.executor.set_processors(sequence)
        sampled = self.executor.prefill(batch)
        scored = tuple(
            (sequence, index, sequence.num_computed, count)
            for (sequence, count), index in zip(chunks, chunk_offsets(chunks, packed), strict=True)
            if sequence.wants_prompt_logprobs
        )
        for sequence, count in chunks:
            self.num_prefilled += count
            sequence.num_computed += count
            sequence.in_flight = sequence.is_decoding
            self.scheduler.finished_slots.discard(sequence.slot)  # the program resets the slot
        complete = [(row, seq) for row, (seq, _) in enumerate(chunks) if seq.is_decoding]
        if sampled.logits is not None:
            for row, seq in complete:
                if not seq.num_output_tokens:
                    self.prefilled[seq.prompt_key] = PrefilledPrompt(seq, sampled.logits, row)
        # Also a program without results: the host is one program ahead of the device, not many.
        self.in_flight.append(
            InFlightStep(
                replace(sampled, logits=None),
                tuple(complete),
                num_steps=0,
                dispatched_at=time.monotonic(),
                num_prefilled=sum(count for _, count in chunks),
                scored=scored,
            )
        )
        for sequence, _ in chunks:
            if self.scheduler.uses_prefix_cache(sequence):
                self.cache_prefix(sequence)

    def fork(self) -> None:
        """Dispatch programs that start sequences whose prompt was prefilled for another one in this
        step."""
        groups: dict[int, list[tuple[PrefilledPrompt, Sequence]]] = {}
        for sequence in self.scheduler.forkable() if self.prefilled else ():
            prompt = self.prefilled.get(sequence.prompt_key)
            if prompt is not None:
                groups.setdefault(id(prompt.logits), []).append((prompt, sequence))
        for group in groups.values():
            for prompt, sequence in group:
                self.scheduler.share_last_block(prompt.sequence, sequence)
            sampled = self.executor.fork(group[0][0].logits, self.batches.fork(group))
            for _, sequence in group:
                sequence.num_computed = sequence.prefill_length
                sequence.in_flight = True
                self.scheduler.finished_slots.discard(sequence.slot)
            columns = tuple(enumerate(sequence for _, sequence in group))
            self.in_flight.append(InFlightStep(sampled, columns, 0, time.monotonic()))

    def decode(self) -> list[StepOutput]:
        """Dispatch a decode program for the sequences that are prefilled, unless it would delay
        more of those that wait. If blocks run out, the tokens of programs in flight are collected
        first, and sequences preempted.
        """
        outputs: list[StepOutput] = []
        sequences = self.scheduler.decodable()
        if self.scheduler.should_collect_first(sequences):
            return outputs
        num_drafts = self.drafts.next_drafts(len(sequences)) if sequences else 0
        num_steps = self.scheduler.decode_steps(sequences, self.max_tokens)
        num_steps = -(-num_steps // (num_drafts + 1))
        if sequences and self.executor.few_programs:
            num_steps = next(steps for steps in STATIC_DECODE_STEPS if steps >= num_steps)
        max_tokens = num_steps * (num_drafts + 1)
        for sequence in sequences:
            end = min(sequence.num_computed + max_tokens, sequence.last_position)
            while sequence in self.scheduler.running and not self.scheduler.grow(sequence, end):
                if self.in_flight:
                    outputs += self.collect()  # finished sequences free their blocks
                else:
                    self.scheduler.preempt_youngest()
        sequences = [sequence for sequence in sequences if sequence in self.scheduler.running]
        if not sequences:
            return outputs
        for sequence in sequences:
            sequence.dispatch(max_tokens)
        batch, columns = self.batches.decode(
            sequences, num_steps, self.scheduler.finished_slots, num_drafts
        )
        sampled = self.executor.decode(batch)
        self.scheduler.finished_slots.clear()
        by_column = tuple(zip(columns, sequences, strict=True))
        step = InFlightStep(sampled, by_column, num_steps, time.monotonic(), num_drafts)
        self.in_flight.append(step)
        return outputs

    def collect(self) -> list[StepOutput]:
        """Wait for the oldest program in flight and return its tokens."""
        done = self.in_flight.popleft()
        sampled: Sampled = jax.device_get(done.sampled)
        tokens, logprobs = sampled.tokens, sampled.logprobs
        if not done.num_steps:
            tokens, logprobs = jax.tree.map(lambda x: x[None], (tokens, logprobs))
        self.update_limits(done)
        for sequence, index, start, count in done.scored:
            assert sampled.prompt_logprobs is not None, "the program computed them for this chunk"
            add_prompt_logprobs(sequence, sampled.prompt_logprobs, index, start, count)
        if sampled.num_drafted is not None:
            self.drafts.add(np.asarray(sampled.num_drafted), np.asarray(tokens))
        token_lists = tokens.T.tolist()
        outputs = []
        for column, seq in done.columns:
            if seq.finished:
                continue
            row, row_logprobs = token_lists[column], logprobs and logprobs.column(column)
            if done.num_drafts:  # rejected drafts are gaps
                emitted = np.flatnonzero(tokens[:, column] != NO_TOKEN)
                row = [row[index] for index in emitted]
                row_logprobs = jax.tree.map(lambda x, index=emitted: x[index], row_logprobs)
            outputs.append(self.process(seq, row, row_logprobs, done.max_tokens))
        return outputs

    def update_limits(self, done: InFlightStep) -> None:
        """Set how much fits into STEP_SECONDS, by the time that a program took."""
        now = time.monotonic()
        seconds = max(now - max(done.dispatched_at, self.collected_at), 1e-9)
        self.collected_at = now
        if self.timed and done.num_steps:
            max_tokens = STEP_SECONDS * done.max_tokens / seconds
            self.max_tokens = int(min(max(max_tokens, 1), MAX_DECODE_STEPS))
        elif self.timed and done.num_prefilled:
            self.max_interleaved_tokens = int(STEP_SECONDS * done.num_prefilled / seconds)

    def process(
        self, sequence: Sequence, tokens: list[int], logprobs: Logprobs | None, max_tokens: int
    ) -> StepOutput:
        """Append the sampled tokens of a program, which may be `max_tokens`, to a sequence, and
        finish it if one ends it."""
        sampled_tokens: list[int] = []
        finish_reason, error = None, None
        is_first = not sequence.num_output_tokens
        if sequence.params.max_new_tokens == 0:  # the prompt alone was asked for
            tokens, finish_reason = [], "length"
        last_position, stop_ids = sequence.last_position, sequence.params.stop_token_ids
        for token in accepted_tokens(sequence, tokens):
            if token == NO_TOKEN:
                break
            if token == NONFINITE_LOGITS:
                finish_reason = "error"
                error = "the model's logits are NaN or infinite: its weights are broken"
                break
            sampled_tokens.append(token)
            sequence.token_ids.append(token)
            if token in stop_ids:
                finish_reason = "end"
            elif len(sequence.token_ids) > last_position:
                finish_reason = "length"
            if finish_reason:
                break
        # The caches may have more tokens: rejected drafts, and tokens that the grammar forbids.
        sequence.collect(max_tokens)
        if sequence.grammar is not None and finish_reason is None:
            if sequence.grammar.is_complete:
                finish_reason = "end"
            elif sequence.grammar.error or not sampled_tokens:
                finish_reason = "error"
                reason = sequence.grammar.error or "no token may follow"
                error = f"{FAILURE}: {reason}"
        if finish_reason:
            self.finish(sequence, finish_reason)
        count = sequence.params.logprobs
        token_logprobs: list[TokenLogprobs] = []
        if logprobs is not None and count is not None:
            token_logprobs = to_host(logprobs, sampled_tokens, count)
        return StepOutput(
            request_id=sequence.request_id,
            sampled_tokens=tuple(sampled_tokens),
            logprobs=tuple(token_logprobs),
            prompt_logprobs=tuple(sequence.prompt_logprobs) if is_first else (),
            num_cached_tokens=sequence.num_cached_tokens,
            started_at=sequence.started_at,
            finish_reason=finish_reason,
            error=error,
        )

    def finish(self, sequence: Sequence, finish_reason: str) -> None:
        device_stop_ids = sequence.params.stop_token_ids[:MAX_STOP_IDS]
        if finish_reason == "end" and sequence.token_ids[-1] not in device_stop_ids:
            self.scheduler.finished_slots.add(sequence.slot)
        if finish_reason == "error":
            self.clear_caches(sequence)
        self.scheduler.finish(sequence, cacheable=finish_reason != "error")

    def clear_caches(self, sequence: Sequence) -> None:
        """Overwrite the caches of a sequence with zeros: NaN would reach the next sequence that
        has them, even with an attention weight of zero.
        """
        for block in self.prefix_cache.invalidate(sequence.blocks):
            self.executor.clear_block(block)
        self.executor.clear_slot(sequence.slot)

    def cache_prefix(self, sequence: Sequence) -> None:
        """Insert the full blocks that a sequence has prefilled into the prefix cache."""
        num_full = sequence.num_computed // self.batches.block_size
        length = num_full * self.batches.block_size
        blocks = sequence.blocks[:num_full]
        if not self.scheduler.snapshots:
            self.prefix_cache.insert(
                sequence.token_ids[:length], blocks, namespace=sequence.cache_namespace
            )
        elif length == sequence.num_computed:
            snapshot = self.executor.read_slot(sequence.slot)
            self.prefix_cache.insert(
                sequence.token_ids[:length], blocks, snapshot, sequence.cache_namespace
            )
