"""The interface of layers: `LayerInputs`, `Sublayer`, and the auxiliary outputs `Aux` by name.

`LayerInputs` holds the inputs that all layers of a forward pass share. `Aux` is the report of a
layer: small float32 arrays, and on request the output of attention.

`SharedPrefix` describes rows of a batch that begin with the same tokens, such as the completions of
one prompt. `SharedPrefix.fold` puts the rows of a group into one: the tokens that they share, once,
and then the other tokens of each. Layers compute each token by itself, except for attention, which
runs on the unfolded rows. So the outputs and gradients are those of the unfolded batch.

Shapes: B batch, S sequence, E embed_dim, H heads, X experts; see `SharedPrefix` for folded rows.
"""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.common.types import Tree
from maxtext.kernels.attention_options import LoadBalancedOrder
from maxtext.kernels.decode.prefix_attention import PrefixGroups

LOAD_BALANCE_LOSS = "load_balance_loss"
INDEXER_LOSS = "indexer_loss"
EXPERT_LOAD = "expert_load"  # [X], the tokens routed to each expert
MAX_LOGITS = "max_logits"  # [H], the largest attention logit of each head
ATTENTION_OUTPUT = "attention_output"  # [B, S, E], after the projection; see LayerInputs

LOSSES = (LOAD_BALANCE_LOSS, INDEXER_LOSS)  # added to the objective, summed over layers
MAXIMA = (MAX_LOGITS,)  # the maximum over microbatches; other outputs are summed
ALIGNMENT = 8  # of the tokens of a folded row: matmuls on GPUs would pad each of their inputs


@dataclass(frozen=True)
class SharedPrefix:
    """Shapes: B rows of S tokens, G = B / rows groups; T tokens of a folded row: `length`, and
    S - length of each row, and padding with zeros."""

    rows: int  # of a group, which follow each other
    length: int  # tokens that all rows of a group begin with
    row_length: int  # S

    @property
    def num_others(self) -> int:
        """The tokens of a group after the shared ones."""
        return self.rows * (self.row_length - self.length)

    def fold(self, x: jax.Array) -> jax.Array:
        """[B, S, ...] to [G, T, ...]; of the shared tokens, those of the first row."""
        groups = x.reshape(-1, self.rows, *x.shape[1:])
        others = groups[:, :, self.length :]
        others = others.reshape(others.shape[0], -1, *x.shape[2:])
        return join(groups[:, 0, : self.length], others, 1, self.num_padding)

    def unfold(self, x: jax.Array) -> jax.Array:
        """[G, T, ...] to [B, S, ...]."""
        others = self.others(x).reshape(x.shape[0], self.rows, -1, *x.shape[2:])
        rows = join(x[:, None, : self.length], others, 2)
        return rows.reshape(-1, *rows.shape[2:])

    def others(self, x: jax.Array) -> jax.Array:
        """[G, T, ...] to [B, S - length, ...], the tokens after the shared ones."""
        others = x[:, self.length : self.length + self.num_others]
        return others.reshape(x.shape[0] * self.rows, -1, *x.shape[2:])

    @property
    def num_padding(self) -> int:
        return -(self.length + self.num_others) % ALIGNMENT


def join(first: jax.Array, second: jax.Array, axis: int, num_padding: int = 0) -> jax.Array:
    """Both along an axis, and zeros after them; in other dimensions they are broadcast. As a
    selection, since XLA's kernel for concatenation takes three times as long on GPUs."""

    def pad(x: jax.Array, before: int, after: int) -> jax.Array:
        return jnp.pad(x, [(before, after) if i == axis else (0, 0) for i in range(x.ndim)])

    begin, end = first.shape[axis], second.shape[axis] + num_padding
    index = jnp.arange(begin + end).reshape(-1, *[1] * (first.ndim - axis - 1))
    return jnp.where(index < begin, pad(first, 0, end), pad(second, begin, num_padding))


# The outputs with the names above, and "cache", the updated cache.
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
    # Whether layers report the output of attention (ATTENTION_OUTPUT).
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
