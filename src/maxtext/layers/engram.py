"""Engram: a memory of n-grams, looked up by hash and let in by a gate.

For every order n = 2..max_ngram and every head, the last n tokens of the document are hashed to a
row of a table:

    hash = XOR over k < n of id[t-k] · multiplier_k        row = hash mod (a prime of that order and head)

The multipliers are odd, below 2⁶³ / vocabulary, from default_rng(seed + 10007 · layer). A head's
prime is the next one from its order's base on that no other head of the model has. Before the start
of the document the pad id stands in. With a `Compression`, tokens that differ only in case, accents
or spaces have the same id. The rows, `head_dim` wide for each order and head, are joined to e, and
for each of the k streams x of the layer

    gate = sigmoid(sign(s) √|s|),  s = RMSNorm(x) · RMSNorm(W_key e) / √E         (W_key of that stream)
    v    = gate · W_value e                                                       (one W_value for all)
    y    = v + SiLU(causal depthwise convolution of RMSNorm(v), `kernel_size` taps, max_ngram tokens apart)

The convolution starts at zero. The caller adds y to the streams. As in the authors' code, the
projections have biases, and |s| is at least 1e-6 under the root, whose slope is infinite at 0.

The hash has 63 bits, JAX's integers 32 unless told otherwise: it is held as two words, and is what
NumPy has in int64.

Shapes: B batch, S sequence, k streams, E embedding, N = orders · heads, D head size.
"""

import hashlib
import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxtext.layers.inputs import LayerInputs
from maxtext.layers.linear import build_linear
from maxtext.layers.norms import Norm, NormSpec
from maxtext.layers.parameters import Initializer
from maxtext.sharding import constrain

LAYER_SEED = 10007  # the seeds of two layers are so far apart
Words = tuple[jax.Array, jax.Array]  # the high and the low 32 bits of a number, uint32


class Compression:
    """The compressed id of every token id. Equal tables are equal, so that specs with one can be
    compared.
    """

    def __init__(self, ids: np.ndarray):
        self.ids = np.ascontiguousarray(ids, np.int32)
        self.ids.flags.writeable = False
        self.size = int(self.ids.max()) + 1
        self.digest = hashlib.sha256(self.ids.tobytes()).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Compression) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


@dataclass(frozen=True)
class EngramSpec:
    heads: int  # for each order
    head_dim: int  # width of one looked-up row: one order, one head
    vocabulary_bases: tuple[int, ...]  # least number of rows of a head, for each order 2..max_ngram
    max_ngram: int
    kernel_size: int
    seed: int
    layer: int  # its number in the model
    vocabulary: int  # token ids
    norm: NormSpec  # rms
    layers: tuple[
        int, ...
    ] = ()  # all layers with a memory, whose primes all differ; empty: only this one
    streams: int = 1
    pad: int = 0  # the token id that stands before the start of a document
    compression: Compression | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.max_ngram < 2 or len(self.vocabulary_bases) != self.max_ngram - 1:
            raise ValueError(
                f"{len(self.vocabulary_bases)} vocabulary_bases for n-grams of 2 to {self.max_ngram} tokens"
            )
        if self.layers and self.layer not in self.layers:
            raise ValueError(
                f"layer {self.layer} is not among the layers with a memory, {self.layers}"
            )
        if self.norm.kind != "rms":
            raise ValueError(f"Engram norms with rms, not {self.norm.kind}")
        if sum(self.primes) >= 2**31:
            raise ValueError(f"a memory of {sum(self.primes)} rows; indices have 31 bits")

    @cached_property
    def primes(self) -> tuple[int, ...]:
        """Rows of each head, order by order. [N]"""
        layers = self.layers or (self.layer,)
        return head_primes(self.vocabulary_bases, self.heads, len(layers))[layers.index(self.layer)]

    @cached_property
    def multipliers(self) -> tuple[int, ...]:
        """Odd, one for each place of an n-gram; small enough for products with ids below 2⁶³."""
        size = self.compression.size if self.compression else self.vocabulary
        half = max(1, (2**63 - 1) // size // 2)
        draw = np.random.default_rng(self.seed + LAYER_SEED * self.layer).integers(
            0, half, self.max_ngram, np.int64
        )
        return tuple(2 * int(number) + 1 for number in draw)

    @property
    def memory_dim(self) -> int:
        """Of all rows that are looked up for a token."""
        return len(self.primes) * self.head_dim

    def build(self, initializer: Initializer, embed_dim: int, dtype: Any) -> "Engram":
        return Engram(initializer, self, embed_dim, dtype)


class Engram(nnx.Module):
    def __init__(self, initializer: Initializer, spec: EngramSpec, embed_dim: int, dtype: Any):
        self.spec, self.dtype = spec, dtype
        k = spec.streams
        # As wide as the embeddings of tokens start, so that memory and stream are of one size.
        rows = (sum(spec.primes), spec.head_dim)
        self.table = initializer.normal(
            "table", rows, 1 / math.sqrt(embed_dim), ("vocab", "embed_vocab")
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
        )  # last tap: now

    def __call__(self, x: jax.Array, inputs: LayerInputs) -> jax.Array:
        """[B, S, E], or [B, S, k, E], to what is to be added to it."""
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
        """Token ids [B, S] to the joined rows of their n-grams [B, S, N · D]."""
        rows = self.rows(tokens, segments)
        # Looked up before it is cast: the table is far larger than what is read of it.
        found = jnp.take(self.table[...], rows, axis=0, mode="clip").astype(self.dtype)
        found = constrain(found, "activation_batch", "activation_length", None, None)
        return found.reshape(*tokens.shape, self.spec.memory_dim)

    def rows(self, tokens: jax.Array, segments: jax.Array | None) -> jax.Array:
        """Token ids [B, S] to rows of the table [B, S, N], int32."""
        spec = self.spec
        starts = np.cumsum([0, *spec.primes[:-1]], dtype=np.int64).astype(np.int32)
        hashes = ngram_hashes(self.compressed(tokens), segments, spec.multipliers, self.pad)
        of_orders = np.array(spec.primes, np.uint32).reshape(len(hashes), spec.heads)
        found = [remainder(words, primes) for words, primes in zip(hashes, of_orders, strict=True)]
        return jnp.concatenate(found, axis=-1).astype(jnp.int32) + starts

    def compressed(self, tokens: jax.Array) -> jax.Array:
        table = self.spec.compression
        return tokens if table is None else jnp.take(jnp.asarray(table.ids), tokens, mode="clip")

    @property
    def pad(self) -> int:
        table = self.spec.compression
        return self.spec.pad if table is None else int(table.ids[self.spec.pad])

    def convolve(self, x: jax.Array, segments: jax.Array | None) -> jax.Array:
        taps = self.convolution[...].astype(jnp.float32)
        last = self.spec.kernel_size - 1
        steps = [(last - place) * self.spec.max_ngram for place in range(last + 1)]
        return jax.nn.silu(
            sum(tap * delayed(x, step, segments, 0) for tap, step in zip(taps, steps, strict=True))
        )


class StreamNorm(nnx.Module):
    """[..., k, E] normed over E, in float32, with a scale of its own for every stream."""

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


def delayed(x: jax.Array, steps: int, segments: jax.Array | None, fill: int) -> jax.Array:
    """What x [B, S, ...] was so many tokens ago, and `fill` where that was before the start of the
    document.
    """
    shape, length = x.shape, x.shape[1]

    def shift(values: jax.Array, fill: int) -> jax.Array:
        padding = [(0, 0), (steps, 0), *[(0, 0)] * (values.ndim - 2)]
        return jnp.pad(values, padding, constant_values=fill)[:, :length]

    x = shift(x, fill)
    if segments is None:
        return x
    same = segments == shift(segments, -1)
    return jnp.where(
        same.reshape(*same.shape, *[1] * (len(shape) - 2)), x, jnp.asarray(fill, x.dtype)
    )


def ngram_hashes(
    ids: jax.Array, segments: jax.Array | None, multipliers: Sequence[int], pad: int
) -> list[Words]:
    """Ids [B, S] to the hashes of the n-grams that end there, for n = 2, 3 …, one for each
    multiplier but the first.
    """
    hashes: list[Words] = []
    high, low = wide_product(ids.astype(jnp.uint32), multipliers[0])
    for steps, multiplier in enumerate(multipliers[1:], start=1):
        more_high, more_low = wide_product(
            delayed(ids, steps, segments, pad).astype(jnp.uint32), multiplier
        )
        high, low = high ^ more_high, low ^ more_low
        hashes.append((high, low))
    return hashes


def wide_product(numbers: jax.Array, factor: int) -> Words:
    """uint32 times a factor below 2⁶⁴, modulo 2⁶⁴: schoolbook multiplication in halves of 16
    bits.
    """
    low, high = factor & 0xFFFFFFFF, factor >> 32
    small, large = numbers & 0xFFFF, numbers >> 16
    factor_small, factor_large = np.uint32(low & 0xFFFF), np.uint32(low >> 16)
    middle = large * factor_small + (small * factor_small >> 16)
    carry = (middle >> 16) + (small * factor_large + (middle & 0xFFFF) >> 16)
    return numbers * np.uint32(high) + large * factor_large + carry, numbers * np.uint32(low)


def remainder(words: Words, moduli: np.ndarray) -> jax.Array:
    """Numbers [...] of two words modulo each of the moduli [h], all below 2³¹: [..., h], uint32.

    Digit by digit from the top, with digits so short that remainder and next digit fit into 32
    bits.
    """
    high, low = (word[..., None] for word in words)
    digit = 32 - int(moduli.max()).bit_length()
    rest = high % moduli
    place = 32
    while place > 0:
        bits = min(digit, place)
        place -= bits
        rest = ((rest << bits) | ((low >> place) & ((1 << bits) - 1))) % moduli
    return rest


@lru_cache
def head_primes(bases: tuple[int, ...], heads: int, layers: int) -> tuple[tuple[int, ...], ...]:
    """For each layer, order by order, the rows of each head: the first primes from the base on that
    are still free.
    """
    taken: set[int] = set()
    found = []
    for _ in range(layers):
        primes = []
        for base in bases:
            candidate = base
            for _ in range(heads):
                while candidate in taken or not is_prime(candidate):
                    candidate += 1
                taken.add(candidate)
                primes.append(candidate)
        found.append(tuple(primes))
    return tuple(found)


def is_prime(number: int) -> bool:
    if number < 4 or number % 2 == 0:
        return number in (2, 3)
    return all(number % divisor for divisor in range(3, math.isqrt(number) + 1, 2))


def compressed_ids(texts: Sequence[str]) -> np.ndarray:
    """For the text of every token the number of its class, int32: classes ignore case, accents and
    outer spaces.

    A token that is no text of its own, part of a character's bytes (it decodes to �), is a class by
    itself.
    """
    numbers: dict[str | int, int] = {}
    keys = (place if "\ufffd" in text else canonical(text) for place, text in enumerate(texts))
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int32)


def canonical(text: str) -> str:
    """Compatibility form without accents, in lower case, spaces joined and those around it dropped.

    What nothing is left of stays as it is, and spaces alone are one space.
    """
    plain = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    plain = "".join(letter for letter in plain if unicodedata.category(letter) != "Mn").lower()
    plain = re.sub(r"[ \t\r\n]+", " ", plain)
    return plain if plain == " " else plain.strip() or text
