"""Routers: which experts process a token, with which weights, and the statistics that balance their
load.

Shapes: B batch, S sequence, E embed_dim, X experts, k experts of a token, G groups of experts.

A router computes logits of all experts, scores from them, and selects the top k:

| family            | score           | other fields                                               |
|-------------------|-----------------|------------------------------------------------------------|
| Mixtral, Qwen3    | softmax         | normalise                                                  |
| gpt-oss           | softmax_of_topk | bias="logits"                                              |
| DeepSeek V2       | softmax         | scaling, groups with group_score="max"                     |
| DeepSeek V3, GLM  | sigmoid         | bias="selection", normalise, scaling, groups (top2)        |
| MiniMax M2        | sigmoid         | bias="selection", normalise                                |
| Llama 4           | sigmoid         | the layer applies the weight to the experts' input         |
| Gemma 4           | softmax         | input_norm_epsilon, normalise, expert_scale                |
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from maxtext.kernels.decode.router import MAX_EXPERTS, select_experts
from maxtext.layers.adapters import LayerAdapter, adapter_inputs
from maxtext.layers.context import INFERENCE, BuildContext, choose
from maxtext.layers.lora import LowRank, down_project
from maxtext.layers.norms import Norm
from maxtext.layers.parameters import Initializer
from maxtext.layers.specs import NormSpec, RouterSpec
from maxtext.sharding import manual

GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


class Routing(NamedTuple):
    indices: jax.Array  # [B, S, k] of int32
    weights: jax.Array  # [B, S, k] of float32
    probabilities: jax.Array  # [B, S, X] of float32, which sum to one for each token


class Router(nnx.Module):
    """x [B, S, E] -> Routing."""

    name = "plain"
    mode: str | None = None

    @classmethod
    def unsupported_reason(cls, spec: RouterSpec, context: BuildContext) -> str | None:
        return None

    def __init__(
        self, initializer: Initializer, spec: RouterSpec, embed_dim: int, dtype: DTypeLike
    ):
        self.spec = spec
        self.dtype = jnp.dtype(jnp.float32 if spec.float32 else dtype)
        self.weight = initializer.weight("weight", (embed_dim,), (spec.experts,), ("embed", "exp"))
        # A selection bias has no gradient: `updated_bias` changes it, in steps that bfloat16 would
        # round to zero.
        fixed = {"trained": False, "dtype": jnp.float32} if spec.bias == "selection" else {}
        self.bias = (
            None
            if spec.bias == "none"
            else initializer.constant((spec.experts,), 0.0, ("exp",), **fixed)
        )
        epsilon = spec.input_norm_epsilon
        norm = None if epsilon is None else NormSpec(epsilon=epsilon, scaled=False)
        self.norm = Norm(initializer, norm, embed_dim, self.dtype) if norm else None
        self.scale = initializer.constant((embed_dim,), 1.0, ("norm",)) if norm else None
        self.expert_scale = (
            initializer.constant((spec.experts,), 1.0, ("exp",)) if spec.expert_scale else None
        )

    def __call__(self, x: jax.Array) -> Routing:
        return self.route(self.logits(x))

    def route(self, logits: jax.Array) -> Routing:
        """logits [B, S, X] of float32."""
        spec = self.spec
        scores = self.scores(logits)
        indices = self.select(logits, scores)
        if spec.score == "softmax_of_topk":
            weights = jax.nn.softmax(jnp.take_along_axis(logits, indices, axis=-1), axis=-1)
        else:
            weights = jnp.take_along_axis(scores, indices, axis=-1)
        if spec.normalise:
            # All sigmoids may round to zero.
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        weights = self.scale_experts(weights * spec.scaling, indices)
        return Routing(indices, weights, self.probabilities(scores))

    def scores(self, logits: jax.Array) -> jax.Array:
        is_sigmoid = self.spec.score == "sigmoid"
        return jax.nn.sigmoid(logits) if is_sigmoid else jax.nn.softmax(logits, axis=-1)

    def scale_experts(self, weights: jax.Array, indices: jax.Array) -> jax.Array:
        if self.expert_scale is None:
            return weights
        return weights * jnp.take(self.expert_scale[...].astype(jnp.float32), indices)

    def probabilities(self, scores: jax.Array) -> jax.Array:
        if self.spec.score != "sigmoid":
            return scores
        return scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20)

    def logits(self, x: jax.Array) -> jax.Array:
        """[B, S, X] of float32, computed in the router's dtype."""
        x = x.astype(self.dtype)
        if self.norm is not None and self.scale is not None:
            x = self.norm(x) * self.scale[...].astype(self.dtype) * x.shape[-1] ** -0.5
        logits = self.matmul(x)
        if self.bias is not None and self.spec.bias == "logits":
            logits = logits + self.bias[...].astype(self.dtype)
        return logits.astype(jnp.float32)

    def matmul(self, x: jax.Array) -> jax.Array:
        """x [B, S, E] times the weight."""
        precision = jax.lax.Precision.HIGHEST if self.spec.float32 else None
        return jnp.matmul(x, self.weight[...].astype(self.dtype), precision=precision)

    def select(self, logits: jax.Array, scores: jax.Array) -> jax.Array:
        """The indices [B, S, k] of the selected experts."""
        spec = self.spec
        if spec.random:
            return balanced_selection(logits.shape[:-1], spec.experts, spec.topk)
        if self.bias is not None and spec.bias == "selection":
            values = scores + self.bias[...].astype(jnp.float32)
        elif spec.groups > 1:
            values = scores
        else:
            values = logits  # ranked as the scores, many of which round to the same value
        # Indices have no gradient: stopping it here saves autodiff the work.
        return map_local_tokens(self.topk_indices, jax.lax.stop_gradient(values))

    def topk_indices(self, values: jax.Array) -> jax.Array:
        """values [B, S, X] -> [B, S, k]."""
        if self.spec.groups > 1:
            values = self.mask_groups(values)
        return jax.lax.top_k(values, self.spec.topk)[1]

    def mask_groups(self, values: jax.Array) -> jax.Array:
        """values with minus infinity for all experts outside of the top groups."""
        grouped = values.reshape(*values.shape[:-1], self.spec.groups, -1)
        if self.spec.group_score == "max":
            group_scores = jnp.max(grouped, axis=-1)
        else:
            group_scores = jnp.sum(jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0], axis=-1)
        top_groups = jax.lax.top_k(group_scores, self.spec.topk_groups)[1]
        selected = jnp.any(top_groups[..., None] == jnp.arange(self.spec.groups), axis=-2)
        return jnp.where(selected[..., None], grouped, -jnp.inf).reshape(values.shape)


class KernelRouter(Router):
    """For inference on one NVIDIA GPU: one kernel selects the experts of a token."""

    name = "kernel"
    mode = INFERENCE

    @classmethod
    def unsupported_reason(cls, spec: RouterSpec, context: BuildContext) -> str | None:
        if spec.groups > 1 or spec.random:
            return "selects among all experts, by their logits"
        if spec.experts > MAX_EXPERTS:
            return f"selects among {MAX_EXPERTS} experts or fewer"
        if context.dtype != "bfloat16":
            return "needs dtype=bfloat16"
        return context.single_gpu_unsupported_reason()

    def route(self, logits: jax.Array) -> Routing:
        spec = self.spec
        bias = self.bias if spec.bias == "selection" else None
        indices, weights = (
            part.reshape(*logits.shape[:-1], spec.topk)
            for part in select_experts(
                logits.reshape(-1, spec.experts),
                spec.topk,
                score=spec.score,
                bias=None if bias is None else bias[...],
                normalise=spec.normalise,
                scaling=spec.scaling,
            )
        )
        weights = self.scale_experts(weights, indices)
        return Routing(indices, weights, self.probabilities(self.scores(logits)))


class LoRARouter(LowRank, Router):
    """A router with a low-rank adapter, see lora.py."""

    def __init__(
        self,
        initializer: Initializer,
        spec: RouterSpec,
        embed_dim: int,
        dtype: DTypeLike,
        adapter: LayerAdapter,
    ):
        super().__init__(initializer, spec, embed_dim, dtype)
        self.init_adapter(
            initializer,
            adapter,
            in_shape=(embed_dim,),
            out_shape=(spec.experts,),
            axes=("embed", "exp"),
            dtype=self.dtype,
            weight=self.weight[...],
        )

    def matmul(self, x: jax.Array) -> jax.Array:
        inputs = adapter_inputs()
        (hidden,) = down_project(x, [self], inputs)
        return self.add_update(hidden, super().matmul(x), self.weight[...], inputs)


def map_local_tokens(function: Callable[[jax.Array], jax.Array], values: jax.Array) -> jax.Array:
    """function(values [B, S, X]), token by token, on each device's own tokens.

    The compiler does not know that `top_k` works token by token, and would gather the values of all
    tokens on all devices.
    """
    rules = manual.current()
    if rules is None:
        return function(values)
    split = rules.axes_of(
        ("activation_batch_moe", "activation_norm_length_moe", None), values.shape
    )
    return manual.run_manual(rules, function, (values,), (split,), split)


def balanced_selection(shape: tuple[int, ...], experts: int, topk: int) -> jax.Array:
    """[*shape, topk]: round-robin, so that the loads of two experts differ by at most one, in any
    run of tokens.

    The stride is about the golden ratio of the number of experts, and coprime to it: it scatters a
    token's experts over all devices.
    """
    stride = next(
        n
        for n in range(max(1, round(experts * GOLDEN_RATIO)), 2 * experts)
        if math.gcd(n, experts) == 1
    )
    index = jnp.arange(math.prod(shape) * topk, dtype=jnp.int32) % experts
    return (index * stride % experts).reshape(*shape, topk)


def expert_counts(indices: jax.Array, experts: int, real: jax.Array | None) -> jax.Array:
    """[B, X] of float32: the number of tokens of each sequence that selected each expert; only
    tokens that are `real` [B, S], if given.
    """
    selected = jnp.sum(jax.nn.one_hot(indices, experts, dtype=jnp.float32), axis=-2)
    return jnp.sum(selected if real is None else selected * real[..., None], axis=-2)


def load_balance_loss(routing: Routing, real: jax.Array | None) -> jax.Array:
    """X² · mean over sequences and experts of (fraction of the tokens that selected the expert ·
    its mean probability).

    Fractions of a sequence sum to k, as in Switch and Mixtral: an even load gives k. Padding is
    ignored, and so are sequences of nothing but padding.
    """
    experts = routing.probabilities.shape[-1]
    if real is None:
        real = jnp.ones(routing.indices.shape[:-1], bool)
    tokens = jnp.sum(real, axis=-1, dtype=jnp.float32)  # [B]
    per_token = 1 / jnp.maximum(tokens, 1)[:, None]
    fraction = expert_counts(routing.indices, experts, real) * per_token
    probability = jnp.sum(routing.probabilities * real[..., None], axis=-2) * per_token
    sequences = jnp.maximum(jnp.sum(tokens > 0, dtype=jnp.float32), 1)
    return experts * jnp.sum(fraction * probability) / sequences


def updated_bias(bias: jax.Array, load: jax.Array, rate: float) -> jax.Array:
    """Auxiliary-loss-free balancing: after a step, the selection bias of underloaded experts
    increases and that of overloaded experts decreases by `rate`.

    bias [..., X] of float32: in bfloat16, steps of 0.001 stop at 0.5. load [..., X].
    """
    return bias + rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)


ROUTERS: tuple[type[Router], ...] = (KernelRouter, Router)


def build(spec: RouterSpec, initializer: Initializer, embed_dim: int, dtype: DTypeLike) -> Router:
    adapters = initializer.context.adapters
    adapter = None if adapters is None else adapters.at(initializer.paths)
    if adapter is None:
        choice = choose(ROUTERS, spec, initializer.context)
        return choice.implementation(initializer, spec, embed_dim, dtype)
    return LoRARouter(initializer, spec, embed_dim, dtype, adapter)
