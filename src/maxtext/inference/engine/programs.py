"""The compiled programs of the engine: prefill, decode, and copies of cache contents.

`prefill` writes the tokens of prompts into slots and samples the first token of those that are
complete. `fork` starts sequences with the same prompt from its logits. `decode` extends all active
slots by several tokens, in one loop on the device. A slot becomes inactive by itself at its last
position or with one of its stop ids.

A token depends on its own sequence, seed and position only: programs differ in shapes and in what
they skip, never in what they compute. Programs of batches in which a request uses logits processors
also take and return the state of these. Shapes: N slots, R rows of a batch, C tokens of a row,
T decode steps, V vocabulary.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.common.trees import flatten_dict, unflatten_dict
from maxtext.configs.types import MaxTextConfig
from maxtext.inference.engine.batches import (
    DecodeBatch,
    EngineState,
    ForkBatch,
    PrefillBatch,
    Sampled,
    sample_next,
    start_slots,
    token_adapters,
)
from maxtext.inference.engine.decode_loop import DecodeLoop, StepResult
from maxtext.inference.engine.draft_state import DraftState
from maxtext.inference.engine.drafting import DraftedWeights, DraftPrefill, Proposer
from maxtext.inference.engine.grammar_batch import INACTIVE
from maxtext.inference.engine.model_runner import (
    CachedModelRunner,
    ModelRunner,
    at_last_token,
    is_paged,
    select_caches,
)
from maxtext.inference.engine.program_cache import (
    ADAPTER_OPTIONS,
    Compilation,
    Program,
    ProgramCache,
    jit,
)
from maxtext.inference.sampling.logprobs import Logprobs, prompt_logprobs
from maxtext.inference.sampling.sampler import (
    BatchedSamplingParams,
    ProcessorState,
)
from maxtext.layers.cache import CacheConfig
from maxtext.layers.context import REFERENCE, BuildContext
from maxtext.layers.inputs import LayerInputs
from maxtext.layers.linear import pack_projections
from maxtext.layers.lora import is_adapter
from maxtext.layers.parameters import Template, Tree
from maxtext.layers.weight_layout import Path, leaf_layouts
from maxtext.sharding import AxisRules, use_rules

ARGS = ParamSpec("ARGS")
RESULT = TypeVar("RESULT")
BATCH = slice(2, None)  # the arguments of prefill and decode after the weights and the state


@dataclass(frozen=True)
class Programs:
    """Functions that are compiled once for all engines of a model."""

    config: MaxTextConfig
    template: Template
    rules: AxisRules
    build: BuildContext = REFERENCE
    logprobs_temperature: float = 1.0  # divides the logits for log-probabilities of tokens
    # With packed projections, whose weights are copies (`decode_weights`); None: `template`.
    decode_template: Template | None = None
    proposer: Proposer | None = None  # of speculative decoding

    @cached_property
    def runner(self) -> ModelRunner:
        return ModelRunner.from_config(self.config, self.template, self.build, self.taps)

    @cached_property
    def decode_runner(self) -> ModelRunner:
        template = self.decode_template
        return self.runner if template is None else replace(self.runner, template=template)

    @property
    def taps(self) -> tuple[int, ...]:
        return () if self.proposer is None else self.proposer.taps(self.config)

    @property
    def has_caches(self) -> bool:
        """Whether a decode step computes the new token only."""
        return isinstance(self.runner, CachedModelRunner)

    @property
    def num_drafts(self) -> int:
        """Tokens that a decode step may draft for a sequence."""
        return 0 if self.proposer is None else self.proposer.num_tokens

    def with_draft_weights(self, weights: Tree) -> Tree:
        """The weights that programs take: with those of a model that drafts tokens, if any."""
        draft = None if self.proposer is None else self.proposer.weights
        return weights if draft is None else DraftedWeights(weights, draft)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """The sharding rules and the matmul precision under which programs are traced."""
        precision = self.config.matmul_precision.value
        with use_rules(self.rules), jax.default_matmul_precision(precision):
            yield

    @cached_property
    def forward(self) -> Program[[Tree, jax.Array, jax.Array | None], jax.Array]:
        """weights, token ids [B, S], adapter ids [B] or None -> logits [B, S, V], without a
        cache."""

        def forward(
            weights: Tree, token_ids: jax.Array, adapter_ids: jax.Array | None = None
        ) -> jax.Array:
            positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1]), token_ids.shape)
            inputs = LayerInputs(positions, adapter_ids=adapter_ids)
            return self.template.bind(weights).run_logits(token_ids, inputs)

        return jit(forward)

    @cached_property
    def target_logprobs(
        self,
    ) -> Program[
        [Tree, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None],
        tuple[Logprobs, jax.Array],
    ]:
        """weights, token ids [B, S], the token after each [B, S], lengths [B], K choices of the
        token after the last [B, K], adapter ids [B] or None -> `Logprobs` [B, S] of the tokens
        after each, with the most likely one, and the log-probabilities [B, K] of the choices;
        without a cache. Logits exist for a few tokens at a time."""

        def target_logprobs(
            weights: Tree,
            token_ids: jax.Array,
            targets: jax.Array,
            lengths: jax.Array,
            last_targets: jax.Array,
            adapter_ids: jax.Array | None = None,
        ) -> tuple[Logprobs, jax.Array]:
            positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1]), token_ids.shape)
            inputs = LayerInputs(positions, lengths=lengths, adapter_ids=adapter_ids)
            hidden, _ = self.template.bind(weights).hidden(token_ids, inputs)
            project = functools.partial(self.runner.logits, weights)
            logprobs = prompt_logprobs(hidden, targets, adapter_ids, project, 1)
            last_hidden = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
            logits = project(last_hidden, adapter_ids)[:, 0].astype(jnp.float32)
            choices = jnp.take_along_axis(jax.nn.log_softmax(logits), last_targets, axis=-1)
            return logprobs, choices

        return jit(target_logprobs)

    def jit(self, function: Callable[ARGS, RESULT], **options: Any) -> Program[ARGS, RESULT]:
        """`jax.jit` of a function that returns states. On one device their sharding is stated:
        new states and those that programs return would differ in how they express it, and the
        first program of an engine would be compiled again for its second run.
        """
        sharding = self.rules.replicated() if self.rules.mesh.size == 1 else None
        return jit(function, out_shardings=sharding, **options)

    @cached_property
    def init_state(self) -> Program[[CacheConfig], EngineState]:
        return self.jit(self.run_init_state, static_argnums=0)

    @cached_property
    def prefill(
        self,
    ) -> ProgramCache[[Tree, EngineState, PrefillBatch, ProcessorState | None], StepResult]:
        return ProgramCache(
            self.jit, self.run_prefill, BATCH, self.compilation.watch, donate_argnums=(1, 3)
        )

    @cached_property
    def fork(self) -> Program[[EngineState, jax.Array, ForkBatch], tuple[EngineState, Sampled]]:
        return self.jit(self.run_fork, donate_argnums=0)

    def decode_weights(self, weights: Tree) -> Tree:
        """The weights that decode programs take: those of packed projections, and casts of
        adapters, are copies, made once for all programs; all others are the arrays of `weights`."""
        if not self.decode_paths:
            return weights
        sources, changed = flatten_dict(weights), self.changed_decode_weights(weights)
        return unflatten_dict(
            {path: changed.get(name, sources.get(path)) for path, name in self.decode_paths.items()}
        )

    @cached_property
    def decode_paths(self) -> dict[Path, str]:
        """The paths of `decode_weights`, and their names; empty if none is a copy."""
        paths = leaf_layouts(self.decode_runner.template)
        if self.decode_template is None and not any(map(is_adapter, paths)):
            return {}
        return {path: str(path) for path in paths}

    @cached_property
    def changed_decode_weights(self) -> Program[[Tree], dict[str, jax.Array]]:
        """weights -> the `decode_weights` that are not among them, by their path."""

        def changed_decode_weights(weights: Tree) -> dict[str, jax.Array]:
            sources, template = flatten_dict(weights), self.decode_runner.template
            if self.decode_template is not None:
                weights = pack_projections(template, weights)
            casts = flatten_dict(template.cast(weights))
            converted = {
                path: casts[path] if is_adapter(path) else weight
                for path, weight in flatten_dict(weights).items()
            }
            return {str(p): w for p, w in converted.items() if w is not sources.get(p)}

        return jit(changed_decode_weights)

    @cached_property
    def decode(
        self,
    ) -> ProgramCache[[Tree, EngineState, DecodeBatch, ProcessorState | None], StepResult]:
        has_adapters = self.build.adapters is not None or self.config.lora_rank > 0
        options = ADAPTER_OPTIONS if has_adapters and self.build.platform == "gpu" else None
        return ProgramCache(
            self.jit,
            self.run_decode,
            BATCH,
            self.compilation.watch,
            donate_argnums=(1, 3),
            compiler_options=options,
        )

    @cached_property
    def compilation(self) -> Compilation:
        """Of programs of prefill and decode."""
        return Compilation()

    @property
    def num_compiled(self) -> int:
        """Programs of prefill and decode."""
        return len(self.prefill.programs) + len(self.decode.programs)

    @cached_property
    def init_processors(self) -> Program[[int, int], ProcessorState]:
        return self.jit(ProcessorState.zeros, static_argnums=(0, 1))

    @cached_property
    def set_processors(
        self,
    ) -> Program[[ProcessorState, np.int32, ProcessorState], ProcessorState]:
        """The state of the processors with another row in a slot."""
        return self.jit(ProcessorState.set_rows, donate_argnums=0)

    @cached_property
    def read_caches(self) -> Program[[EngineState, np.int32, bool], Tree]:
        """A copy of one block of the paged caches, or of one slot of the other caches."""

        def read_caches(state: EngineState, index: np.int32, paged: bool) -> Tree:
            return jax.tree.map(lambda x: x[index], select_caches(state.caches, paged))

        return jit(read_caches, static_argnums=2)

    @cached_property
    def write_caches(self) -> Program[[EngineState, np.int32, Tree, bool], EngineState]:
        """The state with such a copy written to a block or slot."""

        def write_caches(
            state: EngineState, index: np.int32, data: Tree, paged: bool
        ) -> EngineState:
            selected = select_caches(state.caches, paged)
            written = iter(jax.tree.map(lambda x, y: x.at[index].set(y), selected, data))
            caches = [
                next(written) if is_paged(cache) == paged else cache for cache in state.caches
            ]
            return replace(state, caches=caches)

        return self.jit(write_caches, static_argnums=3, donate_argnums=0)

    def run_init_state(self, cache_config: CacheConfig) -> EngineState:
        slots, caches, drafting = cache_config.slots, self.runner.init_caches(cache_config), None
        if self.proposer is not None:
            caches += self.proposer.init_caches(cache_config)
            drafting = DraftState.empty(
                slots,
                cache_config.length,
                columns=self.num_drafts + 1,
                tapped_dim=len(self.taps) * self.config.emb_dim,
                dtype=self.config.dtype.value,
            )
        return EngineState(
            caches=caches,
            drafting=drafting,
            token_ids=jnp.zeros(slots, jnp.int32),
            positions=jnp.full(slots, INACTIVE, jnp.int32),
            params=BatchedSamplingParams.zeros(slots),
            adapter_ids=jnp.zeros(slots, jnp.int32),
        )

    def run_prefill(
        self,
        weights: Tree,
        state: EngineState,
        batch: PrefillBatch,
        processors: ProcessorState | None = None,
    ) -> StepResult:
        """The states with the tokens of the batch in them, and the first token [R] of the prompts
        that are complete.
        """
        # A shared row has one segment more than prompts: the padding after them.
        max_segments = 0 if batch.segments is None else batch.slots.shape[0] + 1
        positions = jnp.asarray(batch.positions)
        inputs = LayerInputs(
            positions,
            None if batch.segments is None else jnp.asarray(batch.segments),
            is_first_chunk=batch.from_start,
            block_table=jnp.asarray(batch.block_tables),
            max_kv_len=batch.kv_len,
            max_segments=max_segments,
            adapter_ids=token_adapters(batch),
        )
        weights = DraftedWeights.of(weights)
        caches, others = self.runner.split_caches(state.caches)
        output = self.runner.prefill(weights.target, caches, batch.token_ids, inputs, batch.slots)
        if self.proposer is not None:
            others = self.proposer.prefill(
                DraftPrefill(self.runner, weights, others, batch, inputs, output.tapped)
            )
        next_positions = at_last_token(positions, inputs) + 1
        rows = None if processors is None else processors.rows(batch.slots)
        sampled, active = sample_next(
            output.logits,
            next_positions,
            batch.params,
            mode=batch.mode,
            num_logprobs=batch.num_logprobs,
            logprobs_temperature=self.logprobs_temperature,
            active=batch.is_complete,
            processors=rows,
            mask=None if batch.grammar is None else batch.grammar.mask,
        )
        if batch.grammar is not None:
            active &= ~batch.grammar.constrained
        if processors is not None and rows is not None:
            processors = processors.set_rows(batch.slots, rows.add_tokens(sampled.tokens))
        if batch.targets is not None:
            scores = prompt_logprobs(
                output.hidden,
                jnp.asarray(batch.targets),
                inputs.adapter_ids,
                functools.partial(self.runner.logits, weights.target),
                batch.num_prompt_logprobs,
            )
            sampled = replace(sampled, prompt_logprobs=scores)
        if batch.keeps_logits:
            sampled = replace(sampled, logits=output.logits)
        positions = jnp.where(active, next_positions, INACTIVE)
        drafting = state.drafting
        if drafting is not None:
            tapped = None if output.tapped is None else at_last_token(output.tapped, inputs)
            drafting = drafting.with_slots(batch.slots, batch.history, tapped, next_positions - 1)
        state = replace(state, caches=[*output.caches, *others], drafting=drafting)
        state = start_slots(state, batch, sampled.tokens, positions)
        return state, processors, sampled

    def run_fork(
        self, state: EngineState, logits: jax.Array, batch: ForkBatch
    ) -> tuple[EngineState, Sampled]:
        """The state with sequences that have prompts of a prefill with these logits [R, V], and
        their first tokens [N]. A padding row has slot N."""
        caches = [
            jax.tree.map(
                lambda x: x.at[batch.own_blocks].set(x[batch.last_blocks], mode="drop"), cache
            )
            for cache in state.caches
        ]
        sampled, active = sample_next(
            logits[batch.rows],
            batch.positions,
            batch.params,
            mode=batch.mode,
            num_logprobs=batch.num_logprobs,
            logprobs_temperature=self.logprobs_temperature,
            active=batch.slots < len(state.positions),
        )
        positions = jnp.where(active, batch.positions, INACTIVE)
        drafting = state.drafting
        if drafting is not None:
            drafting = drafting.with_slots(batch.slots, batch.history)
        state = replace(state, caches=caches, drafting=drafting)
        return start_slots(state, batch, sampled.tokens, positions), sampled

    def run_decode(
        self,
        weights: Tree,
        state: EngineState,
        batch: DecodeBatch,
        processors: ProcessorState | None = None,
    ) -> StepResult:
        """As `DecodeLoop.run`; `weights` are `decode_weights`."""
        loop = DecodeLoop(
            self.decode_runner,
            self.logprobs_temperature,
            has_adapters=self.build.adapters is not None,
            proposer=self.proposer,
        )
        return loop.run(weights, state, batch, processors)
