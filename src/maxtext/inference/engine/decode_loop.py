"""The body of a decode program: a loop of steps on the device, each of which extends the active
slots.

With K drafted tokens a step verifies them: the model runs on the newest token of a row and on its
drafted tokens, and its own token is sampled after each of these, as without drafts. A drafted token
is accepted while it equals the sampled token of its position, so a step emits one more token than
it accepts, and drafts change no token. The caches hold keys and values of rejected tokens until the
next step overwrites them; masks hide them, since their positions are beyond the newest token.

Shapes: N slots, B rows of a batch, T steps, K drafted tokens, V vocabulary.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from maxtext.common.trees import Array
from maxtext.common.types import Tree
from maxtext.inference.engine.batches import (
    MAX_DECODE_STEPS,
    NO_TOKEN,
    DecodeBatch,
    EngineState,
    Sampled,
    sample_next,
)
from maxtext.inference.engine.drafting import DraftedWeights, DraftInputs, Proposer
from maxtext.inference.engine.grammar_batch import INACTIVE, first_mask
from maxtext.inference.engine.model_runner import ModelOutput, ModelRunner
from maxtext.inference.sampling.logprobs import NONE, Logprobs
from maxtext.inference.sampling.sampler import ProcessorState
from maxtext.layers.inputs import LayerInputs

StepResult = tuple[EngineState, ProcessorState | None, Sampled]  # what prefill and decode return


@dataclass(frozen=True)
class DecodeLoop:
    runner: ModelRunner
    logprobs_temperature: float  # divides the logits for log-probabilities of tokens
    has_adapters: bool
    proposer: Proposer | None = None  # of drafted tokens, for batches with `num_drafts`

    def run(
        self,
        weights: Tree,
        state: EngineState,
        batch: DecodeBatch,
        processors: ProcessorState | None,
    ) -> StepResult:
        """The states after `num_steps` steps, and the tokens [T * (K + 1), B] in their order."""
        all_slots = replace(
            state, positions=jnp.where(batch.finished_mask, INACTIVE, state.positions)
        )
        state = all_slots if batch.slots is None else select_slots(all_slots, batch.slots)
        if batch.paused_mask is not None:
            positions = jnp.where(batch.paused_mask, INACTIVE, state.positions)
            state = replace(state, positions=positions)
        if batch.grammar is not None:
            token_ids, positions = batch.grammar.resume(state.token_ids, state.positions)
            state = replace(state, token_ids=token_ids, positions=positions)
        if state.drafting is not None:
            drafting = state.drafting.with_tokens(
                state.positions[:, None], state.token_ids[:, None]
            )
            state = replace(state, drafting=drafting)
        rows = processors
        if processors is not None and batch.slots is not None:
            rows = processors.rows(batch.slots)
        sampled = empty_output(batch, state.token_ids.shape[0])

        def has_next(carry: tuple) -> jax.Array:
            step, state, *_ = carry
            return (step < batch.num_steps) & jnp.any(state.positions >= 0)

        def decode_step(carry: tuple) -> tuple:
            step, state, rows, sampled = carry
            state, rows, new = self.step(weights, state, batch, step, rows)
            sampled = jax.tree.map(lambda tokens, row: tokens.at[step].set(row), sampled, new)
            return step + 1, state, rows, sampled

        carry = (jnp.int32(0), state, rows, sampled)
        if batch.static_steps:
            _, state, rows, sampled = jax.lax.fori_loop(
                0, batch.static_steps, lambda _, carry: decode_step(carry), carry
            )
        else:
            _, state, rows, sampled = jax.lax.while_loop(has_next, decode_step, carry)
        if batch.grammar is not None:
            state = replace(state, positions=batch.grammar.release(state.positions))
        if processors is not None and rows is not None:
            processors = rows if batch.slots is None else processors.set_rows(batch.slots, rows)
        if batch.paused_mask is not None:
            positions = jnp.where(batch.paused_mask, all_slots.positions, state.positions)
            state = replace(state, positions=positions)
        if batch.slots is not None:
            state = write_slots(all_slots, state, batch.slots)
        return state, processors, merge_columns(sampled)

    def step(
        self,
        weights: Tree,
        state: EngineState,
        batch: DecodeBatch,
        step: jax.Array,
        processors: ProcessorState | None,
    ) -> StepResult:
        """The states after a step of a program, and its tokens [K + 1, B]."""
        mask = None if batch.grammar is None else first_mask(jnp.asarray(batch.grammar.mask), step)
        weights, drafts = DraftedWeights.of(weights), None
        if self.proposer is not None:
            adapter_ids = state.adapter_ids if self.has_adapters else None
            inputs = DraftInputs(self.runner, weights, state, batch, processors, mask, adapter_ids)
            if batch.num_drafts:
                drafts, state = self.draft(inputs)
            else:
                state = self.proposer.observe(inputs)
        start = state.positions
        own, others = self.runner.split_caches(state.caches)
        output = self.forward(weights.target, replace(state, caches=own), batch, drafts)
        logits = output.logits
        state = replace(state, caches=[*output.caches, *others])

        def sample_column(carry: tuple, column: tuple) -> tuple[tuple, Sampled]:
            """Sample after one column of the inputs, in the rows that accepted those before."""
            accepting, state, processors = carry
            index, logits, draft = column
            sampled, active = sample_next(
                logits,
                start + index + 1,
                state.params,
                mode=batch.mode,
                num_logprobs=batch.num_logprobs,
                logprobs_temperature=self.logprobs_temperature,
                active=accepting,
                processors=processors,
                mask=first_mask(mask, index),
            )
            if processors is not None:
                processors = processors.add_tokens(sampled.tokens)
            position = jnp.where(active, start + index + 1, INACTIVE)
            state = replace(
                state,
                token_ids=jnp.where(accepting, sampled.tokens, state.token_ids),
                positions=jnp.where(accepting, position, state.positions),
            )
            return (active & (sampled.tokens == draft), state, processors), sampled

        carry = (start >= 0, state, processors)
        if drafts is None:
            no_draft = jnp.full_like(start, NO_TOKEN)
            carry, column = sample_column(carry, (0, logits[:, 0], no_draft))
            sampled = jax.tree.map(lambda x: x[None], column)
        else:
            expected = jnp.pad(drafts, ((0, 0), (0, 1)), constant_values=NO_TOKEN)
            columns = (
                jnp.arange(expected.shape[1]),
                jnp.moveaxis(logits, 1, 0),
                expected.T,
            )
            carry, sampled = jax.lax.scan(sample_column, carry, columns)
            num_drafted = jnp.sum(drafts != NO_TOKEN, axis=1, dtype=jnp.int32)
            sampled = replace(sampled, num_drafted=jnp.where(start >= 0, num_drafted, NO_TOKEN))
        _, state, processors = carry
        if state.drafting is not None:
            tokens = sampled.tokens.T
            positions = start[:, None] + 1 + jnp.arange(tokens.shape[1])
            positions = jnp.where(tokens >= 0, positions, INACTIVE)
            drafting = state.drafting.with_tokens(positions, tokens)
            state = replace(state, drafting=drafting.with_tapped(output.tapped, start))
        if batch.grammar is not None:
            state = replace(state, positions=batch.grammar.pause(state.positions))
        return state, processors, sampled

    def draft(self, inputs: DraftInputs) -> tuple[jax.Array, EngineState]:
        """Drafted tokens [B, K] after the newest token of each row, NO_TOKEN after the last that
        may be drafted, and the state with the caches of the proposer."""
        assert self.proposer is not None, "the engine drafts only if it has a proposer"
        batch = inputs.batch
        drafts, state = self.proposer.propose(inputs)
        # After the last draft a token is sampled, no later than at the last position.
        limit = state.params.last_position - 1 - state.positions
        if batch.grammar is not None:  # the host reads each token of such a row
            pauses = batch.grammar.constrained & ~batch.grammar.speculative
            limit = jnp.where(pauses, 0, limit)
        is_draft = jnp.arange(batch.num_drafts) < limit[:, None]
        is_draft &= jnp.cumprod(drafts >= 0, axis=1).astype(bool)
        return jnp.where(is_draft, drafts, NO_TOKEN), state

    def forward(
        self, weights: Tree, state: EngineState, batch: DecodeBatch, drafts: jax.Array | None
    ) -> ModelOutput:
        """Of the newest token of each row and its drafted tokens, K + 1 columns."""
        token_ids, positions = state.token_ids[:, None], state.positions[:, None]
        if drafts is not None:
            columns = jnp.arange(1, drafts.shape[1] + 1)
            is_input = (drafts != NO_TOKEN) & (positions >= 0)
            token_ids = jnp.concatenate([token_ids, drafts], axis=1)
            drafted = jnp.where(is_input, positions + columns, INACTIVE)
            positions = jnp.concatenate([positions, drafted], axis=1)
        inputs = LayerInputs(
            positions,
            block_table=jnp.asarray(batch.block_tables),
            prefix_groups=batch.prefix_groups,
            contiguous=batch.contiguous,
            max_kv_len=batch.kv_len,
            adapter_ids=state.adapter_ids if self.has_adapters else None,
        )
        return self.runner.decode(weights, state.caches, jnp.maximum(token_ids, 0), inputs)


def empty_output(batch: DecodeBatch, rows: int) -> Sampled:
    """The output of a program [T, K + 1, rows], to which its steps write."""
    columns = batch.num_drafts + 1
    max_steps = batch.static_steps or -(-MAX_DECODE_STEPS // columns)
    shape = (max_steps, columns, rows)
    logprobs = None
    if batch.num_logprobs != NONE:
        logprobs = Logprobs.zeros(shape, batch.num_logprobs)
    num_drafted = None
    if batch.num_drafts:
        num_drafted = jnp.full((max_steps, rows), NO_TOKEN, jnp.int32)
    tokens = jnp.full(shape, NO_TOKEN, jnp.int32)
    return Sampled(tokens, logprobs, num_drafted=num_drafted)


def merge_columns(sampled: Sampled) -> Sampled:
    """Tokens [T, K + 1, B] and their log-probabilities as [T * (K + 1), B]."""
    tokens, logprobs = jax.tree.map(
        lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]),
        (sampled.tokens, sampled.logprobs),
    )
    return replace(sampled, tokens=tokens, logprobs=logprobs)


def select_slots(state: EngineState, slots: Array) -> EngineState:
    """The state with the rows of `slots` [B]; a padding row has slot N and is inactive."""
    num_slots = state.positions.shape[0]
    rows: EngineState = jax.tree.map(lambda x: x[slots], replace(state, caches=[]))
    positions = jnp.where(slots < num_slots, rows.positions, INACTIVE)
    return replace(rows, caches=state.caches, positions=positions)


def write_slots(all_slots: EngineState, rows: EngineState, slots: Array) -> EngineState:
    """The state of all slots with those of `slots` as in `rows`."""

    def write(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[slots].set(new, mode="drop")

    token_ids, positions, drafting = jax.tree.map(
        write,
        (all_slots.token_ids, all_slots.positions, all_slots.drafting),
        (rows.token_ids, rows.positions, rows.drafting),
    )
    return replace(
        all_slots, caches=rows.caches, token_ids=token_ids, positions=positions, drafting=drafting
    )
