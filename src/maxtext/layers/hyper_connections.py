"""Manifold-constrained hyper-connections (mHC): several residual streams, mixed by doubly
stochastic matrices.

A token has k streams of width E. Around one sub-layer (mixer or feed-forward) F, with its own
weights:

    n    = RMSNorm of the token's k·E values
    pre  = sigmoid(alpha_0 · n W_pre + b_pre) + 1e-6     [k]     how much F reads of each stream
    post = 2 · sigmoid(alpha_1 · n W_post + b_post)      [k]     how much of F's output goes to each stream
    mix  = Sinkhorn(alpha_2 · n W_mix + b_mix)           [k, k]  what stream i (row) hands on to stream j (column)

    stream_j <- Σ_i mix_ij stream_i + post_j · F(Σ_i pre_i stream_i)

The paper's H_res, a matrix in front of the streams, is mixᵀ: the last of Sinkhorn's passes makes
each new stream an average of the old ones, there and in DeepSeek-V4 as here. All of this is
computed in float32.

At the start F reads the mean of the streams (pre = 1/k), every stream takes F's whole output (post
= 1) and keeps 99% of itself: streams that begin as copies (`expand`) follow the ordinary residual
stream. Only what depends on the token parts them; it enters with alpha = 0.01, the paper's choice,
and a random W, since equal streams with equal weights would have equal gradients for ever.
`collapse` adds the streams; the norm that follows takes the factor k away.

Shapes: B batch, S sequence, k streams, E embedding.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxtext.layers.norms import NormSpec
from maxtext.layers.parameters import Initializer

EPSILON = 1e-6  # keeps what is read above zero, and divisors too
INITIAL_ALPHA = 0.01
INITIALLY_KEPT = 0.99


@dataclass(frozen=True)
class HyperConnectionSpec:
    streams: int  # k, at least 2: one stream is the ordinary residual
    sinkhorn_iterations: int  # passes over rows and columns
    norm: NormSpec  # rms

    def __post_init__(self) -> None:
        if self.streams < 2:
            raise ValueError(f"hyper-connections join at least 2 streams, not {self.streams}")
        if self.sinkhorn_iterations < 1:
            raise ValueError(
                f"sinkhorn_iterations is {self.sinkhorn_iterations}, and at least one pass is needed"
            )
        if self.norm.kind != "rms":
            raise ValueError(f"hyper-connections norm their streams with rms, not {self.norm.kind}")

    def build(self, initializer: Initializer, embed_dim: int, dtype: Any) -> "HyperConnection":
        return HyperConnection(initializer, self, embed_dim, dtype)


class Mixing(NamedTuple):
    """What `write` needs to know of the streams that were read. float32."""

    post: jax.Array  # [B, S, k]
    mix: jax.Array  # [B, S, k, k]


class HyperConnection(nnx.Module):
    """The connection of one sub-layer. The last dimension of kernel and bias: k pre, k post, k·k
    mix (row by row).
    """

    def __init__(
        self, initializer: Initializer, spec: HyperConnectionSpec, embed_dim: int, dtype: Any
    ):
        self.spec, self.dtype = spec, dtype
        k = spec.streams
        self.weight = initializer.weight(
            "weight", (k, embed_dim), (k * (k + 2),), ("mhc", "embed", None)
        )
        self.alpha = initializer.constant((3,), INITIAL_ALPHA, (None,))
        self.bias = nnx.Param(jnp.asarray(initial_bias(k), initializer.dtype), axes=(None,))
        initial_scale = 0.0 if spec.norm.offset else 1.0
        self.scale = (
            initializer.constant((k, embed_dim), initial_scale, ("mhc", "norm"))
            if spec.norm.scaled
            else None
        )

    def read(self, streams: jax.Array) -> tuple[jax.Array, Mixing]:
        """[B, S, k, E] to the sub-layer's input [B, S, E], and what `write` needs."""
        pre, mixing = self.mappings(streams)
        x = jnp.sum(pre[..., None] * streams.astype(jnp.float32), axis=-2)
        return x.astype(self.dtype), mixing

    def write(self, streams: jax.Array, mixing: Mixing, y: jax.Array) -> jax.Array:
        """The streams that were read and the sub-layer's output [B, S, E] to the next streams [B,
        S, k, E].
        """
        # Products and a sum, which XLA fuses, rather than a matrix product of k x k for every
        # token.
        kept = jnp.sum(
            mixing.mix[..., None] * streams.astype(jnp.float32)[..., :, None, :], axis=-3
        )
        added = mixing.post[..., None] * y.astype(jnp.float32)[..., None, :]
        return (kept + added).astype(self.dtype)

    def mappings(self, streams: jax.Array) -> tuple[jax.Array, Mixing]:
        k = self.spec.streams
        streams = streams.astype(jnp.float32)
        kernel = self.weight[...].astype(jnp.float32)
        if self.scale is not None:
            scale = self.scale[...].astype(jnp.float32)
            kernel = kernel * (scale + 1 if self.spec.norm.offset else scale)[..., None]
        # Dividing after the product gives the same numbers and spares a normed copy of all streams.
        square = jnp.mean(jnp.square(streams), axis=(-2, -1))
        normed = jax.lax.rsqrt(square + self.spec.norm.epsilon)[..., None]
        logits = jnp.einsum("bske,ken->bsn", streams, kernel) * normed
        alpha = self.alpha[...].astype(jnp.float32)[np.repeat(np.arange(3), [k, k, k * k])]
        logits = alpha * logits + self.bias[...].astype(jnp.float32)
        pre, post, mix = jnp.split(logits, [k, 2 * k], axis=-1)
        mix = sinkhorn(mix.reshape(*mix.shape[:-1], k, k), self.spec.sinkhorn_iterations)
        return jax.nn.sigmoid(pre) + EPSILON, Mixing(2 * jax.nn.sigmoid(post), mix)


def initial_bias(k: int) -> np.ndarray:
    pre = np.full(k, -math.log(k - 1))  # sigmoid: 1 / k
    post = np.zeros(k)  # 2 sigmoid: 1
    kept = math.log(
        INITIALLY_KEPT / (1 - INITIALLY_KEPT) * (k - 1)
    )  # softmax: INITIALLY_KEPT on the diagonal
    return np.concatenate([pre, post, np.eye(k).ravel() * kept])


def sinkhorn(logits: jax.Array, iterations: int) -> jax.Array:
    """[..., k, k] to nearly doubly stochastic matrices: rows, then columns made to sum to 1, so
    many times.
    """

    def columns(matrix: jax.Array) -> jax.Array:
        return matrix / (jnp.sum(matrix, axis=-2, keepdims=True) + EPSILON)

    def rows_and_columns(_: Any, matrix: jax.Array) -> jax.Array:
        return columns(matrix / (jnp.sum(matrix, axis=-1, keepdims=True) + EPSILON))

    matrix = columns(
        jax.nn.softmax(logits, axis=-1) + EPSILON
    )  # the softmax is the first pass over rows
    return jax.lax.fori_loop(0, iterations - 1, rows_and_columns, matrix)


def expand(x: jax.Array, streams: int) -> jax.Array:
    """[B, S, E] to `streams` copies [B, S, k, E], before the first layer."""
    return jnp.repeat(x[..., None, :], streams, axis=-2)


def collapse(streams: jax.Array) -> jax.Array:
    """[B, S, k, E] to their sum [B, S, E], after the last layer."""
    return jnp.sum(streams, axis=-2)
