"""Rotary position embeddings (RoPE): pairs of a head's dimensions rotate by an angle proportional
to the position.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.layers.specs import RopeSpec


def frequencies(spec: RopeSpec, head_dim: int) -> np.ndarray:
    """Radians a position, one for each pair."""
    size = spec.rotated(head_dim)
    fraction = np.arange(0, size, 2, dtype=np.float64) / size
    plain = 1.0 / (spec.min_timescale * (spec.max_timescale / spec.min_timescale) ** fraction)
    if spec.proportional:
        plain[int(spec.fraction * head_dim // 2) :] = 0.0
    if spec.kind == "llama3.1":
        return llama31(spec, plain)
    if spec.kind == "yarn":
        return yarn(spec, plain, size)
    if spec.kind == "longrope":
        return plain / np.asarray(spec.long_factors if spec.long else spec.short_factors)
    return plain / spec.linear_factor


def llama31(spec: RopeSpec, plain: np.ndarray) -> np.ndarray:
    rotations = spec.original_length * plain / (2 * math.pi)  # over the original length
    # Llama 4 has no transition between low and high frequencies.
    transition = max(spec.high_frequency_factor - spec.low_frequency_factor, 1e-9)
    # 0: low frequency, divided by the factor; 1: high frequency, unchanged
    smooth = np.clip((rotations - spec.low_frequency_factor) / transition, 0.0, 1.0)
    return (1 - smooth) * plain / spec.factor + smooth * plain


def yarn(spec: RopeSpec, plain: np.ndarray, size: int) -> np.ndarray:
    def pair_with_rotations(rotations: float) -> float:
        """The (fractional) pair that makes this many rotations over the original length."""
        length = spec.original_length / (rotations * 2 * math.pi)
        return size * math.log(length) / (2 * math.log(spec.max_timescale))

    low, high = pair_with_rotations(spec.beta_fast), pair_with_rotations(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = np.clip(
        (np.arange(size // 2) - low) / max(high - low, 0.001), 0.0, 1.0
    )  # 0: fast, unchanged
    return ramp * plain / spec.factor + (1 - ramp) * plain


def rope_cos_sin(
    positions: jax.Array, spec: RopeSpec, head_dim: int
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [B, S, 1, pairs] at positions [B, S], in float32, times the magnitude."""
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies(spec, head_dim).astype(
        np.float32
    )
    return jnp.cos(angles) * spec.magnitude, jnp.sin(angles) * spec.magnitude


def apply_rope(x: jax.Array, positions: jax.Array, spec: RopeSpec) -> jax.Array:
    """x [B, S, H, D] rotated by positions [B, S]; in float32, returned in x's dtype."""
    dim = spec.rotated(x.shape[-1])
    cos, sin = rope_cos_sin(positions, spec, x.shape[-1])
    rotated = rotate_pairs(x[..., :dim], cos, sin, spec.interleave)
    rest = x[..., dim:]
    return jnp.concatenate([rotated, rest], axis=-1) if rest.shape[-1] else rotated


def rotate_pairs(
    x: jax.Array, cos: jax.Array, sin: jax.Array, interleave: bool = False
) -> jax.Array:
    """x [..., H, 2 pairs], each pair rotated by an angle; cos and sin [..., 1, pairs]."""
    wide = x.astype(jnp.float32)
    first, second = (
        (wide[..., 0::2], wide[..., 1::2]) if interleave else jnp.split(wide, 2, axis=-1)
    )
    pair = first * cos - second * sin, second * cos + first * sin
    if interleave:
        return jnp.stack(pair, axis=-1).reshape(x.shape).astype(x.dtype)
    return jnp.concatenate(pair, axis=-1).astype(x.dtype)
