"""The rows of a batch whose tokens a grammar or bad words constrain, on the device.

A constrained row samples its first token of a program from the tokens of its mask. If the row is
speculative, it samples further tokens as if it were free, and the host keeps those that the grammar
allows: by the Gumbel-max trick with a key for each position, the masked sample is the free one
wherever that is allowed, so the tokens are the same as with a mask for every token. After a program
a constrained row is inactive, and the next program that has it resumes it from the host's tokens.
Shapes: B rows, V vocabulary, W = ceil(V / 32) words of a mask.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.inference import sequence
from maxtext.inference.bad_words import fill_token_masks
from maxtext.inference.grammar import WORD_BITS
from maxtext.inference.sampling_params import SamplingMode, SamplingParams

INACTIVE = -1  # in place of a position: the slot has nothing to decode
ALL_TOKENS = 0xFFFFFFFF  # a word of a mask


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GrammarBatch:
    mask: Any  # [B, W] uint32, the tokens that may come first; all of them in other rows
    constrained: Any  # [B] bool
    speculative: Any  # [B] bool
    token_ids: Any  # [B] int32, the newest token of a constrained row
    positions: Any  # [B] int32, of that token

    @classmethod
    def from_sequences(
        cls,
        sequences: Sequence[sequence.Sequence],
        rows: int,
        indices: Iterable[int],
        can_roll_back: bool,
    ) -> "GrammarBatch | None":
        """The batch of `rows` rows in which each sequence has the row of its index; None if none is
        constrained. `can_roll_back`: the caches allow for dropping the newest tokens.
        """
        rows_of = {
            index: seq
            for index, seq in zip(indices, sequences, strict=True)
            if seq.grammar is not None
        }
        matchers = [seq.grammar for seq in rows_of.values() if seq.grammar is not None]
        if not matchers:
            return None
        mask = np.full((rows, matchers[0].num_words), ALL_TOKENS, np.uint32)
        fill_token_masks(matchers, list(rows_of), mask)
        constrained, speculative = np.zeros(rows, bool), np.zeros(rows, bool)
        token_ids, positions = np.zeros(rows, np.int32), np.full(rows, INACTIVE, np.int32)
        for index, seq in rows_of.items():
            constrained[index] = True
            speculative[index] = can_roll_back and samples_alike(seq.params)
            token_ids[index] = seq.token_ids[-1]
            positions[index] = len(seq.token_ids) - 1
        return cls(
            mask, constrained, speculative=speculative, token_ids=token_ids, positions=positions
        )

    def resume(self, token_ids: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Token ids and positions [B] of the slots, with those of constrained rows."""
        return (
            jnp.where(self.constrained, self.token_ids, token_ids),
            jnp.where(self.constrained, self.positions, positions),
        )

    def pause(self, positions: jax.Array) -> jax.Array:
        """Positions [B] after a step: rows that are not speculative have no further one."""
        return jnp.where(self.constrained & ~self.speculative, INACTIVE, positions)

    def release(self, positions: jax.Array) -> jax.Array:
        """Positions [B] after a program: constrained rows are inactive."""
        return jnp.where(self.constrained, INACTIVE, positions)


def samples_alike(params: SamplingParams) -> bool:
    """Whether a free sample that the grammar allows is the sample under the mask. Truncation is
    relative to the allowed tokens, and counts of tokens cannot be rolled back.
    """
    truncated = params.mode == SamplingMode.TRUNCATED or params.min_p > 0
    return not truncated and not params.has_processors


def mask_logits(logits: jax.Array, mask: jax.Array) -> jax.Array:
    """Logits [B, V] with -inf for tokens whose bit in mask [B, W] is 0."""
    bits = (mask[:, :, None] >> jnp.arange(WORD_BITS, dtype=jnp.uint32)) & 1
    allowed = bits.reshape(mask.shape[0], -1)[:, : logits.shape[-1]] > 0
    return jnp.where(allowed, logits, -jnp.inf)
