"""Matrix products over weights, and dropout."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.layers.parameters import Maker


class Linear(nnx.Module):
    """x[..., inputs] -> [..., outputs]: a kernel of shape (*inputs, *outputs), an optional bias of shape outputs.

    Weights are kept in their own dtype and cast to the computation's on use.
    """

    def __init__(
        self,
        maker: Maker,
        inputs: Sequence[int],
        outputs: Sequence[int],
        axes: Sequence[str | None],
        dtype: Any,
        bias: bool = False,
    ):
        self.rank, self.dtype = len(inputs), dtype
        self.kernel = maker.kernel(0, inputs, outputs, axes)
        self.bias = maker.constant(outputs, 0.0, axes[len(inputs) :]) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        contracted = (tuple(range(x.ndim - self.rank, x.ndim)), tuple(range(self.rank)))
        y = jax.lax.dot_general(x, self.kernel[...].astype(self.dtype), (contracted, ((), ())))
        return y if self.bias is None else y + self.bias[...].astype(self.dtype)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zeroes a fraction of the values and scales up the rest; nothing without a key (evaluation)."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)
