"""What every layer of a pass sees beside its activations."""

from dataclasses import dataclass

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerInputs:
    positions: jax.Array  # [B, S], within each document
    segments: jax.Array | None = None  # [B, S], the document of a token, 0 is padding; None: one document a row
    key: jax.Array | None = None  # randomness of dropout; None: no dropout

    def layer(self, index: jax.Array | int) -> "LayerInputs":
        """The same with the layer's own randomness."""
        if self.key is None:
            return self
        return LayerInputs(self.positions, self.segments, jax.random.fold_in(self.key, index))
