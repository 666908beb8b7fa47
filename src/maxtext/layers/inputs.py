"""The inputs that all layers of a forward pass share, the report of a layer, and the interface of
its sublayers.
"""

from dataclasses import dataclass, field, replace

import jax
from flax import nnx

from maxtext.common.load_balance import LoadBalancedOrder
from maxtext.common.types import Tree
from maxtext.kernels.decode.prefix_attention import PrefixGroups
from maxtext.layers.shared_prefix import SharedPrefix

# Small float32 values by name: load_balance_loss, expert_load [X], indexer_loss, max_logits [H];
# and "cache", the updated cache.
Aux = dict[str, Tree]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerInputs:
    positions: jax.Array  # [B, S], within each document; with a cache, -1 is padding
    segments: jax.Array | None = None  # [B, S], 0 is padding; None: one document a row
    key: jax.Array | None = None  # of dropout; None: no dropout
    tokens: jax.Array | None = None  # [B, S], the ids that were embedded
    # The order of the tokens, if they are permuted.
    order: LoadBalancedOrder | None = field(default=None, metadata={"static": True})
    cache: Tree = None  # of the layer that is called, see cache.py
    # Whether the cache holds no earlier token of these sequences.
    is_first_chunk: bool = field(default=False, metadata={"static": True})
    block_table: jax.Array | None = None  # [B, C], the blocks of each row, or of each segment
    prefix_groups: PrefixGroups | None = None  # rows that share blocks, which are read once
    # Whether row b of the batch has block b, and no other.
    contiguous: bool = field(default=False, metadata={"static": True})
    # Upper bound of the segments in a row, padding included; 0: unknown.
    max_segments: int = field(default=0, metadata={"static": True})
    # All positions are below it; 0: below what the block table holds.
    max_kv_len: int = field(default=0, metadata={"static": True})
    lengths: jax.Array | None = None  # [B], tokens of each row, if padding follows them
    # The adapter of each row [B], or of each token [B, S]; 0: none. See adapters.py.
    adapter_ids: jax.Array | None = None
    # Whether layers report the output of attention (aux_names.ATTENTION_OUTPUT).
    reports_attention: bool = field(default=False, metadata={"static": True})
    repeat: jax.Array | int | None = None  # the index of the layer that is called in its stack
    # The rows of the batch are folded: `positions` and `segments` are [G, T].
    shared_prefix: SharedPrefix | None = field(default=None, metadata={"static": True})

    def with_shared_prefix(self, prefix: SharedPrefix) -> "LayerInputs":
        """The inputs of the folded rows."""
        segments = None if self.segments is None else prefix.fold(self.segments)
        positions = prefix.fold(self.positions)
        return replace(self, positions=positions, segments=segments, shared_prefix=prefix)

    def without_shared_prefix(self) -> "LayerInputs":
        """The inverse of `with_shared_prefix`."""
        prefix = self.shared_prefix
        assert prefix is not None
        segments = None if self.segments is None else prefix.unfold(self.segments)
        positions = prefix.unfold(self.positions)
        return replace(self, positions=positions, segments=segments, shared_prefix=None)

    def fold(self, index: jax.Array | int) -> "LayerInputs":
        """The inputs with a dropout key of its own for one layer, or for one part of a layer."""
        return self if self.key is None else replace(self, key=jax.random.fold_in(self.key, index))


class Sublayer(nnx.Module):
    """`layer(x [B, S, E], inputs) -> (output [B, S, E], Aux)`; so are whole decoder layers."""

    def decode(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        """The same for a decode step, one new token of each sequence (S = 1)."""
        return self(x, inputs)
