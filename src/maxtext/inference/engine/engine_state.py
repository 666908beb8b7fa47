"""What the device holds between programs, and what a program returns to the host.

Shapes: N slots, R rows of a batch, C tokens of a row, T decode steps, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import jax

from maxtext.inference.engine.batches import ForkBatch, PrefillBatch
from maxtext.inference.sampling.logprobs import Logprobs
from maxtext.inference.sampling.sampler import BatchedSamplingParams
from maxtext.models.transformer import Caches

NO_TOKEN = -1  # in place of a sampled token: the slot was inactive
NONFINITE_LOGITS = -2  # in place of a sampled token: the logits were NaN or infinite


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled:
    """The output of a program: of prefill [R], of decode [T, B]."""

    tokens: Any
    logprobs: Logprobs | None = None  # of the tokens, if a request wants them
    prompt_logprobs: Logprobs | None = None  # [R, C], of the token after each of the prompts
    logits: Any = None  # [R, V] of a prefill from which others fork; not for the host


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EngineState:
    """What the device holds besides the weights."""

    caches: Caches
    token_ids: jax.Array  # [N], the newest token of each slot; not in the caches yet
    positions: jax.Array  # [N], of that token; INACTIVE if there is nothing to decode
    params: BatchedSamplingParams
    adapter_ids: jax.Array  # [N], the adapter of each slot; 0: none


def start_slots(
    state: EngineState, batch: PrefillBatch | ForkBatch, tokens: jax.Array, positions: jax.Array
) -> EngineState:
    """The state with a new token at its position in the slot of each row of a batch."""

    def write(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[batch.slots].set(new, mode="drop")

    token_ids, positions, params = jax.tree.map(
        write, (state.token_ids, state.positions, state.params), (tokens, positions, batch.params)
    )
    adapter_ids = state.adapter_ids
    if batch.adapter_ids is not None:
        adapter_ids = write(adapter_ids, batch.adapter_ids)
    return EngineState(
        state.caches, token_ids, positions=positions, params=params, adapter_ids=adapter_ids
    )
