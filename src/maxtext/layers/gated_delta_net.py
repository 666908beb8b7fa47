"""Gated DeltaNet, the linear attention of Qwen3-Next and Qwen3.5: a mixer whose memory does not
grow with the sequence.

Queries, keys and values pass a short causal convolution and SiLU; the gated delta rule mixes them
over the sequence with a decay and a step that each token chooses; the result is normed, gated and
projected back.

Value head j reads with the query and key of head j // G, so the weights of all that belongs to one
key head lie together and heads can be split over devices: every projection is [E, K, what one key
head has of it].

Shapes: B batch, S sequence, E embedding, K key heads, G value heads for each of them, Dk key size,
Dv value size, W convolution width.

Precision: projections and convolutions in the computation's dtype; decay, step, L2 norms, the delta
rule, the output's norm and its gate in float32.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxtext.kernels.delta_rule import (
    causal_convolution,
    gated_delta_rule,
    recurrent_gated_delta_rule,
)
from maxtext.layers.cache import CacheSize, RecurrentState
from maxtext.layers.inputs import Aux, LayerInputs, Sublayer
from maxtext.layers.linear import Linear, build_linear, project
from maxtext.layers.norms import Norm, NormSpec
from maxtext.layers.parameters import Initializer
from maxtext.sharding import constrain

QUERY, KEY, VALUE, STATE = "query", "key", "value", "state"  # in a cache
FORMS = ("chunked", "recurrent")
RATES = (0.01, 16.0)  # decay rates start uniform between these


@dataclass(frozen=True)
class GatedDeltaNetSpec:
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    chunk: int  # tokens computed together in the chunked form
    norm_epsilon: float
    qk_norm: bool = True  # queries and keys of length 1
    form: str = "chunked"  # or recurrent, one token after the other; the same result

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ValueError(f"form must be one of {', '.join(FORMS)}, not {self.form}")
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"{self.value_heads} value heads are not a multiple of {self.key_heads} key heads"
            )

    @property
    def group(self) -> int:
        return self.value_heads // self.key_heads

    def build(self, initializer: Initializer, embed_dim: int, dtype: Any) -> nnx.Module:
        return GatedDeltaNet(initializer, self, embed_dim, dtype)

    def cache(self, size: CacheSize) -> RecurrentState:
        """Empty, for sequences of any length: the last inputs of the convolutions, and the
        state.
        """
        batch, dtype = size.slots, size.dtype
        sizes = {QUERY: self.key_dim, KEY: self.key_dim, VALUE: self.group * self.value_dim}
        taps = {
            name: jnp.zeros((batch, self.conv_width - 1, self.key_heads, each), dtype)
            for name, each in sizes.items()
        }
        shape = (batch, self.value_heads, self.key_dim, self.value_dim)
        return RecurrentState(taps | {STATE: jnp.zeros(shape, jnp.float32)})


class GatedDeltaNet(Sublayer):
    def __init__(
        self, initializer: Initializer, spec: GatedDeltaNetSpec, embed_dim: int, dtype: Any
    ):
        self.spec, self.dtype = spec, dtype
        heads, group, values = spec.key_heads, spec.group, spec.group * spec.value_dim

        def projection(name: str, dim: int, exact: bool = False) -> Linear:
            return build_linear(
                initializer,
                name,
                in_shape=(embed_dim,),
                out_shape=(heads, dim),
                axes=("embed", "gdn_head", None),
                dtype=dtype,
                exact=exact,
            )

        def convolution(name: str, dim: int) -> nnx.Param:
            axes = (None, "gdn_head", None)
            return initializer.weight(name, (spec.conv_width,), (heads, dim), axes)

        self.query = projection("query", spec.key_dim)
        self.key = projection("key", spec.key_dim)
        self.value = projection("value", values)
        self.gate = projection("gate", values)
        self.beta = projection("beta", group, exact=True)
        self.decay = projection("decay", group, exact=True)
        self.conv_query = convolution("conv_query", spec.key_dim)
        self.conv_key = convolution("conv_key", spec.key_dim)
        self.conv_value = convolution("conv_value", values)
        low, high = RATES
        noise = initializer.standard_normal("log_rate", (heads, group))
        rate = low + (high - low) * jax.scipy.special.ndtr(noise)
        self.log_rate = nnx.Param(jnp.log(rate).astype(initializer.dtype), axes=("gdn_head", None))
        self.step_bias = initializer.constant((heads, group), 1.0, ("gdn_head", None))
        self.norm = Norm(
            initializer, NormSpec(epsilon=spec.norm_epsilon), spec.value_dim, "float32"
        )
        self.out = build_linear(
            initializer,
            "out",
            in_shape=(heads, values),
            out_shape=(embed_dim,),
            axes=("gdn_head", None, "embed"),
            dtype=dtype,
        )

    def __call__(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        # With a cache, padding is what stands after the tokens of a row.
        cache = inputs.cache
        segments = inputs.segments if cache is None else (inputs.positions >= 0).astype(jnp.int32)
        if segments is not None:
            segments = constrain(segments, "activation_batch_attn", "activation_kv_length")
        before = {} if cache is None or inputs.is_first_chunk else cache.arrays
        after: dict[str, jax.Array] = {}
        parts = {}
        weights = {QUERY: self.conv_query, KEY: self.conv_key, VALUE: self.conv_value}
        found = project(x, self.query, self.key, self.value)
        for (name, weight), projected in zip(weights.items(), found, strict=True):
            projected = by_head(checkpoint_name(projected, f"{name}_proj"))
            mixed, after[name] = causal_convolution(
                projected, weight[...], segments, before.get(name)
            )
            parts[name] = jax.nn.silu(mixed)
        query, key, value = parts[QUERY], parts[KEY], parts[VALUE]
        if self.spec.qk_norm:
            query, key = unit_length(query), unit_length(key)
        decay, step = by_head(self.log_decay(x)), by_head(self.step(x))
        mixed, after[STATE] = self.mix(query, key, value, decay, step, segments, before.get(STATE))
        mixed = checkpoint_name(checkpoint_name(mixed, "context"), "attention_out")
        gate = jax.nn.silu(by_head(self.gate(x)).astype(jnp.float32))
        gated = self.norm(mixed).reshape(gate.shape) * gate
        aux = (
            {}
            if cache is None
            else {
                "cache": RecurrentState(
                    {name: after[name].astype(old.dtype) for name, old in cache.arrays.items()}
                )
            }
        )
        return checkpoint_name(self.out(by_head(gated.astype(self.dtype))), "out_proj"), aux

    def log_decay(self, x: jax.Array) -> jax.Array:
        """[B, S, K, G], at most 0."""
        rate = jnp.exp(self.log_rate[...].astype(jnp.float32))
        return -rate * jax.nn.softplus(
            self.decay(x).astype(jnp.float32) + self.step_bias[...].astype(jnp.float32)
        )

    def step(self, x: jax.Array) -> jax.Array:
        """How much of an old answer a token replaces: [B, S, K, G], between 0 and 1."""
        return jax.nn.sigmoid(self.beta(x).astype(jnp.float32))

    def mix(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        log_decay: jax.Array,
        step: jax.Array,
        segments: jax.Array | None,
        state: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        """[B, S, K G, Dv]: the delta rule over value heads, each with the query and key of its key
        head; and the state [B, K G, Dk, Dv] after it."""
        spec = self.spec
        places = query.shape[:2]
        query, key = (jnp.repeat(x, spec.group, axis=2) for x in (query, key))
        value = value.reshape(*places, spec.value_heads, spec.value_dim)
        log_decay, step = (x.reshape(*places, spec.value_heads) for x in (log_decay, step))
        rule = recurrent_gated_delta_rule
        if spec.form == "chunked" and places[1] > 1:
            rule = partial(gated_delta_rule, chunk=spec.chunk)
        return rule(query, key, value, log_decay, step, initial_state=state, segments=segments)


def unit_length(x: jax.Array) -> jax.Array:
    """In float32; the small number keeps a zero vector zero."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def by_head(x: jax.Array) -> jax.Array:
    """[B, S, K, ...] with heads over devices and sequences whole: the state passes from the first
    token to the last.

    Were the sequence of any input split, XLA would split chunks, and gather them all in each step
    of the scan.
    """
    return constrain(x, "activation_batch_attn", "activation_kv_length", "activation_heads", None)
