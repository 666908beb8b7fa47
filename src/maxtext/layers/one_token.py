"""A layer's halves for a single new token on one GPU, where norms, rotations and sums are part of
the products.

`Joined` kernels say that it is one GPU. What these products cannot do goes the general way, through
`block.Block`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from maxtext.kernels.decode import gemv
from maxtext.layers.attention import KEY, VALUE, Attention
from maxtext.layers.inputs import Aux, LayerInputs
from maxtext.layers.joined import Joined
from maxtext.layers.linear import Linear
from maxtext.layers.mlp import ACTIVATIONS, Mlp
from maxtext.layers.norms import Norm
from maxtext.layers.rope import turns

GATES = ("silu", "swish", "gelu", "relu")  # that the kernel's compiler knows


def mixed(block: Any, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux] | None:
    """The stream x [1, 1, E] with what the block's mixer adds to it; None: that cannot be done
    here.
    """
    norm, attention = block.attention_norm, block.attention
    added_as_it_is = (
        block.attention_streams is None and block.post_attention_norm is None and inputs.key is None
    )
    if not (
        added_as_it_is and can_norm(norm, x) and isinstance(attention, Attention) and attention.bare
    ):
        return None
    if not (fits(x, attention.query, attention.key, attention.value) and fits(x, attention.out)):
        return None
    spec = attention.spec
    if spec.gated or spec.temperature or not attention.one_by_one(inputs):
        return None
    assert spec.rope is not None
    cos, sin = (part[0, 0, 0] for part in turns(inputs.positions, spec.rope, spec.head_dim))
    heads = spec.query_heads, spec.kv_heads
    found = gemv.norm_qkv_rope(read(norm, x), values(attention.query), cos, sin, heads)
    q, k, v = (part[None, None] for part in found)
    y, aux = attention.over_pages(q, {KEY: k, VALUE: v}, inputs)
    return after(attention.out, y, x), aux


def fed(block: Any, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux] | None:
    """The stream x [1, 1, E] with what the block's feed-forward adds to it; None: that cannot be
    done here.
    """
    norm, mlp = block.mlp_norm, block.mlp
    added_as_it_is = (
        block.mlp_streams is None and block.post_mlp_norm is None and inputs.key is None
    )
    if not (added_as_it_is and can_norm(norm, x) and isinstance(mlp, Mlp) and mlp.bare):
        return None
    gate, up = (getattr(mlp, mlp.branch(place)) for place in range(2))
    if not (mlp.spec.activations[0] in GATES and fits(x, gate, up) and fits(x, mlp.wo)):
        return None
    hidden = gemv.norm_gate_up(read(norm, x), values(gate), ACTIVATIONS[mlp.spec.activations[0]])
    return after(mlp.wo, hidden, x), {}


def can_norm(norm: Norm | None, x: jax.Array) -> bool:
    """Whether it is one token, and the products know the norm."""
    return (
        x.shape[:-1] == (1, 1) and norm is not None and norm.spec.kind == "rms" and norm.spec.scaled
    )


def fits(x: jax.Array, *linears: Linear) -> bool:
    """Whether all of these are in the first one's array, and products with it can be had."""
    kernels: Any = linears[0].kernel[...]
    if not isinstance(kernels, Joined) or len(kernels.shapes) != len(linears):
        return False
    if any(linear.bias is not None or jnp.dtype(linear.dtype) != x.dtype for linear in linears):
        return False
    return kernels.by_column and kernels.values.dtype == x.dtype and kernels.for_one_row


def read(norm: Norm, x: jax.Array) -> gemv.NormedInput:
    assert norm.scale is not None
    return gemv.NormedInput(
        x[0, 0], norm.scale[...], norm.spec.epsilon, 1.0 if norm.spec.offset else 0.0
    )


def after(linear: Linear, y: jax.Array, x: jax.Array) -> jax.Array:
    return gemv.gemv_add(y.reshape(-1), values(linear), x[0, 0])[None, None]


def values(linear: Linear) -> jax.Array:
    """[all outputs, inputs]"""
    kernels: Any = linear.kernel[...]
    return kernels.values
