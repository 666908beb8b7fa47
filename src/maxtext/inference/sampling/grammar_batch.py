"""The rows of a batch whose tokens a grammar or bad words constrain, on the device.

A constrained row samples its first token of a program from the tokens of its mask. If the row is
speculative, it samples further tokens as if it were free, and the host keeps those that the grammar
allows: by the Gumbel-max trick with a key for each position, the masked sample is the free one
wherever that is allowed, so the tokens are the same as with a mask for every token. After a program
a constrained row is inactive, and the next program that has it resumes it from the host's tokens.
Shapes: B rows, V vocabulary, W = ceil(V / 32) words of a mask.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from maxtext.inference.sampling.grammar import WORD_BITS

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


def mask_logits(logits: jax.Array, mask: jax.Array) -> jax.Array:
    """Logits [B, V] with -inf for tokens whose bit in mask [B, W] is 0."""
    bits = (mask[:, :, None] >> jnp.arange(WORD_BITS, dtype=jnp.uint32)) & 1
    allowed = bits.reshape(mask.shape[0], -1)[:, : logits.shape[-1]] > 0
    return jnp.where(allowed, logits, -jnp.inf)
