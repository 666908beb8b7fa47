"""The spec of an n-gram memory, with the sizes of its tables and the multipliers of its hashes."""

import hashlib
import math
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from maxtext.layers.specs.norm import NormSpec
from maxtext.layers.specs.spec import Spec

LAYER_SEED = 10007  # the difference between the seeds of consecutive layers


class Compression:
    """The compressed id of every token id. Compared and hashed by value, for specs that hold
    one.
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
class EngramSpec(Spec):
    module = "maxtext.layers.engram"

    heads: int  # for each order
    head_dim: int  # of a row of the table: one order, one head
    vocabulary_bases: tuple[int, ...]  # minimum rows of a head, for each order 2..max_ngram
    max_ngram: int
    kernel_size: int
    seed: int
    layer: int  # its index in the model
    vocabulary: int  # number of token ids
    norm: NormSpec  # rms
    layers: tuple[int, ...] = ()  # all Engram layers, whose primes all differ; empty: only this
    streams: int = 1  # residual streams
    pad: int = 0  # the token id before the start of a document
    compression: Compression | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.max_ngram < 2 or len(self.vocabulary_bases) != self.max_ngram - 1:
            raise ValueError(
                f"{len(self.vocabulary_bases)} vocabulary_bases for n-grams of 2 to "
                f"{self.max_ngram} tokens"
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
        """[N]: the rows of each head, order by order."""
        layers = self.layers or (self.layer,)
        return head_primes(self.vocabulary_bases, self.heads, len(layers))[layers.index(self.layer)]

    @cached_property
    def multipliers(self) -> tuple[int, ...]:
        """Odd, one for each token of an n-gram; products with ids stay below 2⁶³."""
        vocabulary = self.compression.size if self.compression else self.vocabulary
        half = max(1, (2**63 - 1) // vocabulary // 2)
        draw = np.random.default_rng(self.seed + LAYER_SEED * self.layer).integers(
            0, half, self.max_ngram, np.int64
        )
        return tuple(2 * int(value) + 1 for value in draw)

    @property
    def memory_dim(self) -> int:
        """The dimension of all rows of a token."""
        return len(self.primes) * self.head_dim


@lru_cache
def head_primes(bases: tuple[int, ...], heads: int, layers: int) -> tuple[tuple[int, ...], ...]:
    """For each layer, order by order, the rows of each head: the first unused primes from the base
    on.
    """
    used: set[int] = set()
    layer_primes = []
    for _ in range(layers):
        primes = []
        for base in bases:
            candidate = base
            for _ in range(heads):
                while candidate in used or not is_prime(candidate):
                    candidate += 1
                used.add(candidate)
                primes.append(candidate)
        layer_primes.append(tuple(primes))
    return tuple(layer_primes)


def is_prime(number: int) -> bool:
    if number < 4 or number % 2 == 0:
        return number in (2, 3)
    return all(number % divisor for divisor in range(3, math.isqrt(number) + 1, 2))
