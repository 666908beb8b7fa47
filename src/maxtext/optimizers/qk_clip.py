"""QK-clip for multi-head latent attention (Kimi K2): after an update, heads whose logits are too
large are scaled down.

Shapes: R a latent's rank, H heads, N head size without position, P with position, V value size, L
layers.
"""

from typing import Any

import jax
import jax.numpy as jnp

Tree = dict[str, Any]


def clip_mla(
    weights: Tree,
    max_logits: jax.Array,
    threshold: float,
    nope_dim: int,
    layers_axis: int | None = None,
) -> Tree:
    """One latent attention's weights with no head's largest logit above `threshold`; heads below it
    stay as they are.

    max_logits [H]: the largest scaled logit of each head in the step. s = threshold / max_logits
    where that is below 1: the logits become s times what they were, since the part without position
    is √s smaller in queries (`query_b`, or `query`) and in keys (`kv_b`), and the part with
    position is s smaller in queries alone: its keys belong to all heads. Values, and weights
    without these names, are not touched. A logit that is infinite or NaN says nothing about how
    much too large the weights are: its head stays as it is.

    `layers_axis`: where the weights of several layers are stacked, the dimension that counts them;
    then max_logits is [L, H].
    """
    # Not by min(1, ratio): a largest logit may be negative, or -inf in a batch of padding.
    exceeds = (max_logits > threshold) & jnp.isfinite(max_logits)
    scale = jnp.where(exceeds, threshold / max_logits, 1.0)[..., :, None]
    query = "query_b" if "query_b" in weights else "query"

    def scaled(name: str, nope: jax.Array, rest: jax.Array) -> Tree:
        kernel = weights[name]["weight"]
        layered = (
            kernel if layers_axis is None else jnp.moveaxis(kernel, layers_axis, 0)
        )  # [(L,) R, H, N + rest]
        factors = jnp.where(
            jnp.arange(layered.shape[-1]) < nope_dim, nope, rest
        )  # [(L,) H, N + rest]
        clipped = (layered * factors[..., None, :, :]).astype(kernel.dtype)
        return weights[name] | {
            "weight": clipped if layers_axis is None else jnp.moveaxis(clipped, 0, layers_axis)
        }

    return weights | {
        query: scaled(query, jnp.sqrt(scale), scale),
        "kv_b": scaled("kv_b", jnp.sqrt(scale), jnp.ones_like(scale)),
    }
