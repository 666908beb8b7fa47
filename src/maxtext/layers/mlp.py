"""The feed-forward block: one activation, or a gate times a linear branch."""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxtext.layers.linear import Linear, dropout
from maxtext.layers.parameters import Maker
from maxtext.sharding import constrain

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "linear": lambda x: x,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": jax.nn.gelu,  # the tanh form
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "sigmoid": jax.nn.sigmoid,
    "tanh": jax.numpy.tanh,
}


@dataclass(frozen=True)
class MlpSpec:
    width: int
    activations: tuple[str, ...] = ("silu", "linear")  # their results are multiplied
    bias: bool = False
    fused: bool = False  # one product for all branches
    dropout_rate: float = 0.0
    float32: bool = False  # activations computed in float32


class Mlp(nnx.Module):
    def __init__(self, maker: Maker, spec: MlpSpec, size: int, dtype: Any):
        self.spec, self.dtype = spec, dtype
        count = len(spec.activations)
        if spec.fused:
            axes: tuple[str | None, ...] = ("embed", None, "mlp")
            self.wi = Linear(maker.child(0), (size,), (count, spec.width), axes, dtype, spec.bias)
        else:
            axes = ("embed", "mlp")
            for place in range(count):
                branch = Linear(maker.child(place), (size,), (spec.width,), axes, dtype, spec.bias)
                setattr(self, self.branch(place), branch)
        self.wo = Linear(maker.child(count), (spec.width,), (size,), ("mlp", "embed"), dtype, spec.bias)

    def branch(self, place: int) -> str:
        return "wi" if len(self.spec.activations) == 1 else f"wi_{place}"

    def __call__(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        if self.spec.fused:
            joined = checkpoint_name(self.wi(x), "mlpwi")
            branches = [joined[..., place, :] for place in range(len(self.spec.activations))]
        else:
            names = [self.branch(place) for place in range(len(self.spec.activations))]
            branches = [checkpoint_name(getattr(self, name)(x), f"mlp{name}") for name in names]
        hidden = functools.reduce(operator.mul, map(self.activate, self.spec.activations, branches))
        hidden = dropout(hidden.astype(self.dtype), self.spec.dropout_rate, key)
        hidden = constrain(hidden, "activation_batch", "activation_length", "activation_mlp")
        return checkpoint_name(self.wo(hidden), "mlpwo")

    def activate(self, name: str, x: jax.Array) -> jax.Array:
        return ACTIVATIONS[name](x.astype("float32") if self.spec.float32 else x)
