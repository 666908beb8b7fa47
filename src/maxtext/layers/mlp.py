"""The MLP: one activation, or a gate times a linear branch."""

import functools
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from maxtext.layers.context import INFERENCE, BuildContext, choose
from maxtext.layers.inputs import Aux, LayerInputs, Sublayer
from maxtext.layers.linear import PackedLinear, build_linear, project
from maxtext.layers.parameters import Initializer, dropout
from maxtext.layers.specs import MlpSpec
from maxtext.layers.weight_layout import packing_unsupported_reason
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
HIDDEN_DROPOUT = 0x6D6C70  # folded into a layer's key; far from the small numbers of `split`


def combine(
    activations: Sequence[str],
    branches: Sequence[jax.Array],
    limit: float | None = None,
    float32: bool = False,
) -> jax.Array:
    """The product of the branches, each after its activation; `float32` computes and returns it in
    float32.

    With a `limit` (gpt-oss, two branches): the gate is clipped from above and the other branch on
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


class Mlp(Sublayer):
    """y = (act(x wi_0) · (x wi_1)) wo"""

    name = "plain"
    mode: str | None = None

    @classmethod
    def unsupported_reason(cls, spec: MlpSpec, context: BuildContext) -> str | None:
        return None

    def __init__(self, initializer: Initializer, spec: MlpSpec, embed_dim: int, dtype: DTypeLike):
        self.spec = spec
        self.dtype = dtype
        self.build_branches(initializer, embed_dim)
        self.wo = build_linear(
            initializer,
            "wo",
            in_shape=(spec.hidden_dim,),
            out_shape=(embed_dim,),
            axes=("mlp", "embed"),
            dtype=dtype,
            bias=spec.bias,
        )

    def build_branches(self, initializer: Initializer, embed_dim: int) -> None:
        spec = self.spec
        fused = spec.fused
        for name in spec.branches:
            linear = build_linear(
                initializer,
                name,
                in_shape=(embed_dim,),
                out_shape=(len(spec.activations), spec.hidden_dim) if fused else (spec.hidden_dim,),
                axes=("embed", None, "mlp") if fused else ("embed", "mlp"),
                dtype=self.dtype,
                bias=spec.bias,
            )
            setattr(self, name, linear)

    def project_branches(self, x: jax.Array) -> list[jax.Array]:
        """The input of each activation, [B, S, M]."""
        spec = self.spec
        # The activations that dw needs are freed before the gradients of earlier layers.
        linears = [getattr(self, name) for name in spec.branches]
        outputs = project(x, *linears, weight_grads_first=True)
        if spec.fused:
            packed = checkpoint_name(outputs[0], "mlpwi")
            return [packed[..., i, :] for i in range(len(spec.activations))]
        return [
            checkpoint_name(y, f"mlp{name}") for name, y in zip(spec.branches, outputs, strict=True)
        ]

    def __call__(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        spec = self.spec
        branches = self.project_branches(x)
        hidden = combine(spec.activations, branches, spec.limit, spec.float32).astype(self.dtype)
        hidden = dropout(hidden, spec.dropout_rate, inputs.fold(HIDDEN_DROPOUT).key)
        hidden = constrain(hidden, "activation_batch", "activation_length", "activation_mlp")
        # dw of `wo` needs the branches; computed early, it frees them for their own gradients.
        return checkpoint_name(project(hidden, self.wo, weight_grads_first=True)[0], "mlpwo"), {}


class PackedMlp(Mlp):
    """Packed gate-up: one matmul for the branches."""

    name = "packed gate-up"
    mode = INFERENCE

    @classmethod
    def unsupported_reason(cls, spec: MlpSpec, context: BuildContext) -> str | None:
        if spec.fused or len(spec.activations) != 2:
            return "needs two branches with weights of their own"
        if context.copies_weights:
            return "would copy most weights of the model"
        return packing_unsupported_reason(context)

    def build_branches(self, initializer: Initializer, embed_dim: int) -> None:
        spec = self.spec
        self.gate_up = PackedLinear(
            initializer,
            spec.branches,
            in_shape=(embed_dim,),
            out_shapes=[(spec.hidden_dim,)] * 2,
            dtype=self.dtype,
            bias=spec.bias,
        )

    def project_branches(self, x: jax.Array) -> list[jax.Array]:
        return self.gate_up(x)


MLPS: tuple[type[Mlp], ...] = (PackedMlp, Mlp)


def build(spec: MlpSpec, initializer: Initializer, embed_dim: int, dtype: DTypeLike) -> Mlp:
    choice = choose(MLPS, spec, initializer.context)
    return choice.implementation(initializer, spec, embed_dim, dtype)
