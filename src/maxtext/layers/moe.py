"""A mixture of experts: a router sends each token to some of many MLPs; shared ones see every
token.

Shapes: B batch, S sequence, T = B·S tokens, E embedding, X experts, k experts of a token, M expert
width, C capacity, N rows of the sorted buffer.

Three methods for the same sum:
- sparse: tokens are sorted by expert and multiplied group by group (`layers/sorted_experts.py`,
  which says how devices share the work). Drops nothing, unless a `buffer_factor` bounds the rows: N
  = int(T·k·factor), at most T·k and at least 1; then the last assignments in the order of experts
  (within an expert: of tokens) are dropped, over the whole batch. With several devices, each has
  its own bound, of its own tokens.
- dense: every expert sees every token, and the sum leaves out what was not chosen. The reference.
- dropping: an expert has C = int(max(ceil(S·k/X)·capacity_factor, capacity_factor)) places in each
  sequence, taken in the order of tokens, and of a token's choices; the rest is dropped. One-hot
  products send tokens there and back.

What is dropped adds nothing to the sum; the other weights stay as they are. Padding (segment 0)
goes to no expert: it takes no place, does not count, and gets nothing from the routed experts.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxtext.kernels.weight_only import QuantizedWeight, dequantize
from maxtext.layers import aux_names
from maxtext.layers.inputs import Aux, LayerInputs, Sublayer
from maxtext.layers.linear import build_linear, order_weight_grads
from maxtext.layers.mlp import MlpSpec, combine
from maxtext.layers.parameters import Initializer
from maxtext.layers.routers import RouterSpec, Routing, expert_counts, load_balance_loss
from maxtext.layers.sorted_experts import Affine, SortedExperts
from maxtext.sharding import constrain


@dataclass(frozen=True)
class MoeSpec:
    router: RouterSpec
    hidden_dim: int  # of each expert
    activations: tuple[str, ...] = ("silu", "linear")
    bias: bool = False
    limit: float | None = None  # on the branches' values, see mlp.combine
    float32: bool = False  # activations computed in float32
    float32_sum: bool = True  # the weighted sum over a token's experts computed in float32
    weigh_input: bool = (
        False  # the router's weights multiply what experts read instead of what they give
    )
    shared: MlpSpec | None = None
    shared_gate: bool = False  # the shared MLP's output times a sigmoid, one for each token
    method: str = "sparse"  # or dense, or dropping
    capacity_factor: float = 1.0  # of dropping
    buffer_factor: float | None = None  # of sparse: a bound on the sorted buffer
    grouped_kernel: bool = (
        True  # of sparse: by a kernel of ours where there is one; false: by jax.lax.ragged_dot
    )
    custom_sort_vjp: bool = (
        True  # of sparse: sorting has a gradient that gathers; false: as autodiff has it
    )
    # of sparse: devices that share the experts gather tokens; false: rows go where they belong
    ring: bool = False
    two_stage_gather: bool = (
        False  # of sparse: kernels are gathered over one mesh axis after the other
    )
    experts_on_fsdp: bool = (
        False  # kernels are split by experts, not by the embedding, over the mesh's fsdp axis
    )
    balance_weight: float = 0.0  # reports "load_balance_loss"
    report_load: bool = False  # reports "expert_load" [X]: how many tokens chose each expert

    def build(self, initializer: Initializer, embed_dim: int, dtype: Any) -> "Moe":
        return Moe(initializer, self, embed_dim, dtype)


class ExpertLinear(nnx.Module):
    """A kernel, which may be `QuantizedWeight`, and an optional bias for each expert."""

    def __init__(
        self,
        initializer: Initializer,
        spec: MoeSpec,
        inputs: int,
        outputs: int,
        axes: tuple[str, str],
        dtype: Any,
    ):
        self.dtype, experts = dtype, spec.router.experts
        split = "exp_with_fsdp" if spec.experts_on_fsdp else "exp"
        self.axes = (split, *axes)
        # The initializer takes the experts for part of the fan-in, and the factor takes them out again.
        initializer = dataclasses.replace(initializer, init_scale=initializer.init_scale * experts)
        self.weight = initializer.weight(
            "weight", (experts, inputs), (outputs,), self.axes, contracted=(1,)
        )
        self.bias = (
            initializer.constant((experts, outputs), 0.0, (split, axes[1])) if spec.bias else None
        )

    @property
    def weights(self) -> Affine:
        """In the dtype of the product; or a kernel of integers, and what its product is multiplied
        by.
        """
        bias = None if self.bias is None else self.bias[...].astype(self.dtype)
        weight = self.weight[...]
        if isinstance(weight, QuantizedWeight) and weight.has_output_scale((1,)):
            return Affine(weight.qvalue, bias, weight.scale[:, 0])
        return Affine(weight.astype(self.dtype), bias)

    def names(self, weights: Affine) -> Affine:
        """Of the axes of the weights."""
        by_output = (self.axes[0], self.axes[2])
        return Affine(self.axes, *(None if part is None else by_output for part in weights[1:]))

    def on_each(self, x: jax.Array) -> jax.Array:
        """x [X, B, C, inputs] -> [X, B, C, outputs]: each expert has its own."""
        x, (kernel, bias, scale) = order_weight_grads(x, self.weights)
        y = jnp.einsum("xbci,xio->xbco", x, kernel.astype(self.dtype))
        if scale is not None:
            y = dequantize(y, scale[:, None, None], self.dtype)
        if bias is not None:
            y = y + bias[:, None, None]
        return constrain(
            y, "activation_exp", "activation_batch_moe", None, f"activation_{self.axes[-1]}"
        )


class Experts(nnx.Module):
    def __init__(self, initializer: Initializer, spec: MoeSpec, embed_dim: int, dtype: Any):
        self.spec, self.dtype = spec, dtype
        count = len(spec.activations)
        self.branches = ("wi",) if count == 1 else tuple(f"wi_{place}" for place in range(count))
        for name in self.branches:
            axes = ("embed_moe", "mlp_moe")
            setattr(
                self,
                name,
                ExpertLinear(
                    initializer.child(name), spec, embed_dim, spec.hidden_dim, axes, dtype
                ),
            )
        self.wo = ExpertLinear(
            initializer.child("wo"),
            spec,
            spec.hidden_dim,
            embed_dim,
            ("mlp_moe", "embed_moe"),
            dtype,
        )

    @property
    def layers(self) -> dict[str, ExpertLinear]:
        return {name: getattr(self, name) for name in (*self.branches, "wo")}

    def feed(self, x: jax.Array, apply: Callable[[str, jax.Array], jax.Array]) -> jax.Array:
        """`apply` multiplies rows, however they are laid out, by the named kernels of their
        experts.
        """
        branches = [tag(apply(name, x), name) for name in self.branches]
        hidden = combine(
            self.spec.activations, branches, self.spec.limit, self.spec.float32
        ).astype(self.dtype)
        return tag(apply("wo", hidden), "wo")

    def on_each(self, x: jax.Array) -> jax.Array:
        """x [X, B, C, E] -> [X, B, C, E]."""
        return self.feed(x, lambda name, x: self.layers[name].on_each(x))


def tag(x: jax.Array, name: str) -> jax.Array:
    """Named for rematerialization, as an MLP's tensor and as an expert's."""
    return checkpoint_name(checkpoint_name(x, f"mlp{name}"), f"moe_mlp{name}")


class Moe(Sublayer):
    def __init__(self, initializer: Initializer, spec: MoeSpec, embed_dim: int, dtype: Any):
        self.spec = spec
        self.dtype = dtype
        self.context = initializer.context
        self.sum_dtype = jnp.dtype(jnp.float32 if spec.float32_sum else dtype)
        self.router = spec.router.build(initializer.child("router"), embed_dim, dtype)
        self.experts = Experts(initializer.child("experts"), spec, embed_dim, dtype)
        self.shared = (
            spec.shared.build(initializer.child("shared"), embed_dim, dtype)
            if spec.shared
            else None
        )
        axes = ("embed", None)
        self.shared_gate = (
            build_linear(
                initializer,
                "shared_gate",
                in_shape=(embed_dim,),
                out_shape=(1,),
                axes=axes,
                dtype=dtype,
                exact=True,
            )
            if spec.shared_gate
            else None
        )

    def __call__(
        self, x: jax.Array, inputs: LayerInputs, router_input: jax.Array | None = None
    ) -> tuple[jax.Array, Aux]:
        """x [B, S, E] -> [B, S, E]. The router reads `router_input` where it is given."""
        real = None if inputs.segments is None else inputs.segments > 0
        routing = self.router(x if router_input is None else router_input)
        methods = {"sparse": self.sparse, "dense": self.dense, "dropping": self.dropping}
        y = methods[self.spec.method](x, routing, real)
        if self.shared is not None:
            shared, _ = self.shared(x, inputs)
            y = y + (
                shared if self.shared_gate is None else jax.nn.sigmoid(self.shared_gate(x)) * shared
            )
        return y, self.report(routing, real)

    def sparse(self, x: jax.Array, routing: Routing, real: jax.Array | None) -> jax.Array:
        none = self.spec.router.experts
        targets = (
            routing.indices if real is None else jnp.where(real[..., None], routing.indices, none)
        )
        weights = {name: layer.weights for name, layer in self.experts.layers.items()}
        names = {name: layer.names(weights[name]) for name, layer in self.experts.layers.items()}
        x, weights = order_weight_grads(x, weights)
        run = SortedExperts(self.spec, self.experts.feed, self.dtype, self.sum_dtype, self.context)
        return run(x, targets, routing.weights, weights, names)

    def dense(self, x: jax.Array, routing: Routing, real: jax.Array | None) -> jax.Array:
        picked = self.picked(routing, real)  # [B, S, k, X]
        chosen = jnp.sum(picked, axis=-2)
        weights = jnp.einsum("bsk,bskx->bsx", routing.weights, picked)
        read, give = (
            (weights, chosen) if self.spec.weigh_input else (jnp.ones_like(chosen), weights)
        )
        each = jnp.einsum("bsx,bse->xbse", read.astype(self.dtype), x)
        y = self.experts.on_each(each)
        return jnp.einsum(
            "bsx,xbse->bse", give.astype(self.sum_dtype), y.astype(self.sum_dtype)
        ).astype(self.dtype)

    def dropping(self, x: jax.Array, routing: Routing, real: jax.Array | None) -> jax.Array:
        picked = self.picked(routing, real)  # [B, S, k, X]
        batch, length, chosen, experts = picked.shape
        capacity = expert_capacity(length, chosen, experts, self.spec.capacity_factor)
        turns = jnp.cumsum(picked.reshape(batch, length * chosen, experts), axis=1).reshape(
            picked.shape
        )
        turn = jnp.sum(turns * picked, axis=-1).astype(
            jnp.int32
        )  # [B, S, k]: 1 for an expert's first, 0 for no expert
        place = jax.nn.one_hot(
            turn - 1, capacity, dtype=jnp.float32
        )  # zeros where it is out of bounds
        sent = jnp.einsum("bskx,bskc->bsxc", picked, place)
        weighted = jnp.einsum("bsk,bskx,bskc->bsxc", routing.weights, picked, place)
        read, give = (weighted, sent) if self.spec.weigh_input else (sent, weighted)
        each = jnp.einsum("bsxc,bse->xbce", read.astype(self.dtype), x)
        # With the experts first, the expert axis of the mesh goes to them, and this is where tokens
        # change devices.
        each = constrain(
            each, "activation_exp", "activation_batch_moe", None, "activation_embed_moe"
        )
        y = self.experts.on_each(each)
        return jnp.einsum(
            "bsxc,xbce->bse", give.astype(self.sum_dtype), y.astype(self.sum_dtype)
        ).astype(self.dtype)

    def picked(self, routing: Routing, real: jax.Array | None) -> jax.Array:
        """[B, S, k, X] of float32: one where a token's choice is the expert; padding chooses
        none.
        """
        picked = jax.nn.one_hot(routing.indices, self.spec.router.experts, dtype=jnp.float32)
        return picked if real is None else picked * real[..., None, None]

    def report(self, routing: Routing, real: jax.Array | None) -> Aux:
        aux: Aux = {}
        if self.spec.balance_weight > 0:
            aux[aux_names.LOAD_BALANCE_LOSS] = self.spec.balance_weight * load_balance_loss(
                routing, real
            )
        if self.spec.report_load:
            aux[aux_names.EXPERT_LOAD] = jnp.sum(
                expert_counts(routing.indices, self.spec.router.experts, real), axis=0
            )
        return aux


def expert_capacity(length: int, chosen: int, experts: int, factor: float) -> int:
    """How many tokens of a sequence an expert takes."""
    return int(max(math.ceil(length * chosen / experts) * factor, factor))
