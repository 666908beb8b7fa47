"""QK-clip for multi-head latent attention (Kimi K2): after an update, scales down the heads whose
attention logits are too large.

Shapes: R rank of the latent, H heads, N head size without RoPE, P with RoPE, V value size, L
layers.
"""

import jax
import jax.numpy as jnp

from maxtext.common.types import Tree


def clip_mla(
    weights: Tree,
    max_logits: jax.Array,
    threshold: float,
    nope_dim: int,
    layers_axis: int | None = None,
) -> Tree:
    """The weights of an MLA layer, scaled so that no head's largest logit exceeds `threshold`.

    max_logits [H] is the largest scaled logit of each head in the step. With s = min(1, threshold /
    max_logits), the logits are multiplied by s: the part without RoPE by √s in the queries
    (`query_b`, or `query`) and √s in the keys (`kv_b`), the part with RoPE by s in the queries
    alone, because all heads share its keys. Values and other weights stay the same, and so do heads
    with an infinite or NaN logit, which does not say how much too large the weights are.

    `layers_axis`: the dimension of stacked layers, if any; then max_logits is [L, H].
    """
    # Not by min(1, ratio): a largest logit may be negative, or -inf in a batch of padding.
    exceeds = (max_logits > threshold) & jnp.isfinite(max_logits)
    scale = jnp.where(exceeds, threshold / max_logits, 1.0)[..., :, None]
    query = "query_b" if "query_b" in weights else "query"

    def scale_heads(name: str, nope_scale: jax.Array, rest_scale: jax.Array) -> Tree:
        weight = weights[name]["weight"]
        if layers_axis is not None:
            weight = jnp.moveaxis(weight, layers_axis, 0)  # [(L,) R, H, N + rest]
        is_nope = jnp.arange(weight.shape[-1]) < nope_dim
        factors = jnp.where(is_nope, nope_scale, rest_scale)  # [(L,) H, N + rest]
        clipped = (weight * factors[..., None, :, :]).astype(weight.dtype)
        if layers_axis is not None:
            clipped = jnp.moveaxis(clipped, 0, layers_axis)
        return weights[name] | {"weight": clipped}

    return weights | {
        query: scale_heads(query, jnp.sqrt(scale), scale),
        "kv_b": scale_heads("kv_b", jnp.sqrt(scale), jnp.ones_like(scale)),
    }
