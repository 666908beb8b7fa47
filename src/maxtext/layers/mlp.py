"""The feed-forward block: one activation, or a gate times a linear branch."""

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxtext.layers.inputs import Aux, LayerInputs
from maxtext.layers.linear import Linear, dropout, together
from maxtext.layers.parameters import Initializer
from maxtext.sharding import constrain

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "linear": lambda x: x,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": jax.nn.gelu,  # the tanh form
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
}
LIMITED_STEEPNESS = 1.702  # gate · sigmoid(1.702 gate) is close to GELU
HIDDEN_DROPOUT = (
    0x6D6C70  # which number is folded into a layer's key; far from the small ones that `split` uses
)


def combine(
    activations: Sequence[str],
    branches: Sequence[jax.Array],
    limit: float | None = None,
    float32: bool = False,
) -> jax.Array:
    """The product of the branches, each after its activation; `float32` computes it so and returns
    it so.

    With a `limit` (gpt-oss, two branches): the gate is cut off above it and the other branch on
    both sides, the gate is multiplied by its activation instead of replaced by it, and the other
    branch is centred on one. So "sigmoid" and "linear" give gate · sigmoid(1.702 gate) · (up + 1).
    """
    if float32:
        branches = [branch.astype(jnp.float32) for branch in branches]
    functions = [ACTIVATIONS[name] for name in activations]
    if limit is None:
        return functools.reduce(
            operator.mul, (apply(x) for apply, x in zip(functions, branches, strict=True))
        )
    (gate, up), (gated, linear) = branches, functions
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * gated(LIMITED_STEEPNESS * gate) * (linear(up) + 1)


@dataclass(frozen=True)
class MlpSpec:
    hidden_dim: int
    activations: tuple[str, ...] = ("silu", "linear")  # their results are multiplied
    bias: bool = False
    fused: bool = False  # one product for all branches
    dropout_rate: float = 0.0
    float32: bool = False  # activations computed in float32
    limit: float | None = None  # on the branches' values, see `combine`

    def build(self, initializer: Initializer, embed_dim: int, dtype: Any) -> "Mlp":
        return Mlp(initializer, self, embed_dim, dtype)


class Mlp(nnx.Module):
    def __init__(self, initializer: Initializer, spec: MlpSpec, embed_dim: int, dtype: Any):
        self.spec, self.dtype = spec, dtype
        count = len(spec.activations)
        if spec.fused:
            axes: tuple[str | None, ...] = ("embed", None, "mlp")
            self.wi = Linear(
                initializer.child("wi"),
                in_shape=(embed_dim,),
                out_shape=(count, spec.hidden_dim),
                axes=axes,
                dtype=dtype,
                bias=spec.bias,
            )
        else:
            axes = ("embed", "mlp")
            for place in range(count):
                branch = Linear(
                    initializer.child(self.branch(place)),
                    in_shape=(embed_dim,),
                    out_shape=(spec.hidden_dim,),
                    axes=axes,
                    dtype=dtype,
                    bias=spec.bias,
                )
                setattr(self, self.branch(place), branch)
        self.wo = Linear(
            initializer.child("wo"),
            in_shape=(spec.hidden_dim,),
            out_shape=(embed_dim,),
            axes=("mlp", "embed"),
            dtype=dtype,
            bias=spec.bias,
        )

    @property
    def bare(self) -> bool:
        """Whether it is a gate times a linear branch, as their kernels give them."""
        spec = self.spec
        gated = len(spec.activations) == 2 and spec.activations[1] == "linear"
        return gated and not (spec.fused or spec.float32) and spec.limit is None

    def branch(self, place: int) -> str:
        return "wi" if len(self.spec.activations) == 1 else f"wi_{place}"

    def __call__(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        spec = self.spec
        # What gradients of weights need is gone when those of the layers before are computed.
        if spec.fused:
            joined = checkpoint_name(together(x, self.wi, weights_early=True)[0], "mlpwi")
            branches = [joined[..., place, :] for place in range(len(spec.activations))]
        else:
            names = [self.branch(place) for place in range(len(spec.activations))]
            found = together(x, *(getattr(self, name) for name in names), weights_early=True)
            branches = [
                checkpoint_name(each, f"mlp{name}") for name, each in zip(names, found, strict=True)
            ]
        hidden = combine(spec.activations, branches, spec.limit, spec.float32).astype(self.dtype)
        hidden = dropout(hidden, spec.dropout_rate, inputs.fold(HIDDEN_DROPOUT).key)
        hidden = constrain(hidden, "activation_batch", "activation_length", "activation_mlp")
        # The gradient of `wo` needs the branches; done early, they make room for their own
        # gradients.
        return checkpoint_name(together(hidden, self.wo, weights_early=True)[0], "mlpwo"), {}
