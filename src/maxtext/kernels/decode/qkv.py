"""Queries, keys and values of a decode step, from their packed projection: split into heads, with
norms and RoPE, by one kernel, where XLA launches five. A Pallas kernel for NVIDIA GPUs, lowered by
Triton.

Shapes: B rows, H query heads, K key/value heads, D head_dim, P rotated pairs of a head.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

MAX_HEADS_PER_PROGRAM = 8


@dataclass(frozen=True)
class HeadNorm:
    """The RMS norm of a head, times scale + offset; scale [D] or [heads, D], None: no scale."""

    epsilon: float
    scale: Array | None = None
    offset: float = 0.0


@dataclass(frozen=True)
class Rope:
    """cos and sin [B, P]; pairs are halves of the first 2 P dimensions, or neighbours."""

    cos: Array
    sin: Array
    interleave: bool = False


@dataclass(frozen=True)
class QkvNorms:
    query: HeadNorm | None = None
    key: HeadNorm | None = None
    value: HeadNorm | None = None
    after_rope: bool = False  # of queries and keys

    @property
    def by_part(self) -> tuple[HeadNorm | None, HeadNorm | None, HeadNorm | None]:
        return self.query, self.key, self.value


def split_qkv(
    x: Array,
    heads: tuple[int, int],
    rope: Rope | None,
    norms: QkvNorms | None = None,
    shared_kv: bool = False,
    interpret: bool = False,
) -> list[Array]:
    """q [B, H, D], k and v [B, K, D] of packed projections x [B, (H + 2 K) D]; `heads` is (H, K).
    RoPE is applied to queries and keys. `shared_kv`: x has no values, which are the projected keys.
    """
    norms = norms or QkvNorms()
    q_heads, kv_heads = heads
    batch, head_dim = len(x), x.shape[1] // (q_heads + (1 if shared_kv else 2) * kv_heads)
    # A power of two, of which queries, keys and values have whole multiples.
    per_program = math.gcd(q_heads, kv_heads, MAX_HEADS_PER_PROGRAM)
    scales = [None if norm is None else norm.scale for norm in norms.by_part]
    angles = [] if rope is None else [rope.cos, rope.sin]
    arrays = [*angles, *(scale for scale in scales if scale is not None)]
    begins = (0, q_heads, q_heads + kv_heads)

    def run(x_ref: Ref, *refs: Ref) -> None:
        *inputs, q_ref, k_ref, v_ref = refs
        angle_refs, scale_refs = inputs[: len(angles)], iter(inputs[len(angles) :])
        scale_of = [None if scale is None else next(scale_refs) for scale in scales]
        first = pl.program_id(1) * per_program
        for part, (begin, out_ref) in enumerate(zip(begins, (q_ref, k_ref, v_ref), strict=True)):
            row = first - begin  # of the output
            source = first - (kv_heads if shared_kv and part == 2 else 0)
            has_rope = rope is not None and part < 2
            finish = head_function(
                x_ref,
                source + jnp.arange(per_program),
                row + jnp.arange(per_program),
                angle_refs if has_rope else (),
                rope is not None and rope.interleave,
                norms.by_part[part],
                scale_of[part],
                norms.after_rope and part < 2,
            )

            @pl.when((row >= 0) & (row < out_ref.shape[0]))
            def _(out_ref: Ref = out_ref, row: Array = row, finish: Callable = finish) -> None:
                out_ref[pl.ds(row, per_program), :] = finish().astype(out_ref.dtype)

    counts = (q_heads, kv_heads, kv_heads)
    by_row = [pl.BlockSpec((None, array.shape[1]), lambda b, h: (b, 0)) for array in angles]
    whole = [
        pl.BlockSpec(array.shape, lambda b, h, ndim=array.ndim: (0,) * ndim)
        for array in arrays[len(angles) :]
    ]
    return pl.pallas_call(
        run,
        grid=(batch, sum(counts) // per_program),
        in_specs=[
            pl.BlockSpec((None, x.shape[1] // head_dim, head_dim), lambda b, h: (b, 0, 0)),
            *by_row,
            *whole,
        ],
        out_specs=[
            pl.BlockSpec((None, count, head_dim), lambda b, h: (b, 0, 0)) for count in counts
        ],
        out_shape=[jax.ShapeDtypeStruct((batch, count, head_dim), x.dtype) for count in counts],
        interpret=interpret,
        name="split_qkv",
        compiler_params=triton.CompilerParams(num_warps=1, num_stages=1),
    )(x.reshape(batch, -1, head_dim), *arrays)


def head_function(
    x_ref: Ref,
    rows: Array,
    heads: Array,
    angles: Sequence[Ref],
    interleave: bool,
    norm: HeadNorm | None,
    scale_ref: Ref | None,
    norm_after_rope: bool,
) -> Callable[[], Array]:
    """In a kernel: a function that computes heads [per_program, D] in float32, of rows of x_ref.
    `heads` are their indices in the scales of the norm."""
    head_dim = x_ref.shape[1]
    column = jnp.arange(head_dim)

    def load(at: Array) -> Array:
        return x_ref[rows[:, None], at[None, :]].astype(jnp.float32)

    def scaled(x: Array, at: Array) -> Array:
        if norm is None or scale_ref is None:
            return x
        if len(scale_ref.shape) == 2:
            scale = scale_ref[heads[:, None], at[None, :]]
        else:
            scale = scale_ref[at][None]
        return x * (scale.astype(jnp.float32) + norm.offset)

    def run() -> Array:
        x = load(column)
        factor = jnp.ones((1, 1), jnp.float32)
        if norm is not None:
            # RoPE preserves the norm, so that it can be computed before.
            factor = jax.lax.rsqrt((x * x).sum(axis=1, keepdims=True) / head_dim + norm.epsilon)
        x = x * factor if norm_after_rope else scaled(x * factor, column)
        if angles:
            cos_ref, sin_ref = angles
            pairs = cos_ref.shape[0]
            partner, angle, sign = pairs_of(column, pairs, interleave)
            rotates = (column < 2 * pairs)[None]
            other = load(partner) * factor
            other = other if norm_after_rope else scaled(other, partner)
            cos, sin = cos_ref[angle][None], (sin_ref[angle] * sign)[None]
            x = jnp.where(rotates, x * cos + other * sin, x)
        return scaled(x, column) if norm_after_rope else x

    return run


def pairs_of(column: Array, pairs: int, interleave: bool) -> tuple[Array, Array, Array]:
    """The other dimension of each dimension's pair, the index of its angle, and the sign of its
    sine; arbitrary for dimensions that do not rotate."""
    if interleave:
        is_first = column % 2 == 0
        partner, angle = jnp.where(is_first, column + 1, column - 1), column // 2
    else:
        is_first = column < pairs
        partner, angle = jnp.where(is_first, column + pairs, column - pairs), column % pairs
    rotates = column < 2 * pairs
    partner = jnp.where(rotates, partner, column)
    return partner, jnp.minimum(angle, pairs - 1), jnp.where(is_first, -1.0, 1.0)
