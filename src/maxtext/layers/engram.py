"""Engram: a hashed n-gram memory, added to the residual through a gate.

For every order n = 2..max_ngram and every head, the last n tokens of the document are hashed to a
row of a table:

    hash = XOR over k < n of id[t-k] · multiplier_k
    row  = hash mod (the prime of that order and head)

The multipliers are odd, below 2⁶³ / vocabulary, from default_rng(seed + 10007 · layer). The prime
of a head is the first from its order's base on that no other head of the model has. Before the
start of a document the id is `pad`. With a `Compression`, tokens that differ only in case, accents
or spaces have the same id. The rows of all orders and heads, of `head_dim` each, are concatenated
to e, and for each of the k residual streams x of the layer

    gate = sigmoid(sign(s) √|s|),   s = RMSNorm(x) · RMSNorm(W_key e) / √E     (a W_key a stream)
    v    = gate · W_value e                                                    (one W_value)
    y    = v + SiLU(causal depthwise convolution of RMSNorm(v))

The convolution has `kernel_size` taps with a dilation of max_ngram tokens, and is initialised to
zero. The caller adds y to the residual streams. As in the authors' code, the projections have
biases, and |s| is at least 1e-6 under the root, whose slope is infinite at 0.

The hash has 63 bits, and JAX's integers have 32 by default: it is computed as two 32-bit words, and
equals NumPy's int64 result.

Shapes: B batch, S sequence, k residual streams, E embed_dim, N = orders · heads, D head_dim.
"""

import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from maxtext.layers.inputs import LayerInputs
from maxtext.layers.linear import build_linear
from maxtext.layers.norms import Norm
from maxtext.layers.parameters import Initializer
from maxtext.layers.specs import EngramSpec, NormSpec
from maxtext.sharding import constrain

Uint64 = tuple[jax.Array, jax.Array]  # the high and the low 32 bits, uint32


class Engram(nnx.Module):
    def __init__(
        self, initializer: Initializer, spec: EngramSpec, embed_dim: int, dtype: DTypeLike
    ):
        self.spec = spec
        self.dtype = dtype
        k = spec.streams
        # The initial scale of token embeddings, so that memory and residual have the same scale.
        shape = (sum(spec.primes), spec.head_dim)
        self.table = initializer.normal(
            "table", shape, 1 / math.sqrt(embed_dim), ("vocab", "embed_vocab"), cast_to=dtype
        )
        self.key = build_linear(
            initializer,
            "key",
            in_shape=(spec.memory_dim,),
            out_shape=(k, embed_dim),
            axes=("engram_dim", "mhc", "embed"),
            dtype=dtype,
            bias=True,
        )
        self.value = build_linear(
            initializer,
            "value",
            in_shape=(spec.memory_dim,),
            out_shape=(embed_dim,),
            axes=("engram_dim", "embed"),
            dtype=dtype,
            bias=True,
        )
        self.key_norm = StreamNorm(initializer, spec.norm, k, embed_dim)
        self.query_norm = StreamNorm(initializer, spec.norm, k, embed_dim)
        self.convolution_norm = StreamNorm(initializer, spec.norm, k, embed_dim)
        self.convolution = initializer.constant(
            (spec.kernel_size, k, embed_dim), 0.0, (None, "mhc", "norm")
        )  # the last tap is the current token

    def __call__(self, x: jax.Array, inputs: LayerInputs) -> jax.Array:
        """x [B, S, E] or [B, S, k, E] -> y, which the caller adds to it."""
        if inputs.tokens is None:
            raise ValueError("an Engram layer needs the token ids, LayerInputs.tokens")
        streams = x if x.ndim == 4 else x[:, :, None]
        memory = self.lookup(inputs.tokens, inputs.segments)
        key, query = self.key_norm(self.key(memory)), self.query_norm(streams)
        score = jnp.sum(key * query, axis=-1) / math.sqrt(x.shape[-1])
        gate = jax.nn.sigmoid(jnp.sign(score) * jnp.sqrt(jnp.maximum(jnp.abs(score), 1e-6)))
        value = gate[..., None] * self.value(memory).astype(jnp.float32)[:, :, None]
        y = value + self.convolve(self.convolution_norm(value), inputs.segments)
        return checkpoint_name(y.astype(self.dtype).reshape(x.shape), "engram")

    def lookup(self, tokens: jax.Array, segments: jax.Array | None) -> jax.Array:
        """Token ids [B, S] -> the concatenated rows of their n-grams [B, S, N · D]."""
        rows = self.rows(tokens, segments)
        # Cast after the lookup: the table is far larger than the rows that are read.
        memory = jnp.take(self.table[...], rows, axis=0, mode="clip").astype(self.dtype)
        memory = constrain(memory, "activation_batch", "activation_length", None, None)
        return memory.reshape(*tokens.shape, self.spec.memory_dim)

    def rows(self, tokens: jax.Array, segments: jax.Array | None) -> jax.Array:
        """Token ids [B, S] -> row indices into the table [B, S, N], int32."""
        spec = self.spec
        starts = np.cumsum([0, *spec.primes[:-1]], dtype=np.int64).astype(np.int32)
        hashes = ngram_hashes(self.compress(tokens), segments, spec.multipliers, self.pad)
        primes = np.array(spec.primes, np.uint32).reshape(len(hashes), spec.heads)
        rows = [mod_uint64(value, moduli) for value, moduli in zip(hashes, primes, strict=True)]
        return jnp.concatenate(rows, axis=-1).astype(jnp.int32) + starts

    def compress(self, tokens: jax.Array) -> jax.Array:
        table = self.spec.compression
        return tokens if table is None else jnp.take(jnp.asarray(table.ids), tokens, mode="clip")

    @property
    def pad(self) -> int:
        table = self.spec.compression
        return self.spec.pad if table is None else int(table.ids[self.spec.pad])

    def convolve(self, x: jax.Array, segments: jax.Array | None) -> jax.Array:
        taps = self.convolution[...].astype(jnp.float32)
        last = self.spec.kernel_size - 1
        delays = [(last - tap) * self.spec.max_ngram for tap in range(last + 1)]
        return jax.nn.silu(
            sum(tap * shift(x, delay, segments, 0) for tap, delay in zip(taps, delays, strict=True))
        )


class StreamNorm(nnx.Module):
    """The norm of [..., k, E] over E, in float32, with a separate scale for every residual
    stream.
    """

    def __init__(self, initializer: Initializer, spec: NormSpec, streams: int, embed_dim: int):
        self.offset = 1.0 if spec.offset else 0.0
        self.norm = Norm(initializer, replace(spec, scaled=False), embed_dim, jnp.float32)
        self.scale = (
            initializer.constant((streams, embed_dim), 1.0 - self.offset, ("mhc", "norm"))
            if spec.scaled
            else None
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.norm(x)
        return x if self.scale is None else x * (self.scale[...].astype(jnp.float32) + self.offset)


def shift(x: jax.Array, steps: int, segments: jax.Array | None, fill: int) -> jax.Array:
    """x [B, S, ...] of `steps` tokens before, and `fill` before the start of the document."""
    shape, length = x.shape, x.shape[1]

    def shift_row(values: jax.Array, fill: int) -> jax.Array:
        padding = [(0, 0), (steps, 0), *[(0, 0)] * (values.ndim - 2)]
        return jnp.pad(values, padding, constant_values=fill)[:, :length]

    x = shift_row(x, fill)
    if segments is None:
        return x
    same = segments == shift_row(segments, -1)
    return jnp.where(
        same.reshape(*same.shape, *[1] * (len(shape) - 2)), x, jnp.asarray(fill, x.dtype)
    )


def ngram_hashes(
    ids: jax.Array, segments: jax.Array | None, multipliers: Sequence[int], pad: int
) -> list[Uint64]:
    """ids [B, S] -> the hashes of the n-grams that end at each token, for n = 2, 3, …, one for each
    multiplier but the first.
    """
    hashes: list[Uint64] = []
    high, low = multiply_uint64(ids.astype(jnp.uint32), multipliers[0])
    for steps, multiplier in enumerate(multipliers[1:], start=1):
        earlier_ids = shift(ids, steps, segments, pad).astype(jnp.uint32)
        product_high, product_low = multiply_uint64(earlier_ids, multiplier)
        high, low = high ^ product_high, low ^ product_low
        hashes.append((high, low))
    return hashes


def multiply_uint64(x: jax.Array, factor: int) -> Uint64:
    """x, uint32, times a factor below 2⁶⁴, modulo 2⁶⁴: long multiplication of 16-bit halves."""
    low, high = factor & 0xFFFFFFFF, factor >> 32
    small, large = x & 0xFFFF, x >> 16
    factor_small, factor_large = np.uint32(low & 0xFFFF), np.uint32(low >> 16)
    middle = large * factor_small + (small * factor_small >> 16)
    carry = (middle >> 16) + (small * factor_large + (middle & 0xFFFF) >> 16)
    return x * np.uint32(high) + large * factor_large + carry, x * np.uint32(low)


def mod_uint64(value: Uint64, moduli: np.ndarray) -> jax.Array:
    """value [...] modulo each of the moduli [h], all below 2³¹: [..., h], uint32.

    Long division from the highest digit, with digits so short that a remainder and the next digit
    fit into 32 bits.
    """
    high, low = (word[..., None] for word in value)
    digit = 32 - int(moduli.max()).bit_length()
    remainder = high % moduli
    shift_bits = 32
    while shift_bits > 0:
        bits = min(digit, shift_bits)
        shift_bits -= bits
        next_digit = (low >> shift_bits) & ((1 << bits) - 1)
        remainder = ((remainder << bits) | next_digit) % moduli
    return remainder


def compressed_ids(texts: Sequence[str]) -> np.ndarray:
    """For the text of every token the index of its class, int32: classes ignore case, accents and
    outer spaces.

    A token that is part of a character's bytes (it decodes to �) is a class of its own.
    """
    classes: dict[str | int, int] = {}
    keys = (index if "\ufffd" in text else canonical(text) for index, text in enumerate(texts))
    return np.array([classes.setdefault(key, len(classes)) for key in keys], np.int32)


def canonical(text: str) -> str:
    """Compatibility form (NFKC) without accents, in lower case, with single spaces and none around
    it.

    A text that would become empty does not change; spaces alone become one space.
    """
    plain = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    plain = "".join(letter for letter in plain if unicodedata.category(letter) != "Mn").lower()
    plain = re.sub(r"[ \t\r\n]+", " ", plain)
    return plain if plain == " " else plain.strip() or text


def build(spec: EngramSpec, initializer: Initializer, embed_dim: int, dtype: DTypeLike) -> Engram:
    return Engram(initializer, spec, embed_dim, dtype)
