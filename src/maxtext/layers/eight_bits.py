"""Layers or their halves, and the head, in fp8 on one NVIDIA GPU, where norms, gates, losses and
rounding are part of the same kernels.

What these cannot do goes the general way, through `block.Block`, to nearly the same numbers.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxtext.kernels.fp8 import cross_entropy, fused, matmul
from maxtext.kernels.triton.cross_entropy import supports
from maxtext.kernels.triton.rowwise import MAX_COLUMNS
from maxtext.layers import rope
from maxtext.layers.attention import PROJECTED, Attention, AttentionSpec
from maxtext.layers.inputs import Aux, LayerInputs
from maxtext.layers.linear import Linear, weights_first
from maxtext.layers.mlp import ACTIVATIONS, Mlp
from maxtext.layers.norms import Norm
from maxtext.sharding.manual import only_platform

UNKNOWN = ("gelu_exact",)  # activations, to the compiler of the kernels
# Names of intermediates for rematerialization.
OUT_TAG = partial(checkpoint_name, name="out_proj")
GATE_TAGS = partial(checkpoint_name, name="mlpwi_0"), partial(checkpoint_name, name="mlpwi_1")


def mixed(block: Any, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux] | None:
    """The stream x [B, S, E] with what the block's mixer adds to it; None: that cannot be done
    here.
    """
    found = attended(block, x, inputs)
    if found is None:
        return None
    x, y, aux = found
    return x + block.mixed(block.attention.read(y), inputs), aux


def both(block: Any, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux] | None:
    """The stream x [B, S, E] with what the whole block adds to it; None: that cannot be done
    here.
    """
    if block.post_attention_norm is not None or block.spec.dropout_rate or not can_feed(block, x):
        return None
    if not isinstance(block.attention, Attention) or not fits_heads(x.shape, block.attention):
        return None
    found = attended(block, x, inputs.fold(0))
    if found is None:
        return None
    x, y, aux = found
    last = block.attention.out
    (x, y), (out, *kernels) = weights_first(
        (x, y), [last.kernel[...].astype(last.dtype), *kernels_of(block.mlp)]
    )
    norm, activation = block.mlp_norm, ACTIVATIONS[block.mlp.spec.activations[0]]
    x, y = fused.out_norm_mlp(
        x,
        y,
        out,
        norm.factors,
        tuple(kernels),
        norm.spec.epsilon,
        activation,
        (OUT_TAG, *GATE_TAGS),
        block.mlp.dtype,
    )
    return x + block.fed(checkpoint_name(y, "mlpwo"), inputs.fold(1)), aux


def fits_heads(x: tuple[int, ...], attention: Attention) -> bool:
    """Whether the kernels take the product after attention, of streams of this shape."""
    out = attention.out
    mixed = (*x[:-1], attention.spec.query_heads, attention.spec.head_dim)
    return attention.spec.output_dim in (None, x[-1]) and fits(mixed, out)


def attended(
    block: Any, x: jax.Array, inputs: LayerInputs
) -> tuple[jax.Array, jax.Array, Aux] | None:
    """x as it is, and what attention [B, S, H, D] makes of its norm; None: that cannot be done
    here.
    """
    attention, norm = block.attention, block.attention_norm
    if (
        block.attention_streams is not None
        or not isinstance(attention, Attention)
        or inputs.cache is not None
    ):
        return None
    spec = attention.spec
    if spec.fused or spec.shared_kv or spec.gated:
        return None
    linears = attention.query, attention.key, attention.value
    if not (can_norm(norm, x) and fits(x.shape, *linears)):
        return None
    kernels = tuple(each.kernel[...].astype(each.dtype) for each in linears)
    angles = angles_of(spec, inputs)
    rotate = rope.rotate_by if angles else None
    x, found = fused.norm_qkv(
        x, norm.factors, kernels, angles, rotate, norm.spec.epsilon, norm.dtype
    )
    q, k, v = (checkpoint_name(each, name) for each, name in zip(found, PROJECTED, strict=True))
    if not angles:
        q, k, v = attention.placed(q, k, v, inputs)
    return x, *attention.mixed(q, k, v, inputs)


def angles_of(spec: AttentionSpec, inputs: LayerInputs) -> tuple[jax.Array, ...]:
    """Their cosines and sines, if all that queries and keys need is RoPE, and the kernels know
    it.
    """
    size = spec.head_dim
    if (
        spec.rope is None
        or spec.rope.interleave
        or spec.qk_norm
        or spec.value_norm
        or size.bit_count() > 1
    ):
        return ()
    if (
        spec.rope.rotated(size) < size
        or (spec.query_heads + 2 * spec.kv_heads) * size > MAX_COLUMNS
    ):
        return ()
    return rope.turns(inputs.positions, spec.rope, size)


def fed(block: Any, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux] | None:
    """The stream x [B, S, E] with what the block's feed-forward adds to it; None: that cannot be
    done here.
    """
    mlp, norm = block.mlp, block.mlp_norm
    if not can_feed(block, x):
        return None
    # Going back, what gradients of weights need is gone when those before are computed.
    x, kernels = weights_first(x, kernels_of(mlp))
    activation = ACTIVATIONS[mlp.spec.activations[0]]
    x, y = fused.norm_mlp(
        x, norm.factors, tuple(kernels), norm.spec.epsilon, activation, GATE_TAGS, mlp.dtype
    )
    return x + block.fed(checkpoint_name(y, "mlpwo"), inputs), {}


def can_feed(block: Any, x: jax.Array) -> bool:
    """Whether the kernels know the feed-forward, and take it."""
    mlp = block.mlp
    if (
        block.mlp_streams is not None
        or not isinstance(mlp, Mlp)
        or not mlp.bare
        or mlp.spec.dropout_rate
    ):
        return False
    if (
        mlp.spec.activations[0] in UNKNOWN
        or 2 * mlp.spec.hidden_dim > MAX_COLUMNS
        or not can_norm(block.mlp_norm, x)
    ):
        return False
    return fits(x.shape, *gates_of(mlp)) and fits((*x.shape[:-1], mlp.spec.hidden_dim), mlp.wo)


def gates_of(mlp: Mlp) -> list[Linear]:
    return [getattr(mlp, mlp.branch(place)) for place in range(2)]


def kernels_of(mlp: Mlp) -> list[jax.Array]:
    return [each.kernel[...].astype(each.dtype) for each in (*gates_of(mlp), mlp.wo)]


def scored(head: Linear, x: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array] | None:
    """The losses, and logarithms of partition sums, of the head's logits; None: that cannot be done
    here.
    """
    if not fits(x.shape, head) or not supports(
        targets.size, head.kernel.shape[-1], only_platform()
    ):
        return None
    x, [kernel] = weights_first(x, [head.kernel[...].astype(head.dtype)])
    return cross_entropy.head_cross_entropy(x, kernel, targets, head.dtype)


def can_norm(norm: Norm | None, x: jax.Array) -> bool:
    """Whether the kernels know the norm, rows are not too long for them, and it reads and gives
    bfloat16.
    """
    if norm is None or norm.spec.kind != "rms" or not norm.spec.scaled or x.shape[-1] > MAX_COLUMNS:
        return False
    return x.dtype == jnp.bfloat16 and jnp.dtype(norm.dtype) == jnp.bfloat16


def fits(x: tuple[int, ...], *linears: Linear) -> bool:
    """Whether the kernels for products in fp8 take all of these, of x of this shape."""
    kernels = [each.kernel[...] for each in linears]
    plain = all(isinstance(each, jax.Array) for each in kernels) and all(
        each.bias is None for each in linears
    )
    if not plain or any(each.recipe != "fp8" for each in linears):
        return False
    return matmul.supports(x, [each.shape for each in kernels], linears[0].rank, only_platform())
