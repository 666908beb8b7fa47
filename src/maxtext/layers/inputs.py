"""What every layer of a pass sees beside its activations, and what it reports beside its output."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax

from maxtext.common.load_balance import LoadBalancedOrder

# Small float32 values by name: load_balance_loss, expert_load [X], indexer_loss, max_logits [H];
# and "cache".
Aux = dict[str, Any]
Cache = dict[str, Any]  # arrays of one layer, see cache.py


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerInputs:
    positions: jax.Array  # [B, S], within each document
    segments: jax.Array | None = (
        None  # [B, S], the document of a token, 0 is padding; None: one document a row
    )
    key: jax.Array | None = None  # randomness of dropout; None: no dropout
    tokens: jax.Array | None = None  # [B, S], the ids that were embedded
    order: LoadBalancedOrder | None = field(
        default=None, metadata={"static": True}
    )  # of the tokens, if it is not their own
    cache: Cache | None = (
        None  # of the layer that is called; positions are then -1 where there is no token
    )
    fresh: bool = field(default=False, metadata={"static": True})  # nothing is before these tokens
    table: jax.Array | None = None  # [B, C], the pages of each row, or segment, in a cache of pages
    aligned: bool = field(
        default=False, metadata={"static": True}
    )  # row b of the batch has page b of the cache
    max_segments: int = field(
        default=0, metadata={"static": True}
    )  # of a row, padding is one; 0: not known
    reach: int = field(
        default=0, metadata={"static": True}
    )  # all positions are below; 0: below what the table holds
    lengths: jax.Array | None = None  # [B], the tokens of each row, if padding follows them

    def fold(self, index: jax.Array | int) -> "LayerInputs":
        """The same with the randomness of one layer, or of one part of a layer."""
        return self if self.key is None else replace(self, key=jax.random.fold_in(self.key, index))
