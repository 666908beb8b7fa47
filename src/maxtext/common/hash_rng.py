"""Random numbers for initial weights and for sampling: a hash of the key and of each element's
index.

A hash of a few integer operations per element compiles several times faster than a counter-based
cryptographic generator (Threefry) when a program initializes a whole model, and sampling a token
from its logits takes a GPU two thirds of the time. An element depends on nothing but the key and
its index: the numbers are the same on every platform and mesh and under vmap, and a sharded array
is generated shard by shard.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

GOLDEN = np.uint32(0x9E3779B9)  # 2^32 / golden ratio: spreads small consecutive integers


def mix_bits(bits: Array) -> Array:
    """A 32-bit multiply-xorshift finalizer: all result bits depend on all argument bits."""
    bits = (bits ^ (bits >> 16)) * np.uint32(0x21F0AAAD)
    bits = (bits ^ (bits >> 15)) * np.uint32(0x735A2D97)
    return bits ^ (bits >> 15)


def key_from_seed(seed: int) -> Array:
    """A key, uint32[2], from the low 64 bits of a seed."""
    low, high = np.uint32(seed & 0xFFFFFFFF), np.uint32((seed >> 32) & 0xFFFFFFFF)
    return fold_in(jnp.stack([jnp.uint32(low), jnp.uint32(high)]), 0)


@jax.jit  # traced once, however many keys there are
def fold_in(key: Array, data: int | Array) -> Array:
    """A new key for each value of `data`."""
    first = mix_bits(key[0] ^ (jnp.asarray(data).astype(jnp.uint32) + GOLDEN))
    second = mix_bits(key[1] + first * GOLDEN)
    return jnp.stack([mix_bits(first ^ second), second])


def random_bits(key: Array, shape: tuple[int, ...]) -> Array:
    """Uniform uint32 of a shape."""
    bits = jnp.broadcast_to(key[0], shape)
    for axis in range(len(shape)):
        index = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        bits = mix_bits((bits ^ key[1]) + (index + np.uint32(axis + 1)) * GOLDEN)
    return bits


def open_interval(bits: Array) -> Array:
    """32 random bits as float32 in the open interval (-1, 1), symmetric about 0.

    Uses 23 bits plus one half, which fills the 24-bit significand exactly: nothing is rounded, not
    even to the ends.
    """
    return ((bits >> 9).astype(jnp.float32) + np.float32(0.5)) / np.float32(2**22) - np.float32(1.0)


def gumbel(key: Array, shape: tuple[int, ...]) -> Array:
    """Standard Gumbel float32: −log E, where E has an exponential distribution.

    The largest values decide which token is sampled. They come from the smallest of E, down to
    2^-33, which have all bits of their precision. All values are finite.
    """
    # Hashed twice: the bits of two keys must not be shifted copies of each other.
    bits = mix_bits(random_bits(key, shape) ^ key[1])
    uniform = (bits.astype(jnp.float32) + np.float32(0.5)) * np.float32(2**-32)
    uniform = jnp.minimum(uniform, np.float32(1 - 2**-24))  # rounding may give 1
    return -jnp.log(-jnp.log1p(-uniform))


@partial(jax.jit, static_argnames=("shape", "truncation"))
def normal(key: Array, shape: tuple[int, ...], truncation: float | None = None) -> Array:
    """Standard normal float32, truncated to [-truncation, truncation] if that is given."""
    # The barrier hides the key's value from the compiler, so that weights of one shape in all
    # layers share one GPU kernel.
    key = jax.lax.optimization_barrier(key)
    bound = np.float32(1.0 if truncation is None else math.erf(truncation / math.sqrt(2)))
    uniform = open_interval(random_bits(key, shape)) * bound
    return np.float32(math.sqrt(2)) * jax.lax.erf_inv(uniform)
