"""Rows of a batch that begin with the same tokens, such as the completions of one prompt.

`SharedPrefix.fold` puts the rows of a group into one: the tokens that they share, once, and then
the other tokens of each. Layers compute each token by itself, except for attention, which runs on
the unfolded rows. So the outputs and gradients are those of the unfolded batch.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

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
        padding = jnp.zeros_like(others, shape=(len(others), self.num_padding, *x.shape[2:]))
        return jnp.concatenate([groups[:, 0, : self.length], others, padding], axis=1)

    def unfold(self, x: jax.Array) -> jax.Array:
        """[G, T, ...] to [B, S, ...]."""
        shared = x[:, None, : self.length]
        shared = jnp.broadcast_to(shared, (x.shape[0], self.rows, *shared.shape[2:]))
        others = self.others(x).reshape(x.shape[0], self.rows, -1, *x.shape[2:])
        rows = jnp.concatenate([shared, others], axis=2)
        return rows.reshape(-1, *rows.shape[2:])

    def others(self, x: jax.Array) -> jax.Array:
        """[G, T, ...] to [B, S - length, ...], the tokens after the shared ones."""
        others = x[:, self.length : self.length + self.num_others]
        return others.reshape(x.shape[0] * self.rows, -1, *x.shape[2:])

    @property
    def num_padding(self) -> int:
        return -(self.length + self.num_others) % ALIGNMENT
