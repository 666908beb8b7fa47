"""Gated DeltaNet, the linear attention of Qwen3-Next and Qwen3.5: a token mixer with a recurrent
state of constant size.

    q, k, v    = SiLU(causal_convolution(x W_q, x W_k, x W_v));   q and k are L2-normalised
    log_decay  = -exp(log_rate) · softplus(x W_decay + step_bias)
    beta       = sigmoid(x W_beta)
    y          = (norm(gated_delta_rule(q, k, v, log_decay, beta)) · SiLU(x W_gate)) W_out

Shapes: B batch, S sequence, E embed_dim, K key heads, G value heads for each of them, Dk key dim,
Dv value dim, W convolution width.

Value head j uses the query and key of head j // G, so the weights of a key head and its value heads
are stored together, and heads can be sharded: every projection is [E, K, dim of one key head].

Precision: projections and convolutions in the computation's dtype; decay, beta, L2 norms, the delta
rule, the output's norm and its gate in float32.
"""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from maxtext.kernels.decode.delta_step import (
    L2_EPSILON,
    PROJECTIONS,
    DeltaStep,
    gated_delta_decode,
)
from maxtext.kernels.delta_rule import (
    causal_convolution,
    gated_delta_rule,
    recurrent_gated_delta_rule,
)
from maxtext.layers.cache import CacheConfig, RecentTokens, RecurrentState
from maxtext.layers.context import INFERENCE, BuildContext, choose
from maxtext.layers.inputs import Aux, LayerInputs, Sublayer
from maxtext.layers.linear import PackedLinear, build_linear, project
from maxtext.layers.norms import Norm
from maxtext.layers.parameters import Initializer
from maxtext.layers.specs import GatedDeltaNetSpec, NormSpec
from maxtext.layers.weight_layout import packing_unsupported_reason
from maxtext.sharding import constrain

QUERY, KEY, VALUE, STATE = "query", "key", "value", "state"  # in a cache
GATE = "gate"
EXACT = ("beta", "decay")  # projections that are not quantized
INITIAL_RATES = (0.01, 16.0)  # bounds of the uniform distribution of initial decay rates


class Projections(NamedTuple):
    """Of an input, [B, S, K, dim of one key head]; named as the weights."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    gate: jax.Array | None  # which the states do not depend on
    beta: jax.Array
    decay: jax.Array


class GatedDeltaNet(Sublayer):
    name = "plain"
    mode: str | None = None

    @classmethod
    def unsupported_reason(cls, spec: GatedDeltaNetSpec, context: BuildContext) -> str | None:
        return None

    def __init__(
        self, initializer: Initializer, spec: GatedDeltaNetSpec, embed_dim: int, dtype: DTypeLike
    ):
        self.spec = spec
        self.dtype = dtype
        self.step = delta_step(spec)
        heads, group_size = spec.key_heads, spec.group_size
        value_dim = group_size * spec.value_dim  # of all value heads of a key head

        def convolution(name: str, dim: int) -> nnx.Param:
            axes = (None, "gdn_head", None)
            return initializer.weight(name, (spec.conv_width,), (heads, dim), axes)

        self.build_projections(initializer, embed_dim)
        self.conv_query = convolution("conv_query", spec.key_dim)
        self.conv_key = convolution("conv_key", spec.key_dim)
        self.conv_value = convolution("conv_value", value_dim)
        low, high = INITIAL_RATES
        normal = initializer.standard_normal("log_rate", (heads, group_size))
        rate = low + (high - low) * jax.scipy.special.ndtr(normal)
        self.log_rate = nnx.Param(jnp.log(rate).astype(initializer.dtype), axes=("gdn_head", None))
        self.step_bias = initializer.constant((heads, group_size), 1.0, ("gdn_head", None))
        self.norm = Norm(
            initializer, NormSpec(epsilon=spec.norm_epsilon), spec.value_dim, "float32"
        )
        self.out = build_linear(
            initializer,
            "out",
            in_shape=(heads, value_dim),
            out_shape=(embed_dim,),
            axes=("gdn_head", None, "embed"),
            dtype=dtype,
        )

    def build_projections(self, initializer: Initializer, embed_dim: int) -> None:
        for name, dim in self.step.dims.items():
            linear = build_linear(
                initializer,
                name,
                in_shape=(embed_dim,),
                out_shape=(self.spec.key_heads, dim),
                axes=("embed", "gdn_head", None),
                dtype=self.dtype,
                exact=name in EXACT,
            )
            setattr(self, name, linear)

    def project(self, x: jax.Array) -> Projections:
        linears = [getattr(self, name) for name in PROJECTIONS]
        return Projections(*project(x, *linears[:3]), *(linear(x) for linear in linears[3:]))

    def __call__(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        # With a cache, padding has negative positions.
        cache, projections = inputs.cache, self.project(x)
        segments = inputs.segments if cache is None else (inputs.positions >= 0).astype(jnp.int32)
        states = {} if cache is None or inputs.is_first_chunk else cache.arrays
        if states and cache.recent is not None:
            earlier = Projections(gate=None, **cache.recent.arrays)
            _, states = self.mix(earlier, cache.recent.accepted(inputs.positions), states)
        context, new_states = self.mix(projections, segments, states)
        context = checkpoint_name(checkpoint_name(context, "context"), "attention_out")
        assert projections.gate is not None
        gate = jax.nn.silu(shard_heads(projections.gate).astype(jnp.float32))
        gated = self.norm(context).reshape(gate.shape) * gate
        aux: Aux = {}
        if cache is not None:
            tokens = projections._replace(gate=None)._asdict()
            aux["cache"] = cache.updated(states, new_states, tokens, inputs.positions)
        return checkpoint_name(self.out(shard_heads(gated.astype(self.dtype))), "out_proj"), aux

    def mix(
        self,
        projections: Projections,
        segments: jax.Array | None,
        states: Mapping[str, jax.Array],
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The context [B, S, K G, Dv] of value heads, and the states after it; none are zeros."""
        if segments is not None:
            segments = constrain(segments, "activation_batch_attn", "activation_kv_length")
        new_states: dict[str, jax.Array] = {}
        activations = {}
        convolutions = {QUERY: self.conv_query, KEY: self.conv_key, VALUE: self.conv_value}
        inputs = projections.query, projections.key, projections.value
        for (name, weight), projected in zip(convolutions.items(), inputs, strict=True):
            projected = shard_heads(checkpoint_name(projected, f"{name}_proj"))
            convolved, new_states[name] = causal_convolution(
                projected, weight[...], segments, states.get(name)
            )
            activations[name] = jax.nn.silu(convolved)
        query, key, value = activations[QUERY], activations[KEY], activations[VALUE]
        if self.spec.qk_norm:
            query, key = l2_normalise(query), l2_normalise(key)
        log_decay = shard_heads(self.log_decay(projections.decay))
        beta = shard_heads(self.step_size(projections.beta))
        context, new_states[STATE] = self.delta_rule(
            query, key, value, log_decay, beta, segments, states.get(STATE)
        )
        return context, new_states

    def log_decay(self, decay: jax.Array) -> jax.Array:
        """[B, S, K, G], at most 0, of the projection."""
        rate = jnp.exp(self.log_rate[...].astype(jnp.float32))
        return -rate * jax.nn.softplus(
            decay.astype(jnp.float32) + self.step_bias[...].astype(jnp.float32)
        )

    def step_size(self, beta: jax.Array) -> jax.Array:
        """beta [B, S, K, G], between 0 and 1, of the projection: the fraction of the old value that
        a token replaces.
        """
        return jax.nn.sigmoid(beta.astype(jnp.float32))

    def delta_rule(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        log_decay: jax.Array,
        beta: jax.Array,
        segments: jax.Array | None,
        state: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        """The context [B, S, K G, Dv] of value heads, each with the query and key of its key head;
        and the final state [B, K G, Dk, Dv]."""
        spec = self.spec
        batch, length = query.shape[:2]
        query, key = (jnp.repeat(x, spec.group_size, axis=2) for x in (query, key))
        value = value.reshape(batch, length, spec.value_heads, spec.value_dim)
        log_decay, beta = (x.reshape(batch, length, spec.value_heads) for x in (log_decay, beta))
        rule = recurrent_gated_delta_rule
        if spec.form == "chunked" and length > 1:
            rule = partial(gated_delta_rule, chunk=spec.chunk)
        return rule(query, key, value, log_decay, beta, initial_state=state, segments=segments)


class KernelGatedDeltaNet(GatedDeltaNet):
    """For inference on one NVIDIA GPU: one matmul for all projections, and one kernel for a decode
    step."""

    name = "packed projections and a decode kernel"
    mode = INFERENCE

    @classmethod
    def unsupported_reason(cls, spec: GatedDeltaNetSpec, context: BuildContext) -> str | None:
        if context.copies_weights:
            return "would copy most weights of the layer"
        if context.quantized_weights:
            return "packs weights of floats only, as some are exact"
        return delta_step(spec).unsupported_reason or packing_unsupported_reason(context)

    def build_projections(self, initializer: Initializer, embed_dim: int) -> None:
        self.packed = PackedLinear(
            initializer,
            PROJECTIONS,
            in_shape=(embed_dim,),
            out_shapes=[(self.spec.key_heads, dim) for dim in self.step.dims.values()],
            dtype=self.dtype,
        )

    def project(self, x: jax.Array) -> Projections:
        return Projections(*self.packed(x))

    def decode(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        cache = inputs.cache
        if cache.recent is not None:
            return self(x, inputs)
        assert self.norm.scale is not None
        weights = {
            "conv_query": self.conv_query[...],
            "conv_key": self.conv_key[...],
            "conv_value": self.conv_value[...],
            "log_rate": self.log_rate[...],
            "step_bias": self.step_bias[...],
            "norm": self.norm.scale[...],
        }
        context, arrays = gated_delta_decode(
            self.step, self.packed.matmul(x[:, 0]), weights, cache.arrays, inputs.positions[:, 0]
        )
        return self.out(context[:, None]), {"cache": RecurrentState(arrays)}


GATED_DELTA_NETS: tuple[type[GatedDeltaNet], ...] = (KernelGatedDeltaNet, GatedDeltaNet)


def delta_step(spec: GatedDeltaNetSpec) -> DeltaStep:
    return DeltaStep(
        key_heads=spec.key_heads,
        group_size=spec.group_size,
        key_dim=spec.key_dim,
        value_dim=spec.value_dim,
        conv_width=spec.conv_width,
        norm_epsilon=spec.norm_epsilon,
        qk_norm=spec.qk_norm,
    )


def l2_normalise(x: jax.Array) -> jax.Array:
    """x / |x| over the last dimension, in float32; zero vectors stay zero."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + L2_EPSILON)


def shard_heads(x: jax.Array) -> jax.Array:
    """x [B, S, K, ...] with sharded heads and unsharded sequences: the state depends on all tokens.

    If the sequence of any input were sharded, XLA would shard chunks, and gather them all in each
    step of the scan.
    """
    return constrain(x, "activation_batch_attn", "activation_kv_length", "activation_heads", None)


def build(
    spec: GatedDeltaNetSpec, initializer: Initializer, embed_dim: int, dtype: DTypeLike
) -> GatedDeltaNet:
    choice = choose(GATED_DELTA_NETS, spec, initializer.context)
    return choice.implementation(initializer, spec, embed_dim, dtype)


def empty_cache(spec: GatedDeltaNetSpec, cache_config: CacheConfig) -> RecurrentState:
    """The last inputs of the convolutions, and the recurrent state, for sequences of any length."""
    batch, dtype = cache_config.slots, cache_config.dtype
    dims = {QUERY: spec.key_dim, KEY: spec.key_dim, VALUE: spec.group_size * spec.value_dim}
    conv_states = {
        name: jnp.zeros((batch, spec.conv_width - 1, spec.key_heads, dim), dtype)
        for name, dim in dims.items()
    }
    shape = (batch, spec.value_heads, spec.key_dim, spec.value_dim)
    recent = None
    if cache_config.num_drafts:
        dims = {name: dim for name, dim in delta_step(spec).dims.items() if name != GATE}
        recent = RecentTokens.empty(
            {
                name: jnp.zeros(
                    (batch, cache_config.num_drafts + 1, spec.key_heads, dim), cache_config.dtype
                )
                for name, dim in dims.items()
            }
        )
    return RecurrentState(conv_states | {STATE: jnp.zeros(shape, jnp.float32)}, recent)
