"""Random numbers for initial weights: a hash of the key and of each element's place.

Unlike a counter-based generator of cryptographic make (Threefry), it is a few integer operations an
element, so a program that initialises a model compiles several times faster. It depends on nothing
but key and place: the same numbers on every platform and mesh, element by element, and under vmap;
a sharded array is made shard by shard.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

GOLDEN = np.uint32(0x9E3779B9)  # 2^32 / golden ratio: keeps small neighbouring numbers far apart


def mix(bits: Array) -> Array:
    """Every bit of the result depends on every bit of the argument (a 32-bit multiply-xorshift
    finaliser).
    """
    bits = (bits ^ (bits >> 16)) * np.uint32(0x21F0AAAD)
    bits = (bits ^ (bits >> 15)) * np.uint32(0x735A2D97)
    return bits ^ (bits >> 15)


def seed_key(seed: int) -> Array:
    """Two words from a seed of any size."""
    low, high = np.uint32(seed & 0xFFFFFFFF), np.uint32((seed >> 32) & 0xFFFFFFFF)
    return fold(jnp.stack([jnp.uint32(low), jnp.uint32(high)]), 0)


@jax.jit  # traced once, however many keys are made
def fold(key: Array, number: int | Array) -> Array:
    """A new key for each number."""
    first = mix(key[0] ^ (jnp.asarray(number).astype(jnp.uint32) + GOLDEN))
    second = mix(key[1] + first * GOLDEN)
    return jnp.stack([mix(first ^ second), second])


def random_bits(key: Array, shape: tuple[int, ...]) -> Array:
    bits = jnp.broadcast_to(key[0], shape)
    for axis in range(len(shape)):
        place = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        bits = mix((bits ^ key[1]) + (place + np.uint32(axis + 1)) * GOLDEN)
    return bits


def open_interval(bits: Array) -> Array:
    """32 random bits as float32 in the open interval (-1, 1), symmetric about 0.

    Of 23 bits and a half, so that all 24 digits of the format are used and none is rounded: not
    even to the ends.
    """
    return ((bits >> 9).astype(jnp.float32) + np.float32(0.5)) / np.float32(2**22) - np.float32(1.0)


@partial(jax.jit, static_argnames=("shape", "cut"))
def normal(key: Array, shape: tuple[int, ...], cut: float | None = None) -> Array:
    """Standard normal, float32; with `cut` the part of it between -cut and cut."""
    # To the compiler a number that it is given, not one that it knows: then equal weights of all
    # layers are one kernel.
    key = jax.lax.optimization_barrier(key)
    edge = np.float32(1.0 if cut is None else math.erf(cut / math.sqrt(2)))
    return np.float32(math.sqrt(2)) * jax.lax.erf_inv(open_interval(random_bits(key, shape)) * edge)
