"""The engine's batches, its state on the device, and sampling inside a program.

`BatchBuilder` builds `PrefillBatch`, `ForkBatch` and `DecodeBatch` on the host, as arrays that the
programs read.

`EngineState` is what the device holds between programs. `sample_next` samples the next token of
each row inside a program, and the host reads the result as `Sampled`.

Shapes: N slots, R rows of a batch (B if they may also be all slots), C tokens of a row, P blocks of
a block table, T decode steps, K drafted tokens, L tokens of the longest sequence, V vocabulary,
W = ceil(V / 32) words of a mask.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.common.trees import Array
from maxtext.inference.engine import sequence, shapes
from maxtext.inference.engine.draft_state import DraftState
from maxtext.inference.engine.grammar_batch import GrammarBatch, grammar_batch
from maxtext.inference.sampling.grammar import mask_logits
from maxtext.inference.sampling.logprobs import NONE, Logprobs, compute_logprobs, program_count
from maxtext.inference.sampling.params import SamplingMode, SamplingParams
from maxtext.inference.sampling.sampler import (
    BatchedSamplingParams,
    ProcessorState,
    batch_mode,
    process_logits,
    sample,
    token_keys,
)
from maxtext.kernels.decode.prefix_attention import PrefixGroups
from maxtext.models.transformer import Caches

MAX_DECODE_STEPS = 16  # tokens of a slot in one decode program
STATIC_DECODE_STEPS = (4, MAX_DECODE_STEPS)  # where the number of steps is static
# In place of the index of a block, and of a sampled token
NO_BLOCK = 2**31 - 1  # out of bounds in every pool, so that a write to it is dropped
NO_TOKEN = -1  # the slot was inactive, or a draft was rejected
NONFINITE_LOGITS = -2  # the logits were NaN or infinite
STATIC = {"static": True}  # part of the compiled program, not an array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrefillBatch:
    """Tokens of prompts, to be written into slots."""

    token_ids: Array  # [R, C]; with segments [1, C]
    positions: Array  # like token_ids; -1 is padding, after the tokens
    slots: Array  # [R]; N for a padding row
    block_tables: Array  # [R, P]
    is_complete: Array  # [R] bool, whether the prompt ends here, so that a token is sampled
    params: BatchedSamplingParams
    adapter_ids: Array | None = (
        None  # [R], the adapter of each prompt; None: the model has no adapters
    )
    grammar: GrammarBatch | None = None  # if a grammar constrains the token of some row
    # Where one row holds all R prompts: the prompt of each token, counted from 1; 0 is padding.
    segments: Array | None = None
    targets: Array | None = (
        None  # like token_ids: the token after each, if a request wants its prompt's
    )
    history: Array | None = None  # [R, L], all tokens of a complete prompt, if the engine drafts
    num_prompt_logprobs: int = field(default=NONE, metadata=STATIC)
    from_start: bool = field(default=False, metadata=STATIC)  # no row has earlier tokens
    kv_len: int = field(default=0, metadata=STATIC)  # KV cache positions to read; 0: all
    mode: SamplingMode = field(default=SamplingMode.GREEDY, metadata=STATIC)
    num_logprobs: int = field(default=NONE, metadata=STATIC)  # most likely tokens to return
    has_processors: bool = field(default=False, metadata=STATIC)  # of logits, in any row
    keeps_logits: bool = field(default=False, metadata=STATIC)  # for a `ForkBatch`

    @property
    def description(self) -> str:
        """Of the program for it."""
        rows, tokens = self.token_ids.shape
        return f"prefill of {rows} x {tokens} tokens"


@dataclass(frozen=True)
class PrefilledPrompt:
    """A sequence whose prompt has just been prefilled, and the row of its logits [R, V]."""

    sequence: sequence.Sequence
    logits: jax.Array
    row: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ForkBatch:
    """Sequences with the prompt of another one, which has just been prefilled. They share its full
    blocks. If the last one is not full, each gets a copy of it."""

    rows: Array  # [N], the row of the prompt in the logits of its prefill
    slots: Array  # [N], of the sequences; N is padding
    positions: Array  # [N], of the tokens to sample
    last_blocks: Array  # [N], the block with the last token of the prompt
    own_blocks: Array  # [N], that of each sequence, or the same; NO_BLOCK is padding
    params: BatchedSamplingParams
    adapter_ids: Array | None = None  # [N]; None: the model has no adapters
    history: Array | None = None  # [N, L], as in `PrefillBatch`
    mode: SamplingMode = field(default=SamplingMode.GREEDY, metadata=STATIC)
    num_logprobs: int = field(default=NONE, metadata=STATIC)  # most likely tokens to return


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeBatch:
    """Which slots to extend, and where their blocks are."""

    block_tables: Array  # [N, P], or [R, P] with `slots`
    finished_mask: Array  # [N] bool, slots whose sequence the host has finished
    num_steps: Array | np.int32  # int32
    # [R], the slots to extend; N is padding, and no other slot occurs twice. None: all slots.
    slots: Array | None = None
    # [N] bool, slots to leave as they are, if the engine drafts: whether their sequence goes on is
    # not known while drafts are in flight. None: all other slots are inactive, or not in `slots`.
    paused_mask: Array | None = None
    prefix_groups: PrefixGroups | None = None  # rows that share blocks, which are read once
    grammar: GrammarBatch | None = None
    static_steps: int = field(default=0, metadata=STATIC)  # instead of num_steps; 0: num_steps
    num_drafts: int = field(default=0, metadata=STATIC)  # K, tokens that a step drafts for a row
    contiguous: bool = field(default=False, metadata=STATIC)  # slot n has block n only
    kv_len: int = field(default=0, metadata=STATIC)  # KV cache positions to read; 0: all
    mode: SamplingMode = field(default=SamplingMode.GREEDY, metadata=STATIC)
    num_logprobs: int = field(default=NONE, metadata=STATIC)  # most likely tokens to return
    has_processors: bool = field(default=False, metadata=STATIC)  # of logits, in any row

    @property
    def description(self) -> str:
        """Of the program for it."""
        limit = f" of up to {self.kv_len} tokens" if self.kv_len else ""
        drafts = f" with {self.num_drafts} drafted tokens" if self.num_drafts else ""
        return f"decode of {len(self.block_tables)} sequences{limit}{drafts}"


@dataclass(frozen=True)
class BatchBuilder:
    """Builds batches of sequences in the shapes that an executor has programs for."""

    num_slots: int
    max_blocks: int  # of one sequence
    block_size: int
    contiguous: bool
    few_programs: bool  # few shapes and static numbers of steps, since compilation is slow
    reads_in_place: bool  # decode reads blocks in place, as far as they are filled
    decode_rows: tuple[int, ...]  # how many slots a decode program may have, in increasing order
    vocab_size: int
    max_batched_tokens: int = shapes.MAX_PREFILL_TOKENS  # of a prefill batch of several rows
    has_adapters: bool = False
    can_roll_back: bool = False  # the newest tokens of a sequence can be dropped from its caches
    groups_prefixes: bool = False  # decode reads blocks of several sequences once
    forks_prompts: bool = False  # sequences may start from the prefill of another
    history_length: int = 0  # L, if the engine drafts tokens; else 0

    def prefill(
        self, chunks: Sequence[tuple[sequence.Sequence, int]], packed: bool
    ) -> PrefillBatch:
        """The next `count` tokens of each (sequence, count), all in one row if `packed`."""
        sequences = [seq for seq, _ in chunks]
        if packed:
            width, rows = shapes.packed_shape(sum(count for _, count in chunks), len(chunks))
        else:
            width = shapes.row_tokens(chunks[0][1])
            rows = shapes.prefill_rows(
                len(chunks), width, self.num_slots, self.few_programs, self.max_batched_tokens
            )
        shape = (1 if packed else rows, width)
        token_ids = np.zeros(shape, np.int32)
        positions = np.full(shape, -1, np.int32)
        adapter_ids = np.zeros(rows, np.int32)
        segments = np.zeros(shape, np.int32)
        slots = np.full(rows, self.num_slots, np.int32)
        is_complete = np.zeros(rows, bool)
        offset = 0
        for row, (seq, count) in enumerate(chunks):
            start, end = seq.num_computed, seq.num_computed + count
            index = (0, slice(offset, offset + count)) if packed else (row, slice(count))
            token_ids[index] = seq.token_ids[start:end]
            positions[index] = np.arange(start, end)
            segments[index] = row + 1
            offset += count
            slots[row] = seq.slot
            adapter_ids[row] = seq.adapter_slot
            is_complete[row] = end >= seq.prefill_length
        params = [seq.params for seq in sequences]
        from_start = sequences[0].num_computed == 0
        complete = [index for index in range(len(chunks)) if is_complete[index]]
        num_prompt_logprobs = program_count(
            (seq.params.prompt_logprobs for seq in sequences if seq.wants_prompt_logprobs),
            self.vocab_size,
        )
        return PrefillBatch(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            block_tables=self.block_tables(sequences, rows, range(len(sequences))),
            is_complete=is_complete,
            params=sampling_params(sequences, rows),
            adapter_ids=adapter_ids if self.has_adapters else None,
            grammar=grammar_batch(
                [sequences[index] for index in complete], rows, complete, can_roll_back=False
            ),
            segments=segments if packed else None,
            from_start=from_start,
            kv_len=0 if from_start else self.kv_len(seq.num_computed + n for seq, n in chunks),
            mode=batch_mode(params[index] for index in complete),
            num_logprobs=program_count(
                (params[index].logprobs for index in complete), self.vocab_size
            ),
            targets=self.targets(chunks, shape) if num_prompt_logprobs != NONE else None,
            history=self.history(sequences, rows),
            num_prompt_logprobs=num_prompt_logprobs,
            has_processors=any(params[index].has_processors for index in complete),
            keeps_logits=self.forks_prompts,
        )

    def fork(self, forks: Sequence[tuple[PrefilledPrompt, sequence.Sequence]]) -> ForkBatch:
        """For sequences with the prompts of one prefill. The batch has a row for each slot, so
        that one program serves any number."""
        prompts, sequences = zip(*forks, strict=True)
        padding = self.num_slots - len(sequences)
        params = [seq.params for seq in sequences]
        last_block = [(len(seq.prompt_ids) - 1) // self.block_size for seq in sequences]

        def column(values: Iterable[int], fill: int = 0) -> np.ndarray:
            return np.array([*values, *[fill] * padding], np.int32)

        return ForkBatch(
            rows=column(prompt.row for prompt in prompts),
            slots=column((seq.slot for seq in sequences), self.num_slots),
            positions=column(len(seq.prompt_ids) for seq in sequences),
            last_blocks=column(
                prompt.sequence.blocks[i] for prompt, i in zip(prompts, last_block, strict=True)
            ),
            own_blocks=column(
                (seq.blocks[i] for seq, i in zip(sequences, last_block, strict=True)), NO_BLOCK
            ),
            params=sampling_params(sequences, self.num_slots),
            adapter_ids=column(seq.adapter_slot for seq in sequences)
            if self.has_adapters
            else None,
            history=self.history(sequences, self.num_slots),
            mode=batch_mode(params),
            num_logprobs=program_count((each.logprobs for each in params), self.vocab_size),
        )

    def history(self, sequences: Sequence[sequence.Sequence], rows: int) -> np.ndarray | None:
        """[rows, L], the tokens of each sequence; None if no tokens are drafted from them."""
        if not self.history_length:
            return None
        history = np.zeros((rows, self.history_length), np.int32)
        for row, seq in zip(history, sequences, strict=False):
            row[: len(seq.token_ids)] = seq.token_ids
        return history

    def targets(
        self, chunks: Sequence[tuple[sequence.Sequence, int]], shape: tuple[int, int]
    ) -> np.ndarray:
        """The token after each of a prefill batch; 0 where that is not known yet."""
        targets = np.zeros(shape, np.int32)
        packed = shape[0] == 1 and len(chunks) > 1
        for (seq, count), (row, offset) in zip(chunks, chunk_offsets(chunks, packed), strict=True):
            start = seq.num_computed
            following = seq.token_ids[start + 1 : start + count + 1]
            targets[row, offset : offset + len(following)] = following
        return targets

    def decode(
        self,
        sequences: Sequence[sequence.Sequence],
        num_steps: int,
        finished_slots: Iterable[int],
        num_drafts: int = 0,
    ) -> tuple[DecodeBatch, list[int]]:
        """A batch for sequences that have their blocks, and the column of each in its output."""
        finished_mask = np.zeros(self.num_slots, bool)
        finished_mask[list(finished_slots)] = True
        rows = next(count for count in self.decode_rows if count >= len(sequences))
        columns = [seq.slot for seq in sequences]
        slots = paused_mask = None
        if self.history_length and rows == self.num_slots:
            paused_mask = np.ones(rows, bool)
            paused_mask[columns] = False
        if rows < self.num_slots:
            slots = np.full(rows, self.num_slots, np.int32)
            slots[: len(sequences)] = columns
            columns = list(range(len(sequences)))
        # The kernel that reads blocks in place has one token a row.
        kv_len = 0
        if num_drafts or not self.reads_in_place:
            kv_len = self.kv_len(seq.num_computed for seq in sequences)
        batch = DecodeBatch(
            block_tables=self.block_tables(sequences, rows, columns),
            finished_mask=finished_mask,
            num_steps=np.int32(num_steps),
            slots=slots,
            paused_mask=paused_mask,
            prefix_groups=None if num_drafts else self.prefix_groups(sequences, rows, columns),
            grammar=grammar_batch(sequences, rows, columns, self.can_roll_back),
            static_steps=num_steps if self.few_programs else 0,
            num_drafts=num_drafts,
            contiguous=self.contiguous,
            kv_len=kv_len,
            mode=batch_mode(seq.params for seq in sequences),
            num_logprobs=program_count((seq.params.logprobs for seq in sequences), self.vocab_size),
            has_processors=any(seq.params.has_processors for seq in sequences),
        )
        return batch, columns

    def block_tables(
        self, sequences: Sequence[sequence.Sequence], rows: int, indices: Iterable[int]
    ) -> np.ndarray:
        """[rows, P], the blocks of each sequence in the row of its index."""
        tables = np.zeros((rows, self.max_blocks), np.int32)
        for index, seq in zip(indices, sequences, strict=True):
            # Beyond its blocks a row points to a block of its own, which is masked, and never to
            # another sequence's.
            tables[index] = seq.blocks[0]
            tables[index, : len(seq.blocks)] = seq.blocks
        return tables

    def prefix_groups(
        self, sequences: Sequence[sequence.Sequence], rows: int, columns: Sequence[int]
    ) -> PrefixGroups | None:
        if not self.groups_prefixes:
            return None
        blocks = [seq.blocks for seq in sequences]
        return PrefixGroups.from_blocks(blocks, columns, rows, self.block_size)

    def kv_len(self, lengths: Iterable[int]) -> int:
        return shapes.kv_length(max(lengths), self.max_blocks * self.block_size)


def sampling_params(sequences: Sequence[sequence.Sequence], rows: int) -> BatchedSamplingParams:
    """Sampling parameters of the sequences, padded to `rows`."""
    padding = rows - len(sequences)
    return BatchedSamplingParams.from_params(
        [seq.params for seq in sequences] + [SamplingParams()] * padding,
        [seq.last_position for seq in sequences] + [0] * padding,
        [seq.min_position for seq in sequences] + [0] * padding,
    )


def chunk_offsets(
    chunks: Sequence[tuple[sequence.Sequence, int]], packed: bool
) -> list[tuple[int, int]]:
    """Where each chunk begins in the arrays of its prefill batch: (row, column)."""
    if not packed:
        return [(row, 0) for row in range(len(chunks))]
    ends = itertools.accumulate(count for _, count in chunks)
    return [(0, end - count) for end, (_, count) in zip(ends, chunks, strict=True)]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled:
    """The output of a program: of prefill [R], of decode [T, B], with drafts [T * (K + 1), B]."""

    tokens: jax.Array
    logprobs: Logprobs | None = None  # of the tokens, if a request wants them
    prompt_logprobs: Logprobs | None = None  # [R, C], of the token after each of the prompts
    logits: jax.Array | None = None  # [R, V] of a prefill from which others fork; not for the host
    num_drafted: jax.Array | None = None  # [T, B], tokens; NO_TOKEN where a slot was inactive


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EngineState:
    """The arrays on the device besides the weights."""

    caches: Caches
    token_ids: jax.Array  # [N], the newest token of each slot; not in the caches yet
    positions: jax.Array  # [N], of that token; INACTIVE if there is nothing to decode
    params: BatchedSamplingParams
    adapter_ids: jax.Array  # [N], the adapter of each slot; 0: none
    drafting: DraftState | None = None  # if the engine drafts tokens


def start_slots(
    state: EngineState,
    batch: PrefillBatch | ForkBatch,
    tokens: jax.Array,
    positions: jax.Array,
) -> EngineState:
    """The state with a new token at its position in the slot of each row of a batch."""

    def write(old: jax.Array, new: Array) -> jax.Array:
        return old.at[batch.slots].set(new, mode="drop")

    token_ids, positions, params = jax.tree.map(
        write, (state.token_ids, state.positions, state.params), (tokens, positions, batch.params)
    )
    adapter_ids = state.adapter_ids
    if batch.adapter_ids is not None:
        adapter_ids = write(adapter_ids, batch.adapter_ids)
    return replace(
        state,
        token_ids=token_ids,
        positions=positions,
        params=params,
        adapter_ids=adapter_ids,
    )


def token_adapters(batch: PrefillBatch) -> jax.Array | None:
    """The adapter of each row [R]; if the prompts share one row, of each token [1, C]."""
    if batch.adapter_ids is None or batch.segments is None:
        return None if batch.adapter_ids is None else jnp.asarray(batch.adapter_ids)
    padding = jnp.zeros(1, jnp.int32)
    return jnp.concatenate([padding, batch.adapter_ids])[batch.segments]


def sample_next(
    logits: jax.Array,
    positions: Array,
    params: BatchedSamplingParams,
    *,
    mode: SamplingMode,
    num_logprobs: int,
    logprobs_temperature: float,
    active: Array,
    processors: ProcessorState | None = None,
    mask: Array | None = None,
) -> tuple[Sampled, jax.Array]:
    """Sample from logits [B, V] the token at `positions` [B] of each active row. Returns the tokens
    with their log-probabilities, and which rows stay active. `processors` has the rows of the
    logits, and `mask` [B, W] their allowed tokens.
    """
    keys = token_keys(params.seed, positions)
    processed = logits
    if processors is not None:
        processed = process_logits(logits, processors, params, positions)
    if mask is not None:
        processed = mask_logits(processed.astype(jnp.float32), mask)
    tokens = sample(processed, keys, params, mode)
    logprobs = None
    if num_logprobs != NONE:
        scaled = logits.astype(jnp.float32) / logprobs_temperature
        logprobs = compute_logprobs(scaled, tokens, num_logprobs)
    finite = jnp.isfinite(logits.max(axis=-1))
    tokens = jnp.where(active, jnp.where(finite, tokens, NONFINITE_LOGITS), NO_TOKEN)
    is_stop = jnp.any(tokens[:, None] == params.stop_ids, axis=-1)
    finished = is_stop | (positions >= params.last_position) | ~finite
    return Sampled(tokens, logprobs), ~finished & active
