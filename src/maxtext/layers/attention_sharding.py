"""Attention on a mesh: back ends that the compiler can split are left to it, the others run on each
device's shards.

Rows and heads are cut as the activations are, and queries along the sequence; every device has all
keys and values of its rows and heads. Shapes: B batch, S query length, T key length, H query heads,
K key/value heads.
"""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from maxtext.common.hardware import gpu_capability
from maxtext.kernels.attention import (
    AttentionInputs,
    AttentionRequest,
    flash,
    run_attention,
    select_backend,
    validate_inputs,
    zero_fully_masked_queries,
)
from maxtext.layers.specs import AttentionSpec, MlaSpec
from maxtext.sharding.manual import current, run_manual, sharding
from maxtext.sharding.rules import AxisRules

QUERY = ("activation_batch_attn", "activation_length_attn", "activation_heads", None)


def attend(inputs: AttentionInputs, backend: str, platform: str) -> jax.Array:
    """[B, S, H, Dv], as `kernels.attention.run_attention`, on the devices of the active mesh, which
    need not be this machine's."""
    rules = current()
    if rules is None:
        return run_attention(inputs, backend, platform)
    # JAX shards masks over devices; it may not shard the offsets of segments.
    inputs = replace(inputs, max_segments=0)
    if not select_backend(validate_inputs(inputs), backend, platform).opaque:
        return run_attention(inputs, backend, platform)
    return flash_on_shards(rules, validate_inputs(inputs))


def packed_request(
    spec: AttentionSpec | MlaSpec, length: int, dtype: str, platform: str
) -> AttentionRequest:
    """The request of attention over packed rows of `length` tokens to a back end."""
    q_heads, k_heads, head_dim, v_head_dim = spec.head_dims
    return AttentionRequest(
        platform=platform,
        dtype=dtype,
        q_length=length,
        k_length=length,
        q_heads=q_heads,
        k_heads=k_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        mask=spec.mask,
        has_segments=True,
        soft_cap=spec.soft_cap,
        has_sinks=spec.sinks,
        has_selection=spec.has_selection,
        custom_positions=spec.mask.chunk is not None,
        capability=gpu_capability(),
    )


def flash_on_shards(
    rules: AxisRules, inputs: AttentionInputs, interpret: bool = False
) -> jax.Array:
    batch, length, heads, _ = rules.axes_of(QUERY, inputs.q.shape)
    among = math.prod(rules.mesh.shape[axis] for axis in heads)
    if inputs.k.shape[2] % among:  # each device's query heads must find their keys there
        groups = inputs.q.shape[2] // inputs.k.shape[2]
        inputs = replace(
            inputs, k=jnp.repeat(inputs.k, groups, axis=2), v=jnp.repeat(inputs.v, groups, axis=2)
        )
    shards = math.prod(rules.mesh.shape[axis] for axis in length)
    kernel = flash.make_kernel(inputs, inputs.q.shape[2] // among, shards, interpret)
    arrays = {
        "q": (inputs.q, (batch, length, heads, ())),
        "k": (inputs.k, (batch, (), heads, ())),
        "v": (inputs.v, (batch, (), heads, ())),
        "q_segments": (inputs.q_segments, (batch, length)),
        "k_segments": (inputs.k_segments, (batch, ())),
        "sinks": (inputs.sinks, (heads,)),
    }
    given = {name: entry for name, entry in arrays.items() if entry[0] is not None}

    def run(kernel, *shards: jax.Array) -> jax.Array:
        local: dict[str, Any] = dict(zip(given, shards, strict=True))
        return flash.run_kernel(kernel, replace(inputs, **local))

    mixed = run_manual(
        rules,
        run,
        (kernel, *(array for array, _ in given.values())),
        (
            kernel.manual_sharding_spec(sharding(rules, ((), length))),
            *(split for _, split in given.values()),
        ),
        (batch, length, heads, ()),
        check=False,  # JAX cannot tell what differs inside a kernel
    )
    return zero_fully_masked_queries(mixed, inputs)
