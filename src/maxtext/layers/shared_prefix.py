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
