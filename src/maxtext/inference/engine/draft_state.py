"""The arrays on the device from which tokens are drafted.

Shapes: N slots, B or R rows of a batch, C columns, L tokens of the longest sequence, K drafted
tokens, n E what a model taps at a token.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from maxtext.common.trees import Array
from maxtext.inference.engine.grammar_batch import INACTIVE


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftState:
    """From which tokens are drafted."""

    history: jax.Array  # [N, L], the tokens of each slot up to the newest
    # [N, K + 1, n E], what the model tapped at the latest tokens before the newest, for a head
    # that drafts from it
    tapped: jax.Array | None = None
    first: jax.Array | None = None  # [N], the position of its first column; INACTIVE: there is none

    @staticmethod
    def empty(slots: int, length: int, columns: int, tapped_dim: int, dtype: str) -> "DraftState":
        history = jnp.zeros((slots, length), jnp.int32)
        if not tapped_dim:
            return DraftState(history)
        tapped = jnp.zeros((slots, columns, tapped_dim), dtype)
        return DraftState(history, tapped, jnp.full(slots, INACTIVE, jnp.int32))

    def with_tokens(self, positions: jax.Array, token_ids: jax.Array) -> "DraftState":
        """With token_ids [B, C] at their positions [B, C]; INACTIVE is not written."""
        columns = jnp.where(positions >= 0, positions, self.history.shape[1])
        rows = jnp.arange(self.history.shape[0])[:, None]
        return replace(self, history=self.history.at[rows, columns].set(token_ids, mode="drop"))

    def with_tapped(self, tapped: jax.Array | None, first: jax.Array) -> "DraftState":
        """With new columns [B, C, n E] in the rows where `first` [B] is a position."""
        if self.tapped is None or self.first is None or tapped is None:
            return self
        tapped = self.tapped.at[:, : tapped.shape[1]].set(tapped.astype(self.tapped.dtype))
        tapped = jnp.where((first >= 0)[:, None, None], tapped, self.tapped)
        return replace(self, tapped=tapped, first=jnp.where(first >= 0, first, self.first))

    def with_slots(
        self,
        slots: Array,
        history: Array | None,
        tapped: jax.Array | None = None,
        positions: jax.Array | int = INACTIVE,
    ) -> "DraftState":
        """With other sequences in `slots` [R], their tokens [R, L], and what the model tapped
        [R, n E] at their last tokens, which have these positions [R]."""

        def write(old: jax.Array, new: Array | int) -> jax.Array:
            return old.at[slots].set(new, mode="drop")

        state = self
        if history is not None:
            state = replace(state, history=write(state.history, history))
        if state.first is not None:
            state = replace(state, first=write(state.first, positions))
        if state.tapped is not None and tapped is not None:
            columns = state.tapped.at[slots, 0].set(tapped, mode="drop")
            state = replace(state, tapped=columns)
        return state
