"""Routers: which experts a token goes to, how much each counts, and the statistics that keep
experts evenly loaded.

Shapes: B batch, S sequence, E embedding, X experts, k experts chosen for a token, G groups of
experts.

A router makes logits for all experts, scores of them, and takes the k best:

| family              | score             | the rest
|
|---------------------|-------------------|---------------------------------------------------------------------------|
| Mixtral, Qwen3      | softmax           | normalise
|
| gpt-oss             | softmax_of_chosen | bias="logits"
|
| DeepSeek V2         | softmax           | scaling, groups with group_score="max"
|
| DeepSeek V3, Kimi   | sigmoid           | bias="selection", normalise, scaling, groups with
group_score="top2"      |
| Llama 4             | sigmoid           | the layer multiplies the experts' input by the weight,
not their output   |
| Gemma 4             | softmax           | normed_input, normalise, expert_scale
|
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.layers.norms import Norm, NormSpec
from maxtext.layers.parameters import Initializer
from maxtext.sharding import manual

GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class RouterSpec:
    experts: int
    chosen: int
    # or sigmoid, or softmax_of_chosen: the softmax of nothing but the chosen experts' logits
    score: str = "softmax"
    normalise: bool = False  # the chosen experts' scores are divided by their sum
    scaling: float = 1.0
    # or logits: part of them; or selection: added to the scores to choose by, and only there
    bias: str = "none"
    groups: int = 1  # of neighbouring experts; only those of the best `kept_groups` can be chosen
    kept_groups: int = 1
    group_score: str = "top2"  # the sum of a group's two best scores; or max
    normed_input: float | None = (
        None  # epsilon of an RMS norm before the logits, with a learned scale over √E
    )
    expert_scale: bool = False  # a learned factor for each expert
    float32: bool = False  # logits from a true float32 product
    random: bool = (
        False  # a fixed, balanced choice, for benchmarks; scores are computed and count as ever
    )

    def build(self, initializer: Initializer, embed_dim: int, dtype: Any) -> "Router":
        return Router(initializer, self, embed_dim, dtype)


class Routing(NamedTuple):
    indices: jax.Array  # [B, S, k] of int32
    weights: jax.Array  # [B, S, k] of float32
    probabilities: jax.Array  # [B, S, X] of float32, one in all for each token


class Router(nnx.Module):
    """x [B, S, E] -> Routing."""

    def __init__(self, initializer: Initializer, spec: RouterSpec, embed_dim: int, dtype: Any):
        self.spec, self.dtype = spec, jnp.dtype(jnp.float32 if spec.float32 else dtype)
        self.weight = initializer.weight("weight", (embed_dim,), (spec.experts,), ("embed", "exp"))
        # A selection bias has no gradient: `updated_bias` sets it, in steps that bfloat16 would
        # round away.
        fixed = {"trained": False, "dtype": jnp.float32} if spec.bias == "selection" else {}
        self.bias = (
            None
            if spec.bias == "none"
            else initializer.constant((spec.experts,), 0.0, ("exp",), **fixed)
        )
        norm, normed = (
            NormSpec(epsilon=spec.normed_input or 0.0, scaled=False),
            spec.normed_input is not None,
        )
        self.norm = Norm(initializer, norm, embed_dim, self.dtype) if normed else None
        self.scale = initializer.constant((embed_dim,), 1.0, ("norm",)) if normed else None
        self.expert_scale = (
            initializer.constant((spec.experts,), 1.0, ("exp",)) if spec.expert_scale else None
        )

    def __call__(self, x: jax.Array) -> Routing:
        spec = self.spec
        logits = self.logits(x)
        scores = (
            jax.nn.sigmoid(logits) if spec.score == "sigmoid" else jax.nn.softmax(logits, axis=-1)
        )
        indices = self.choose(logits, scores)
        if spec.score == "softmax_of_chosen":
            weights = jax.nn.softmax(jnp.take_along_axis(logits, indices, axis=-1), axis=-1)
        else:
            weights = jnp.take_along_axis(scores, indices, axis=-1)
        if spec.normalise:
            weights = weights / (
                jnp.sum(weights, axis=-1, keepdims=True) + 1e-20
            )  # all sigmoids may round to zero
        weights = weights * spec.scaling
        if self.expert_scale is not None:
            weights = weights * jnp.take(self.expert_scale[...].astype(jnp.float32), indices)
        if spec.score == "sigmoid":
            scores = scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20)
        return Routing(indices, weights, scores)

    def logits(self, x: jax.Array) -> jax.Array:
        """[B, S, X] of float32, computed in the router's dtype."""
        x = x.astype(self.dtype)
        if self.norm is not None and self.scale is not None:
            x = self.norm(x) * self.scale[...].astype(self.dtype) * x.shape[-1] ** -0.5
        precision = jax.lax.Precision.HIGHEST if self.spec.float32 else None
        logits = jnp.matmul(x, self.weight[...].astype(self.dtype), precision=precision)
        if self.bias is not None and self.spec.bias == "logits":
            logits = logits + self.bias[...].astype(self.dtype)
        return logits.astype(jnp.float32)

    def choose(self, logits: jax.Array, scores: jax.Array) -> jax.Array:
        spec = self.spec
        if spec.random:
            return balanced_choice(logits.shape[:-1], spec.experts, spec.chosen)
        if self.bias is not None and spec.bias == "selection":
            values = scores + self.bias[...].astype(jnp.float32)
        elif spec.groups > 1:
            values = scores
        else:
            values = logits  # in the order of the scores, of which many round to the same number
        # Indices have no gradient; saying so early saves autodiff the way there.
        return by_token(self.best, jax.lax.stop_gradient(values))

    def best(self, values: jax.Array) -> jax.Array:
        """values [B, S, X] -> [B, S, k]."""
        kept = self.keep_groups(values) if self.spec.groups > 1 else values
        return jax.lax.top_k(kept, self.spec.chosen)[1]

    def keep_groups(self, values: jax.Array) -> jax.Array:
        """Minus infinity for all experts outside of the best groups."""
        grouped = values.reshape(*values.shape[:-1], self.spec.groups, -1)
        if self.spec.group_score == "max":
            strength = jnp.max(grouped, axis=-1)
        else:
            strength = jnp.sum(jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0], axis=-1)
        best = jax.lax.top_k(strength, self.spec.kept_groups)[1]
        kept = jnp.any(best[..., None] == jnp.arange(self.spec.groups), axis=-2)
        return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(values.shape)


def by_token(function: Callable[[jax.Array], jax.Array], values: jax.Array) -> jax.Array:
    """function of [B, S, X], where no token looks at another: each device's own tokens.

    The compiler does not know that of `top_k`, and would gather the values of all tokens on all
    devices.
    """
    rules = manual.current()
    if rules is None:
        return function(values)
    split = rules.axes_of(
        ("activation_batch_moe", "activation_norm_length_moe", None), values.shape
    )
    return manual.run_manual(rules, function, (values,), (split,), split)


def balanced_choice(shape: tuple[int, ...], experts: int, chosen: int) -> jax.Array:
    """[*shape, chosen]: experts in turn, so that the loads of two experts differ by one at most, in
    any run of tokens.

    A step about the golden ratio of the experts, and prime to them, scatters a token's experts over
    all devices.
    """
    step = next(
        n
        for n in range(max(1, round(experts * GOLDEN_RATIO)), 2 * experts)
        if math.gcd(n, experts) == 1
    )
    turn = jnp.arange(math.prod(shape) * chosen, dtype=jnp.int32) % experts
    return (turn * step % experts).reshape(*shape, chosen)


def expert_counts(indices: jax.Array, experts: int, real: jax.Array | None) -> jax.Array:
    """[B, X] of float32: how many tokens of each sequence chose each expert; only `real` [B, S]
    ones if given.
    """
    picked = jnp.sum(jax.nn.one_hot(indices, experts, dtype=jnp.float32), axis=-2)
    return jnp.sum(picked if real is None else picked * real[..., None], axis=-2)


def load_balance_loss(routing: Routing, real: jax.Array | None) -> jax.Array:
    """X² · mean over sequences and experts of (fraction of the tokens that chose the expert · its
    mean probability).

    Fractions of one sequence sum to k, as in Switch and Mixtral: an even load gives k. Padding does
    not count, nor does a sequence that is nothing but padding.
    """
    experts = routing.probabilities.shape[-1]
    if real is None:
        real = jnp.ones(routing.indices.shape[:-1], bool)
    tokens = jnp.sum(real, axis=-1, dtype=jnp.float32)  # [B]
    share = 1 / jnp.maximum(tokens, 1)[:, None]
    fraction = expert_counts(routing.indices, experts, real) * share
    probability = jnp.sum(routing.probabilities * real[..., None], axis=-2) * share
    sequences = jnp.maximum(jnp.sum(tokens > 0, dtype=jnp.float32), 1)
    return experts * jnp.sum(fraction * probability) / sequences


def updated_bias(bias: jax.Array, load: jax.Array, rate: float) -> jax.Array:
    """Balancing without a loss: the selection bias of idle experts rises, that of busy ones falls,
    after a step.

    bias [..., X] of float32: in bfloat16 steps of 0.001 stop at 0.5. load [..., X].
    """
    return bias + rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)
