"""One decode step of Gated DeltaNet after its projections: convolutions, gates, the delta rule and
the gated norm, by one kernel, which updates the states in place. A Pallas kernel for NVIDIA GPUs,
lowered by Triton. `kernels/delta_rule.py` has the formulas.

Shapes: B rows, K key heads, G value heads of each, Dk key dim, Dv value dim, W convolution width.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

MIN_DIM = 16
L2_EPSILON = 1e-6
PROJECTIONS = ("query", "key", "value", "gate", "beta", "decay")
STATES = ("query", "key", "value", "state")
Refs = Mapping[str, Ref]


@dataclass(frozen=True)
class DeltaStep:
    key_heads: int
    group_size: int
    key_dim: int
    value_dim: int
    conv_width: int
    norm_epsilon: float
    qk_norm: bool  # queries and keys are L2-normalised

    @property
    def dims(self) -> dict[str, int]:
        """The size of each projection for one key head."""
        values = self.group_size * self.value_dim
        return dict(zip(PROJECTIONS, (self.key_dim,) * 2 + (values,) * 2 + (self.group_size,) * 2,
                        strict=True))  # fmt: skip

    @property
    def unsupported_reason(self) -> str | None:
        dims = self.key_dim, self.value_dim
        if any(dim < MIN_DIM or dim & (dim - 1) for dim in dims):
            return f"head dims of {dims[0]} and {dims[1]} are not powers of two"
        return None


def gated_delta_decode(
    step: DeltaStep,
    projected: Array,
    weights: Mapping[str, Array],
    states: Mapping[str, Array],
    positions: Array,
    interpret: bool = False,
) -> tuple[Array, dict[str, Array]]:
    """The gated, normed context [B, K, G Dv] in the dtype of the projections, and the new states.

    projected [B, N]: the projections of x, one after the other as in PROJECTIONS, each with its
    key heads. `weights`: conv_query, conv_key, conv_value [W, K, dim], log_rate and step_bias
    [K, G], norm [Dv]. `states`: the last inputs of the convolutions [B, W - 1, K, dim], and the
    state [B, K G, Dk, Dv] in float32. positions [B]: -1 for an idle row, whose states stay.
    """
    batch, heads = len(projected), step.key_heads
    names = tuple(weights)
    arrays = [projected, positions, *weights.values()]
    state_arrays = [states[name] for name in STATES]

    def whole(array: Array) -> pl.BlockSpec:
        return pl.BlockSpec(array.shape, lambda b, k: (0,) * array.ndim)

    def run(projected_ref: Ref, positions_ref: Ref, *refs: Ref) -> None:
        count = len(names)
        weight_refs = dict(zip(names, refs[:count], strict=True))
        inputs = dict(zip(STATES, refs[count : count + 4], strict=True))
        outputs = dict(zip(STATES, refs[count + 5 :], strict=True))
        head_step(step, projected_ref, positions_ref, weight_refs, inputs, refs[count + 4], outputs)

    out_dim = step.group_size * step.value_dim
    context, *written = pl.pallas_call(
        run,
        grid=(batch, heads),
        in_specs=[whole(array) for array in (*arrays, *state_arrays)],
        out_specs=[
            pl.BlockSpec((None, None, out_dim), lambda b, k: (b, k, 0)),
            *(whole(array) for array in state_arrays),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, out_dim), projected.dtype),
            *(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in state_arrays),
        ],
        input_output_aliases={len(arrays) + i: 1 + i for i in range(len(state_arrays))},
        interpret=interpret,
        name="gated_delta_step",
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=1),
    )(*arrays, *state_arrays)
    return context, dict(zip(STATES, written, strict=True))


def head_step(
    step: DeltaStep,
    projected_ref: Ref,
    positions_ref: Ref,
    weights: Refs,
    states: Refs,
    context_ref: Ref,
    written: Refs,
) -> None:
    """In a kernel: the step of one row and one key head, with its value heads."""
    row, head = pl.program_id(0), pl.program_id(1)
    active = positions_ref[row] >= 0
    convolve = functools.partial(
        convolve_head, step, projected_ref, weights, states, written, row, head, active
    )
    query, key = convolve("query", 0, step.key_dim), convolve("key", 0, step.key_dim)
    if step.qk_norm:
        query, key = l2_normalised(query), l2_normalised(key)
    query = query * step.key_dim**-0.5
    dim = step.value_dim
    scale = weights["norm"][...].astype(jnp.float32)
    for value_head in range(step.group_size):
        value = convolve("value", value_head * dim, dim)

        def load(name: str, value_head: int = value_head) -> Array:
            column = offset(step, name) + head * step.group_size + value_head
            return projected_ref[row, column].astype(jnp.float32)

        rate = jnp.exp(weights["log_rate"][head, value_head].astype(jnp.float32))
        raw = load("decay") + weights["step_bias"][head, value_head].astype(jnp.float32)
        softplus = jnp.maximum(raw, 0) + jnp.log1p(jnp.exp(-jnp.abs(raw)))
        beta = jax.nn.sigmoid(load("beta"))
        index = head * step.group_size + value_head
        state = states["state"][row, index, :, :] * jnp.exp(-rate * softplus)
        write = beta * (value - (state * key[:, None]).sum(axis=0))
        state = state + key[:, None] * write[None, :]
        context = (state * query[:, None]).sum(axis=0)
        column = jnp.arange(dim)
        depth = jnp.arange(step.key_dim)
        mask = jnp.broadcast_to(active, state.shape)
        at = written["state"].at[row, index, depth[:, None], column[None, :]]
        triton.store(at, state.astype(written["state"].dtype), mask=mask)
        context = context.astype(context_ref.dtype).astype(jnp.float32)
        variance = (context * context).sum() / dim
        context = context * jax.lax.rsqrt(variance + step.norm_epsilon) * scale
        begin = offset(step, "gate") + head * step.group_size * dim + value_head * dim
        gate = projected_ref[row, pl.ds(begin, dim)].astype(jnp.float32)
        context_ref[pl.ds(value_head * dim, dim)] = (context * jax.nn.silu(gate)).astype(
            context_ref.dtype
        )


def convolve_head(
    step: DeltaStep,
    projected_ref: Ref,
    weights: Refs,
    states: Refs,
    written: Refs,
    row: Array,
    head: Array,
    active: Array,
    name: str,
    first: int,
    dim: int,
) -> Array:
    """In a kernel: SiLU of the causal convolution of `dim` channels of a head, in float32; the new
    input is appended to the state."""
    channel = first + jnp.arange(dim)
    weight_ref, width = weights[f"conv_{name}"], step.conv_width
    begin = offset(step, name) + head * step.dims[name] + first
    new = projected_ref[row, pl.ds(begin, dim)]
    dtype = projected_ref.dtype
    inputs = [states[name][row, tap, head, channel].astype(dtype) for tap in range(width - 1)]
    inputs.append(new)
    total = jnp.zeros((dim,), jnp.float32)
    for tap, x in enumerate(inputs):
        weight = weight_ref[tap, head, channel].astype(dtype).astype(jnp.float32)
        total += x.astype(jnp.float32) * weight
    for tap, x in enumerate(inputs[1:]):
        at = written[name].at[row, tap, head, channel]
        triton.store(at, x.astype(written[name].dtype), mask=jnp.broadcast_to(active, x.shape))
    return jax.nn.silu(total.astype(dtype).astype(jnp.float32))


def offset(step: DeltaStep, name: str) -> int:
    """The first column of a projection."""
    index = PROJECTIONS.index(name)
    return step.key_heads * sum(list(step.dims.values())[:index])


def l2_normalised(x: Array) -> Array:
    return x * jax.lax.rsqrt((x * x).sum() + L2_EPSILON)
