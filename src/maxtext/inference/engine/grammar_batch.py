"""The part of a batch for rows whose tokens a grammar or bad words constrain.

Shapes: B rows of a batch, V vocabulary, W = ceil(V / 32) words of a mask.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.common.trees import Array
from maxtext.inference.engine import sequence
from maxtext.inference.sampling.bad_words import fill_token_masks
from maxtext.inference.sampling.grammar import ALL_TOKENS
from maxtext.inference.sampling.params import SamplingMode, SamplingParams

INACTIVE = -1  # in place of a position: the slot has nothing to decode


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GrammarBatch:
    """The masks of the rows whose tokens a grammar or bad words constrain.

    A constrained row samples its first token of a program from the tokens of its mask. If it is
    speculative, it samples further tokens as if it were free, and the host keeps those that the
    grammar allows: by the Gumbel-max trick with a key for each position, the masked sample is the
    free one wherever that is allowed, so the tokens are the same as with a mask for every token.
    After a program a constrained row is inactive, and the next program that has it resumes it from
    the host's tokens.
    """

    mask: Array  # [B, W] uint32, the tokens that may come first; all of them in other rows
    constrained: Array  # [B] bool
    speculative: Array  # [B] bool
    token_ids: Array  # [B] int32, the newest token of a constrained row
    positions: Array  # [B] int32, of that token

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


def first_mask(mask: jax.Array | None, index: jax.Array | int) -> jax.Array | None:
    """The mask of a program's token `index`: only the first is constrained."""
    return None if mask is None else jnp.where(index == 0, mask, jnp.uint32(ALL_TOKENS))


def grammar_batch(
    sequences: Sequence[sequence.Sequence],
    rows: int,
    indices: Iterable[int],
    can_roll_back: bool,
) -> GrammarBatch | None:
    """The batch of `rows` rows in which each sequence has the row of its index; None if none is
    constrained. `can_roll_back`: the caches allow for dropping the newest tokens.
    """
    rows_of = {
        index: seq for index, seq in zip(indices, sequences, strict=True) if seq.grammar is not None
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
    return GrammarBatch(
        mask, constrained, speculative=speculative, token_ids=token_ids, positions=positions
    )


def samples_alike(params: SamplingParams) -> bool:
    """Whether a free sample that the grammar allows is the sample under the mask. Truncation is
    relative to the allowed tokens, and counts of tokens cannot be rolled back.
    """
    truncated = params.mode == SamplingMode.TRUNCATED or params.min_p > 0
    return not truncated and not params.has_processors
