"""RMSNorm and LayerNorm over the last dimension, computed in float32."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from maxtext.kernels.rms_norm import rms_norm
from maxtext.layers.parameters import Initializer
from maxtext.layers.specs import NormSpec


class Norm(nnx.Module):
    """`heads`: x is [..., heads, dim], and each head has a scale of its own."""

    def __init__(
        self,
        initializer: Initializer,
        spec: NormSpec,
        dim: int,
        dtype: DTypeLike,
        axis: str | None = "norm",
        heads: int | None = None,
    ):
        self.spec = spec
        self.dtype = dtype
        shape, axes = ((dim,), (axis,)) if heads is None else ((heads, dim), (None, axis))
        self.scale = (
            initializer.constant(shape, 0.0 if spec.offset else 1.0, axes) if spec.scaled else None
        )
        has_bias = spec.kind == "layer" and spec.bias
        self.bias = initializer.constant(shape, 0.0, axes) if has_bias else None

    @property
    def factors(self) -> jax.Array | None:
        """The scale in float32, with its offset added."""
        scale = None if self.scale is None else self.scale[...].astype(jnp.float32)
        return scale + 1 if scale is not None and self.spec.offset else scale

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.spec.kind == "rms":
            return rms_norm(x, self.factors, self.spec.epsilon, self.dtype)
        x = x.astype(jnp.float32)
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        x = rms_norm(x, self.factors, self.spec.epsilon, jnp.float32)
        if self.bias is not None:
            x = x + self.bias[...].astype(jnp.float32)
        return x.astype(self.dtype)
