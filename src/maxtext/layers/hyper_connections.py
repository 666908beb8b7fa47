"""Manifold-constrained hyper-connections (mHC): several residual streams, mixed by doubly
stochastic matrices.

A token has k residual streams of E values. For each sublayer F (token mixer or MLP), with its own
weights:

    n    = RMSNorm of the token's k·E values
    pre  = sigmoid(alpha_0 · n W_pre + b_pre) + 1e-6     [k]     weights of the streams in F's input
    post = 2 · sigmoid(alpha_1 · n W_post + b_post)      [k]     weights of F's output in streams
    mix  = Sinkhorn(alpha_2 · n W_mix + b_mix)           [k, k]  from stream i (row) to j (column)

    stream_j <- Σ_i mix_ij stream_i + post_j · F(Σ_i pre_i stream_i)

The paper's H_res, a matrix to the left of the streams, is mixᵀ: the last normalisation of Sinkhorn
makes each new stream an average of the old ones, in the paper and in DeepSeek-V4 as here. All of
this is computed in float32.

At initialisation F reads the mean of the streams (pre = 1/k), every stream gets F's output (post =
1) and keeps 99% of itself: streams that start as copies (`expand`) follow the ordinary residual.
Only the token-dependent terms separate them, with alpha = 0.01, the paper's choice, and a random W:
equal streams with equal weights would always have equal gradients. `collapse` sums the streams; the
norm that follows removes the factor k.

Shapes: B batch, S sequence, k residual streams, E embed_dim.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from maxtext.layers.parameters import Initializer
from maxtext.layers.specs import HyperConnectionSpec

EPSILON = 1e-6  # keeps pre and divisors above zero
INITIAL_ALPHA = 0.01
INITIAL_SELF_WEIGHT = 0.99


class StreamWeights(NamedTuple):
    """The weights of the next streams, in float32."""

    post: jax.Array  # [B, S, k]
    mix: jax.Array  # [B, S, k, k]


class HyperConnection(nnx.Module):
    """The connection of one sublayer. The last dimension of weight and bias: k pre, k post, k·k mix
    (row-major).
    """

    def __init__(
        self, initializer: Initializer, spec: HyperConnectionSpec, embed_dim: int, dtype: DTypeLike
    ):
        self.spec = spec
        self.dtype = dtype
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

    def read(self, streams: jax.Array) -> tuple[jax.Array, StreamWeights]:
        """[B, S, k, E] -> the sublayer's input [B, S, E], and the weights for `write`."""
        pre, weights = self.stream_weights(streams)
        x = jnp.sum(pre[..., None] * streams.astype(jnp.float32), axis=-2)
        return x.astype(self.dtype), weights

    def write(self, streams: jax.Array, weights: StreamWeights, y: jax.Array) -> jax.Array:
        """The streams [B, S, k, E] that were read and the sublayer's output y [B, S, E] -> the next
        streams [B, S, k, E].
        """
        # Elementwise products and a sum, which XLA fuses, instead of a k x k matmul for every
        # token.
        mixed = jnp.sum(
            weights.mix[..., None] * streams.astype(jnp.float32)[..., :, None, :], axis=-3
        )
        output = weights.post[..., None] * y.astype(jnp.float32)[..., None, :]
        return (mixed + output).astype(self.dtype)

    def stream_weights(self, streams: jax.Array) -> tuple[jax.Array, StreamWeights]:
        k = self.spec.streams
        streams = streams.astype(jnp.float32)
        weight = self.weight[...].astype(jnp.float32)
        if self.scale is not None:
            scale = self.scale[...].astype(jnp.float32)
            weight = weight * (scale + 1 if self.spec.norm.offset else scale)[..., None]
        # The norm is applied after the matmul, which saves a normed copy of all streams.
        mean_square = jnp.mean(jnp.square(streams), axis=(-2, -1))
        inverse_rms = jax.lax.rsqrt(mean_square + self.spec.norm.epsilon)[..., None]
        logits = jnp.einsum("bske,ken->bsn", streams, weight) * inverse_rms
        alpha = self.alpha[...].astype(jnp.float32)[np.repeat(np.arange(3), [k, k, k * k])]
        logits = alpha * logits + self.bias[...].astype(jnp.float32)
        pre, post, mix = jnp.split(logits, [k, 2 * k], axis=-1)
        mix = sinkhorn(mix.reshape(*mix.shape[:-1], k, k), self.spec.sinkhorn_iterations)
        return jax.nn.sigmoid(pre) + EPSILON, StreamWeights(2 * jax.nn.sigmoid(post), mix)


def initial_bias(k: int) -> np.ndarray:
    pre = np.full(k, -math.log(k - 1))  # sigmoid: 1 / k
    post = np.zeros(k)  # 2 sigmoid: 1
    # softmax: INITIAL_SELF_WEIGHT on the diagonal
    diagonal = math.log(INITIAL_SELF_WEIGHT / (1 - INITIAL_SELF_WEIGHT) * (k - 1))
    return np.concatenate([pre, post, np.eye(k).ravel() * diagonal])


def sinkhorn(logits: jax.Array, iterations: int) -> jax.Array:
    """[..., k, k] -> nearly doubly stochastic matrices: rows, then columns are normalised to sum to
    1, `iterations` times.
    """

    def columns(matrix: jax.Array) -> jax.Array:
        return matrix / (jnp.sum(matrix, axis=-2, keepdims=True) + EPSILON)

    def rows_and_columns(_: object, matrix: jax.Array) -> jax.Array:
        return columns(matrix / (jnp.sum(matrix, axis=-1, keepdims=True) + EPSILON))

    # The softmax is the first normalisation of rows.
    matrix = columns(jax.nn.softmax(logits, axis=-1) + EPSILON)
    return jax.lax.fori_loop(0, iterations - 1, rows_and_columns, matrix)


def expand(x: jax.Array, streams: int) -> jax.Array:
    """[B, S, E] -> `streams` copies [B, S, k, E], before the first layer."""
    return jnp.repeat(x[..., None, :], streams, axis=-2)


def collapse(streams: jax.Array) -> jax.Array:
    """[B, S, k, E] -> their sum [B, S, E], after the last layer."""
    return jnp.sum(streams, axis=-2)


def build(
    spec: HyperConnectionSpec, initializer: Initializer, embed_dim: int, dtype: DTypeLike
) -> HyperConnection:
    return HyperConnection(initializer, spec, embed_dim, dtype)
