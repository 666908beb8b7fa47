"""RMSNorm and LayerNorm over the last dimension, computed in float32."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.kernels.rms_norm import rms_norm
from maxtext.layers.parameters import Initializer


@dataclass(frozen=True)
class NormSpec:
    """`kind`: rms, or layer (mean removed, with bias). `offset`: the stored scale is what is added
    to 1.

    `scaled`: false leaves out the weight.
    """

    kind: str = "rms"
    epsilon: float = 1e-5
    offset: bool = False
    scaled: bool = True


class Norm(nnx.Module):
    def __init__(
        self,
        initializer: Initializer,
        spec: NormSpec,
        dim: int,
        dtype: Any,
        axis: str | None = "norm",
    ):
        self.spec = spec
        self.dtype = dtype
        self.scale = (
            initializer.constant((dim,), 0.0 if spec.offset else 1.0, (axis,))
            if spec.scaled
            else None
        )
        self.bias = initializer.constant((dim,), 0.0, (axis,)) if spec.kind == "layer" else None

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
