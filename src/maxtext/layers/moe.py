"""Mixture of experts: a router sends each token to its top-k MLPs; shared experts see every token.

    y[t] = Σ_k weight[t, k] · expert[index[t, k]](x[t])  +  shared(x[t])

Shapes: B batch, S sequence, T = B·S tokens, E embed_dim, X experts, k experts of a token, M
hidden_dim of an expert, C capacity, N rows of the sorted buffer.

Three methods compute the same sum:
- sparse: tokens are sorted by expert for a grouped matmul (`layers/sorted_experts.py`, which also
  documents expert parallelism). It drops no token, unless a `buffer_factor` bounds the rows to N =
  int(T·k·factor), at most T·k and at least 1: then the last assignments in the order of experts
  (within an expert: of tokens) are dropped, over the batch. With several devices, the bound applies
  to the tokens of each device.
- dense: every expert computes every token, and those not selected have weight 0. The reference.
- dropping: an expert has a capacity of C = int(max(ceil(S·k/X)·capacity_factor, capacity_factor))
  tokens of each sequence, in the order of tokens, and of a token's choices; the rest is dropped.
  One-hot matmuls dispatch and combine tokens.

A dropped assignment adds nothing to the sum; the other weights do not change. Padding (segment 0)
goes to no expert: it uses no capacity, is not counted, and routed experts add nothing to it.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from maxtext.kernels.decode.experts import ExpertMatrix, expert_matmul, supports
from maxtext.kernels.weight_only import QuantizedWeight, dequantize
from maxtext.layers.adapters import adapter_inputs, use_adapter_inputs
from maxtext.layers.context import INFERENCE, BuildContext, choose
from maxtext.layers.inputs import EXPERT_LOAD, LOAD_BALANCE_LOSS, Aux, LayerInputs, Sublayer
from maxtext.layers.linear import build_linear, order_weight_grads
from maxtext.layers.lora import align, expert_adapter, layer_scale
from maxtext.layers.mlp import combine
from maxtext.layers.parameters import Initializer
from maxtext.layers.routers import Routing, expert_counts, load_balance_loss
from maxtext.layers.sorted_experts import ExpertWeights, SortedExperts, Weights, sum_choices
from maxtext.layers.specs import MoeSpec
from maxtext.sharding import constrain


class ExpertLinear(nnx.Module):
    """A weight, which may be a `QuantizedWeight`, and an optional bias for each expert."""

    def __init__(
        self,
        initializer: Initializer,
        spec: MoeSpec,
        inputs: int,
        outputs: int,
        axes: tuple[str, str],
        dtype: DTypeLike,
    ):
        self.dtype = dtype
        experts = spec.router.experts
        expert_axis = "exp_with_fsdp" if spec.experts_on_fsdp else "exp"
        self.axes = (expert_axis, *axes)
        # The initializer counts the experts as part of the fan-in; the factor undoes that.
        initializer = dataclasses.replace(initializer, init_scale=initializer.init_scale * experts)
        self.weight = initializer.weight(
            "weight", (experts, inputs), (outputs,), self.axes, contracted=(1,), cast_to=dtype
        )
        self.bias = (
            initializer.constant((experts, outputs), 0.0, (expert_axis, axes[1]))
            if spec.bias
            else None
        )
        adapters = initializer.context.adapters
        self.adapter = None if adapters is None else adapters.at(initializer.paths)
        if self.adapter is not None:
            self.lora_a, self.lora_b = expert_adapter(
                initializer, self.adapter, (experts, inputs, outputs), self.axes
            )

    @property
    def weights(self) -> ExpertWeights:
        """In the dtype of the matmul; or an integer weight with the scale of its outputs."""
        stored = self.stored_weights
        if isinstance(stored.weight, QuantizedWeight):
            return stored._replace(weight=stored.weight.astype(self.dtype))
        return stored

    @property
    def stored_weights(self) -> ExpertWeights:
        """As `weights`, but a weight that shares scales among its inputs is a `QuantizedWeight`."""
        bias = None if self.bias is None else self.bias[...].astype(self.dtype)
        weight = self.weight[...]
        lora = self.adapter_factors()
        if not isinstance(weight, QuantizedWeight):
            return ExpertWeights(weight.astype(self.dtype), bias, None, *lora)
        if weight.has_output_scale((1,)):
            return ExpertWeights(weight.qvalue, bias, weight.scale[:, 0], *lora)
        return ExpertWeights(weight, bias, None, *lora)

    def adapter_factors(self) -> tuple[jax.Array | None, jax.Array | None]:
        """lora_a, which includes the scale, and lora_b; for serving, those of the one adapter that
        all tokens have (`Moe.sum_adapters`)."""
        if self.adapter is None:
            return None, None
        inputs = adapter_inputs()
        a, b = self.lora_a[...], self.lora_b[...].astype(self.dtype)
        if not self.adapter.slots:
            return (a * layer_scale(self.adapter, inputs)).astype(self.dtype), b
        if inputs.ids is None:
            return None, None
        slot = jnp.maximum(inputs.ids - 1, 0)
        return jnp.where(inputs.ids > 0, a[slot], 0).astype(self.dtype), b[slot]

    def weight_axes(self, weights: ExpertWeights) -> ExpertWeights:
        """The logical axes of the weights."""
        expert_axis, input_axis, output_axis = self.axes
        axes = ExpertWeights(
            weight=self.axes,
            bias=(expert_axis, output_axis),
            scale=(expert_axis, output_axis),
            lora_a=(expert_axis, input_axis, None),
            lora_b=(expert_axis, None, output_axis),
        )
        return ExpertWeights(
            *(
                None if part is None else part_axes
                for part, part_axes in zip(weights, axes, strict=True)
            )
        )

    def batched(self, x: jax.Array) -> jax.Array:
        """x [X, B, C, inputs] -> [X, B, C, outputs], expert by expert."""
        x, (weight, bias, scale, lora_a, lora_b) = order_weight_grads(x, self.weights)
        y = jnp.einsum("xbci,xio->xbco", x, weight.astype(self.dtype))
        if scale is not None:
            y = dequantize(y, scale[:, None, None], self.dtype)
        if lora_a is not None:
            hidden = jnp.einsum("xbci,xir->xbcr", x, lora_a)
            y = y + jnp.einsum("xbcr,xro->xbco", hidden, lora_b)
        if bias is not None:
            y = y + bias[:, None, None]
        return constrain(
            y, "activation_exp", "activation_batch_moe", None, f"activation_{self.axes[-1]}"
        )

    @property
    def adapter_slots(self) -> int:
        return 0 if self.adapter is None else self.adapter.slots


class Experts(nnx.Module):
    def __init__(self, initializer: Initializer, spec: MoeSpec, embed_dim: int, dtype: DTypeLike):
        self.spec = spec
        self.dtype = dtype
        count = len(spec.activations)
        self.branches = ("wi",) if count == 1 else tuple(f"wi_{index}" for index in range(count))
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

    def mlp(self, x: jax.Array, apply: Callable[[str, jax.Array], jax.Array]) -> jax.Array:
        """The experts' MLP; `apply` multiplies x, in any layout, by the named weights of its
        experts.
        """
        hidden = self.activate([tag(apply(name, x), name) for name in self.branches])
        return tag(apply("wo", hidden.astype(self.dtype)), "wo")

    def activate(self, branches: Sequence[jax.Array]) -> jax.Array:
        spec = self.spec
        return combine(spec.activations, branches, spec.limit, spec.float32)

    def batched(self, x: jax.Array) -> jax.Array:
        """x [X, B, C, E] -> [X, B, C, E]."""
        return self.mlp(x, lambda name, x: self.layers[name].batched(x))


def tag(x: jax.Array, name: str) -> jax.Array:
    """x with the remat names of an MLP and of an expert."""
    return checkpoint_name(checkpoint_name(x, f"mlp{name}"), f"moe_mlp{name}")


class Moe(Sublayer):
    name = "plain"
    mode: str | None = None

    @classmethod
    def unsupported_reason(cls, spec: MoeSpec, context: BuildContext) -> str | None:
        return None

    def __init__(self, initializer: Initializer, spec: MoeSpec, embed_dim: int, dtype: DTypeLike):
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
        """x [B, S, E] -> [B, S, E]. The router reads `router_input`, by default x."""
        real = None if inputs.segments is None else inputs.segments > 0
        return self.mix_experts(x, inputs, router_input, real)

    def decode(
        self, x: jax.Array, inputs: LayerInputs, router_input: jax.Array | None = None
    ) -> tuple[jax.Array, Aux]:
        return self(x, inputs, router_input)

    def mix_experts(
        self,
        x: jax.Array,
        inputs: LayerInputs,
        router_input: jax.Array | None,
        real: jax.Array | None,
    ) -> tuple[jax.Array, Aux]:
        """The output for the tokens that are `real` [B, S], all if it is None."""
        routing = self.router(x if router_input is None else router_input)
        y = self.sum_adapters(x, routing, real)
        if self.shared is not None:
            shared, _ = self.shared(x, inputs)
            if self.shared_gate is not None:
                shared = jax.nn.sigmoid(self.shared_gate(x)) * shared
            y = y + shared
        return y, self.report(routing, real)

    def sum_adapters(self, x: jax.Array, routing: Routing, real: jax.Array | None) -> jax.Array:
        """The weighted sum over experts. When several adapters of experts are served, the tokens of
        each go through the experts in turn, and adapters without tokens are skipped."""
        methods = {"sparse": self.sparse, "dense": self.dense, "dropping": self.dropping}
        run = methods[self.spec.method]
        inputs = adapter_inputs()
        slots = max(layer.adapter_slots for layer in self.experts.layers.values())
        if not slots or inputs.ids is None:
            return run(x, routing, real)
        ids = jnp.broadcast_to(align(inputs.ids, 2), x.shape[:2])

        def add_slot(slot: jax.Array, y: jax.Array) -> jax.Array:
            mask = ids == slot if real is None else (ids == slot) & real
            with use_adapter_inputs(inputs._replace(ids=slot)):
                return jax.lax.cond(
                    jnp.any(mask), lambda: y + run(x, routing, mask).astype(y.dtype), lambda: y
                )

        return jax.lax.fori_loop(0, slots + 1, add_slot, jnp.zeros(x.shape, self.dtype))

    def expert_ids(self, routing: Routing, real: jax.Array | None) -> jax.Array:
        """[B, S, k]: the selected experts; X, which is none, for padding."""
        if real is None:
            return routing.indices
        return jnp.where(real[..., None], routing.indices, self.spec.router.experts)

    def sparse(self, x: jax.Array, routing: Routing, real: jax.Array | None) -> jax.Array:
        expert_ids = self.expert_ids(routing, real)
        layers = self.experts.layers
        weights = {name: layer.weights for name, layer in layers.items()}
        axes = {name: layer.weight_axes(weights[name]) for name, layer in layers.items()}
        x, weights = order_weight_grads(x, weights)
        run = SortedExperts(self.spec, self.experts.mlp, self.dtype, self.sum_dtype, self.context)
        return run(x, expert_ids, routing.weights, weights, axes)

    def dense(self, x: jax.Array, routing: Routing, real: jax.Array | None) -> jax.Array:
        one_hot = self.one_hot_experts(routing, real)  # [B, S, k, X]
        selected = jnp.sum(one_hot, axis=-2)
        weights = jnp.einsum("bsk,bskx->bsx", routing.weights, one_hot)
        if self.spec.apply_router_weight_on_input:
            dispatch, combine_weights = weights, selected
        else:
            dispatch, combine_weights = jnp.ones_like(selected), weights
        expert_inputs = jnp.einsum("bsx,bse->xbse", dispatch.astype(self.dtype), x)
        return self.sum_experts(
            "bsx,xbse->bse", combine_weights, self.experts.batched(expert_inputs)
        )

    def sum_experts(
        self, equation: str, weights: jax.Array, expert_outputs: jax.Array
    ) -> jax.Array:
        """The weighted sum over experts [B, S, E], computed in `sum_dtype`."""
        y = jnp.einsum(
            equation, weights.astype(self.sum_dtype), expert_outputs.astype(self.sum_dtype)
        )
        return y.astype(self.dtype)

    def dropping(self, x: jax.Array, routing: Routing, real: jax.Array | None) -> jax.Array:
        one_hot = self.one_hot_experts(routing, real)  # [B, S, k, X]
        batch, length, topk, experts = one_hot.shape
        capacity = expert_capacity(length, topk, experts, self.spec.capacity_factor)
        counts = jnp.cumsum(one_hot.reshape(batch, length * topk, experts), axis=1)
        counts = counts.reshape(one_hot.shape)
        # [B, S, k], from 0; -1 for no expert.
        position_in_expert = jnp.sum(counts * one_hot, axis=-1).astype(jnp.int32) - 1
        # Zeros for positions out of bounds.
        slot = jax.nn.one_hot(position_in_expert, capacity, dtype=jnp.float32)
        unweighted = jnp.einsum("bskx,bskc->bsxc", one_hot, slot)
        weighted = jnp.einsum("bsk,bskx,bskc->bsxc", routing.weights, one_hot, slot)
        if self.spec.apply_router_weight_on_input:
            dispatch, combine_weights = weighted, unweighted
        else:
            dispatch, combine_weights = unweighted, weighted
        expert_inputs = jnp.einsum("bsxc,bse->xbce", dispatch.astype(self.dtype), x)
        # The all-to-all: the expert axis of the mesh now shards the experts.
        expert_inputs = constrain(
            expert_inputs, "activation_exp", "activation_batch_moe", None, "activation_embed_moe"
        )
        return self.sum_experts(
            "bsxc,xbce->bse", combine_weights, self.experts.batched(expert_inputs)
        )

    def one_hot_experts(self, routing: Routing, real: jax.Array | None) -> jax.Array:
        """[B, S, k, X] of float32: one-hot indices of the selected experts; zeros for padding."""
        one_hot = jax.nn.one_hot(routing.indices, self.spec.router.experts, dtype=jnp.float32)
        return one_hot if real is None else one_hot * real[..., None, None]

    def report(self, routing: Routing, real: jax.Array | None) -> Aux:
        aux: Aux = {}
        if self.spec.balance_weight > 0:
            aux[LOAD_BALANCE_LOSS] = self.spec.balance_weight * load_balance_loss(routing, real)
        if self.spec.report_load:
            aux[EXPERT_LOAD] = jnp.sum(
                expert_counts(routing.indices, self.spec.router.experts, real), axis=0
            )
        return aux


class DecodeMoe(Moe):
    """For inference on one NVIDIA GPU: where tokens are few, as in decode steps, a kernel reads the
    weights of the selected experts only."""

    name = "kernel for selected experts"
    mode = INFERENCE

    @classmethod
    def unsupported_reason(cls, spec: MoeSpec, context: BuildContext) -> str | None:
        if spec.method != "sparse" or not spec.grouped_kernel or spec.buffer_factor is not None:
            return "runs sparse experts that drop no token, by kernels"
        if context.dtype != "bfloat16":
            return "needs dtype=bfloat16"
        return context.single_gpu_unsupported_reason()

    def decode(
        self, x: jax.Array, inputs: LayerInputs, router_input: jax.Array | None = None
    ) -> tuple[jax.Array, Aux]:
        """Idle rows, which have position -1, select no expert."""
        return self.mix_experts(x, inputs, router_input, inputs.positions >= 0)

    def sparse(self, x: jax.Array, routing: Routing, real: jax.Array | None) -> jax.Array:
        expert_ids = self.expert_ids(routing, real)
        weights = {name: layer.stored_weights for name, layer in self.experts.layers.items()}
        capability = self.context.capability
        if not all(is_supported(part, expert_ids.size, capability) for part in weights.values()):
            return super().sparse(x, routing, real)
        outputs = self.selected(x, expert_ids, routing.weights, weights)
        has_expert = (expert_ids < self.spec.router.experts)[..., None]
        outputs = jnp.where(has_expert, outputs.reshape(*expert_ids.shape, -1), 0)
        return sum_choices(outputs, routing.weights, self.spec, self.sum_dtype).astype(self.dtype)

    def selected(
        self, x: jax.Array, expert_ids: jax.Array, router_weights: jax.Array, weights: Weights
    ) -> jax.Array:
        """[T k, E]: the outputs of the selected experts, undefined where there is none."""
        rows = x.reshape(-1, x.shape[-1])
        if self.spec.apply_router_weight_on_input:
            factors = router_weights.reshape(len(rows), -1, 1).astype(rows.dtype)
            rows = (rows[:, None] * factors).reshape(-1, x.shape[-1])
        ids = expert_ids.reshape(-1)
        matrices = {
            name: ExpertMatrix(part.weight, part.scale, part.bias) for name, part in weights.items()
        }
        branches = [matrices[name] for name in self.experts.branches]
        hidden = expert_matmul(rows, ids, branches, self.experts.activate)
        return expert_matmul(hidden, ids, [matrices["wo"]], lambda products: products[0])


def is_supported(weights: ExpertWeights, assignments: int, capability: str) -> bool:
    """Whether the kernel for few rows takes these weights."""
    weight = weights.weight
    packed = weight.format if isinstance(weight, QuantizedWeight) else ""
    dtypes = jnp.bfloat16, weight.dtype
    return weights.lora_a is None and supports(
        assignments, weight.shape, *dtypes, packed, capability
    )


MOES: tuple[type[Moe], ...] = (DecodeMoe, Moe)


def expert_capacity(length: int, topk: int, experts: int, factor: float) -> int:
    """The number of tokens of a sequence that an expert processes."""
    return int(max(math.ceil(length * topk / experts) * factor, factor))


def build(spec: MoeSpec, initializer: Initializer, embed_dim: int, dtype: DTypeLike) -> Moe:
    choice = choose(MOES, spec, initializer.context)
    return choice.implementation(initializer, spec, embed_dim, dtype)
