"""Validation of the arguments of attention, before a kernel fails with an obscure message.

Shapes: B batch, S query length, T key length, H query heads, K key/value heads, D head dim, Dv head
dim of values.
"""

from dataclasses import replace

import jax.numpy as jnp
from jax import Array

from maxtext.kernels.attention.request import AttentionInputs


def validate_inputs(inputs: AttentionInputs) -> AttentionInputs:
    """The inputs with defaults filled in and redundant options removed.

    Raises ValueError if shapes or dtypes do not match.
    """
    check_shapes(inputs)
    if inputs.k_segments is None:
        inputs = replace(inputs, k_segments=inputs.q_segments)
    if not inputs.mask.causal:
        inputs = replace(inputs, q_positions=None, k_positions=None)  # nothing compares positions
    if not inputs.custom_positions:
        max_length = max(inputs.q.shape[1], inputs.k.shape[1])
        inputs = replace(inputs, mask=inputs.mask.simplify(max_length))
    return inputs


def check_shapes(inputs: AttentionInputs) -> None:
    q, k, v = inputs.q, inputs.k, inputs.v
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q, k and v must have the same dtype, not {q.dtype}, {k.dtype} and {v.dtype}"
        )
    batch, q_length, q_heads, head_dim = q.shape
    _, k_length, k_heads, v_head_dim = v.shape
    if inputs.k_segments is not None and inputs.q_segments is None:
        raise ValueError("k_segments need q_segments")
    k_segments = inputs.q_segments if inputs.k_segments is None else inputs.k_segments
    expected: tuple[tuple[str, Array | None, tuple[int, ...]], ...] = (
        ("k", k, (batch, k_length, k_heads, head_dim)),
        ("v", v, (batch, k_length, k_heads, v_head_dim)),
        ("q_positions", inputs.q_positions, (batch, q_length)),
        ("k_positions", inputs.k_positions, (batch, k_length)),
        ("q_segments", inputs.q_segments, (batch, q_length)),
        ("k_segments", k_segments, (batch, k_length)),
        ("sinks", inputs.sinks, (q_heads,)),
    )
    for name, array, shape in expected:
        if array is not None and array.shape != shape:
            raise ValueError(
                f"{name} must be {list(shape)} for q {list(q.shape)}, not {list(array.shape)}"
            )
    if q_heads % k_heads:
        raise ValueError(f"{q_heads} query heads are not a multiple of {k_heads} key/value heads")
    selected = inputs.selected
    if selected is not None:
        shapes = [(batch, heads, q_length, k_length) for heads in (1, q_heads)]
        if selected.shape not in shapes or selected.dtype != jnp.bool_:
            raise ValueError(
                f"selected must be booleans {list(shapes[0])} or {list(shapes[1])} "
                f"for q {list(q.shape)}, not {selected.dtype} {list(selected.shape)}"
            )
